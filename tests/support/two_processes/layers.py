"""The layer over two processes: DDP, FSDP2, balance.

Everything is in float64 on the CPU with gloo, against a single process that sees the whole batch.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ermoe.nn import ContextAttention, EigenMoE, context, orthogonality_loss, retract, update_balance
from ermoe.nn.parallel import parallelise, reshard
from ermoe.nn.sharding import unshard

LAMBDA = 1e-2


class Block(nn.Module):
    """One transformer block with an eigen mixture of experts."""

    def __init__(self, **options):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.attention = ContextAttention(16, num_heads=2)
        self.moe = EigenMoE(16, 24, num_experts=3, rank=12, **options)

    def forward(self, x):
        attended, alpha = self.attention(self.norm1(x), need_weights=True)
        x = x + attended
        z = self.norm2(x)
        return x + self.moe(z, context(alpha, z))


def model(**options):
    torch.manual_seed(0)
    return nn.Sequential(Block(**options), Block(**options)).double()


def batch():
    return torch.randn(8, 5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def train(network, rows, steps=6):
    """Steps of SGD with everything that belongs to a step; the loss is a mean over the rows given."""
    optimizer = torch.optim.SGD(network.parameters(), lr=0.2)
    for _ in range(steps):
        loss = network(rows).square().mean() + LAMBDA * orthogonality_loss(network)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        update_balance(network)
    retract(network)


def assert_equal_state(found, expected):
    for name, tensor in expected.state_dict().items():
        other = found.state_dict()[name]
        other = other.full_tensor() if isinstance(other, DTensor) else other
        torch.testing.assert_close(other, tensor, rtol=0, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


def own_rows(rank, whole):
    return whole[4 * rank : 4 * rank + 4]


def ddp(group):
    for options in (
        {},
        {"experts": "dense", "shared_dim": 20},
        {"score": "logit", "top_k": 1},
        {"score": "prototype", "balance": "mean"},
    ):
        single, double = model(**options), model(**options)
        wrapped = DistributedDataParallel(double)  # find_unused_parameters stays False
        # The single process must not join the collectives of update_balance.
        train_alone(single, batch())
        train(wrapped, own_rows(group.rank, batch()))
        assert_equal_state(double, single)


def train_alone(network, rows):
    """`train` as a process of its own would run it."""
    initialized, dist.is_initialized = dist.is_initialized, lambda: False
    try:
        train(network, rows)
    finally:
        dist.is_initialized = initialized


def ddp_with_an_idle_rank(group):
    """A rank without tokens still takes part, and the others' counts are not lost."""
    wrapped = DistributedDataParallel(model())
    rows = batch() if group.rank == 0 else batch()[:0]
    loss = wrapped(rows).square().sum()
    loss.backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in wrapped.parameters())
    update_balance(wrapped)
    assert wrapped.module[0].moe.router.balance.offset_E.any()


def ddp_accumulation(group):
    """Two forwards before an update: DDP's broadcast of buffers must not overwrite what a rank has counted."""
    single, double = model(), model()
    wrapped = DistributedDataParallel(double)
    for part in own_rows(group.rank, batch()).split(2):
        wrapped(part).sum().backward()
    update_balance(wrapped)
    initialized, dist.is_initialized = dist.is_initialized, lambda: False
    single(batch())
    update_balance(single)
    dist.is_initialized = initialized
    for mine, alone in zip(double, single, strict=True):
        torch.testing.assert_close(mine.moe.router.balance.offset_E, alone.moe.router.balance.offset_E)


def fsdp(group):
    single, double = model(shared_dim=20), model(shared_dim=20)
    mesh = init_device_mesh("cpu", (2,))
    for block in double:
        fully_shard(block, mesh=mesh)
    fully_shard(double, mesh=mesh)
    basis = double[0].moe.experts.up.U
    assert basis.to_local().shape[0] < 3, "experts are sharded on their first axis"
    train_alone(single, batch())
    train(double, own_rows(group.rank, batch()))
    assert_equal_state(double, single)
    report = retract(double)
    assert all(entry.error_after < 1e-12 for entry in report.values())
    alone = retract(single)
    assert report.keys() == alone.keys()


class Tower(nn.Module):
    """A part of a model that is used by itself, as an image tower is: weights outside of its blocks, and blocks."""

    def __init__(self):
        super().__init__()
        self.entry, self.blocks = nn.Linear(16, 16), model()

    def forward(self, x):
        return self.blocks(self.entry(x.to(self.entry.weight.dtype)))


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.visual = Tower().double()

    def forward(self, x):
        return self.visual(x)


def fsdp_in_part(group):
    """A part of a sharded model can be run alone, before the whole has run and afterwards."""
    plain, shared = Towers(), Towers()
    parallelise(shared, "fsdp", group.num)
    for network in (shared.visual, shared, shared.visual):
        unshard(shared)
        with torch.no_grad():
            torch.testing.assert_close(network(batch()), plain(batch()))
        reshard(shared)


def balance_over_uneven_batches(group):
    """Loads become equal over both processes together, whatever each of them sees."""
    generator = torch.Generator().manual_seed(10 + group.rank)
    torch.manual_seed(0)
    layer = EigenMoE(32, 32, score="prototype")
    layer.router.balance.offset_E[0] = 2.0
    centres = torch.randn(4, 32, generator=torch.Generator().manual_seed(3))
    history = []
    for _ in range(300):
        num_tokens = 1200 if group.rank == 0 else 200
        kind = torch.randint(0, 2, (num_tokens,), generator=generator) + 2 * group.rank  # other tokens on each rank
        routing = layer.route(centres[kind] + torch.randn(num_tokens, 32, generator=generator))
        layer.router.observe(routing)
        count_E = routing.count_E.double()
        dist.all_reduce(count_E)
        history.append((count_E.var(correction=0) / count_E.mean() ** 2).item())
        update_balance(layer)
    assert history[0] > 0.5
    assert max(history[-100:]) < 0.02, max(history[-100:])
    offsets = [torch.empty(8) for _ in range(2)]
    dist.all_gather(offsets, layer.router.balance.offset_E)
    assert torch.equal(*offsets)
