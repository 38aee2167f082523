"""What two processes record together."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ermoe
from ermoe.nn import EigenMoE


def model():
    generator = torch.Generator().manual_seed(0)
    return nn.Sequential(
        EigenMoE(16, 24, num_experts=4, score="energy", generator=generator),
        EigenMoE(16, 24, num_experts=4, score="prototype", capacity_factor=1.0, generator=generator),
    )


def record(network, rows, labels, previous=None):
    with torch.no_grad(), ermoe.record_routing(network, classes=3, previous=previous) as routing:
        for x, label in zip(rows, labels, strict=True):
            routing.labels(label)
            network(x)
    return routing


def assert_same(found, expected):
    for layer, figures in expected.items():
        for measure, value in figures.items():
            assert abs(found[layer][measure] - value) <= 1e-6 * max(1, abs(value)), (layer, measure, found, value)


def check(wrap, first_share):
    """The shares of both processes add up to what one process sees, also in a comparison with an earlier model."""
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randn(2, 6, 16, generator=generator) for _ in range(6)]
    labels = [torch.randint(0, 3, (2,), generator=generator) for _ in rows]
    own = slice(0, first_share) if dist.get_rank() == 0 else slice(first_share, 6)

    whole, shared = model(), wrap(model())
    before, before_shared = record(whole, rows, labels), record(shared, rows[own], labels[own])
    with torch.no_grad():
        for layer in whole:
            layer.experts.up.U.copy_(layer.experts.up.U.flip(-1))
    shared = wrap(whole_copy(whole))
    expected = record(whole, rows, labels, before).summary()
    together = record(shared, rows[own], labels[own], before_shared).reduce()
    assert expected["0"]["fluctuation"] > 0
    assert_same(together.summary(), expected)
    assert_same(together.reduce().summary(), expected)


def whole_copy(network):
    copy = model()
    copy.load_state_dict(network.state_dict())
    return copy


def shard(network):
    mesh = init_device_mesh("cpu", (2,))
    for layer in network:
        fully_shard(layer, mesh=mesh)
    return fully_shard(network, mesh=mesh)


def ddp(group):
    check(DistributedDataParallel, first_share=4)


def fsdp(group):
    """FSDP's forward passes are collective, so its processes take equally many."""
    check(shard, first_share=3)
