"""Experts on several processes against all of them on one: the same losses, weights, offsets and penalty.

Everything is in float64 on the CPU with gloo. Batches are uneven (a process may have none), tokens are masked, and the
loss is a sum over all of them, so that one process that sees everything is the reference.
"""

import contextlib
import copy
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing import assert_close

import ermoe
from ermoe.nn import ContextAttention, context
from ermoe.nn.parallel import clip_gradients, distribute, parallelise
from ermoe.nn.sharding import by_mesh, is_sharded
from ermoe.train.compute import processes
from support.tiny_run import SPARSITY, recipe
from support.two_processes.layers import LAMBDA, assert_equal_state

NUM_EXPERTS = 4
CASES = {
    "natural": {},
    "collapsed": {"expected": "one process"},
    "empty": {"expected": "nothing"},
    "pruned": {"below_threshold": "prune", "threshold": 0.4, "balance": "mean", "gated": True},
    "capacity": {"capacity_factor": 0.6, "score": "prototype", "shared_dim": 8},
    "own-basis": {"experts": "dense", "score": "energy"},
    "expert-choice": {"router": "expert-choice", "noise_std": 0.0},
    "soft": {"router": "soft", "slots_per_expert": 2},
}
QUICK = ("natural", "collapsed", "empty", "pruned", "expert-choice")


class Block(nn.Module):
    """One transformer block whose tokens may be padding."""

    def __init__(self, router="eigen", **options):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.attention = ContextAttention(16, num_heads=2)
        self.moe = ermoe.build_layer(router, 16, 24, num_experts=NUM_EXPERTS, **options)

    def forward(self, x, mask):
        attended, alpha = self.attention(self.norm1(x), need_weights=True)
        z = self.norm2(x + attended)
        return x + attended + self.moe(z, context(alpha, z), mask)


class Network(nn.Module):
    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(**options) for _ in range(2))

    def forward(self, x, mask):
        for block in self.blocks:
            x = block(x, mask)
        return x


def model(expected=None, **options):
    network = Network(**options).double()
    if expected == "one process":
        for block in network.blocks:
            block.moe.router.balance.offset_E[:2] = 5.0
    return network


def batch(step, expected=None):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(9, 5, 16, dtype=torch.float64, generator=generator)
    mask = torch.rand(9, 5, generator=generator) < (0.0 if expected == "nothing" else 0.8)
    return x, mask


def own_part(rows, rank, num_processes):
    """Of nine images: the last process has none if there are more than two."""
    sizes = {1: [9], 2: [7, 2], 4: [4, 2, 3, 0]}[num_processes]
    return [part.split(sizes)[rank] for part in rows]


def train(network, own, steps, expected, rank=0, num_processes=1):
    """AdamW with everything that belongs to a step; returns loss, penalty and gradient norm of each."""
    parts = by_mesh(own.parameters())
    optimizer = torch.optim.AdamW([{"params": part} for part in parts], lr=1e-2)
    figures = []
    for step in range(steps):
        x, mask = own_part(batch(step, expected), rank, num_processes)
        loss = network(x, mask).square().sum() / 100 * num_processes
        penalty = ermoe.orthogonality_loss(own)
        optimizer.zero_grad()
        (loss + LAMBDA * penalty + ermoe.auxiliary_loss(own)).backward()
        norm = clip_gradients(own, 0.5)
        optimizer.step()
        ermoe.update_balance(own)
        if (step + 1) % 3 == 0:
            ermoe.retract(own)
        figures.append(torch.stack([loss.detach() / num_processes, penalty.detach(), norm]))
    return torch.stack(figures)


@contextlib.contextmanager
def alone():
    """As a process of its own would run it."""
    initialized, dist.is_initialized = dist.is_initialized, lambda: False
    try:
        yield
    finally:
        dist.is_initialized = initialized


def check(case, axes, sizes, group, steps=4):
    options = CASES[case]
    expected = options.get("expected")
    single, double = model(**options), model(**options)
    network = distribute(double, init_device_mesh("cpu", sizes, mesh_dim_names=axes))
    weight = next(double.blocks[0].moe.experts.parameters())
    assert weight.to_local().shape[0] == NUM_EXPERTS // (group.num if axes[0] != "replicate" else sizes[-1])
    found = train(network, double, steps, expected, group.rank, group.num)
    losses = found[:, 0].clone()
    dist.all_reduce(losses)
    found[:, 0] = losses
    with alone():
        wanted = train(single, single, steps, expected)
    assert_close(found, wanted, rtol=0, atol=1e-6)
    assert_equal_state(double, single)
    for name, parameter in double.named_parameters():
        if is_sharded(parameter):  # and nothing else is kept alive by its gradient
            gradient = parameter.grad.to_local()
            assert gradient.untyped_storage().nbytes() == gradient.nbytes, name


def shared_out(how, expert_processes, group):
    """A model of one process, the same model on all of them, and what wraps that for training."""
    plain = recipe({**SPARSITY, "below_threshold": "prune"}).build(4).eval()
    shared = copy.deepcopy(plain)
    return plain, shared, parallelise(shared, how, group.num, expert_processes=expert_processes)


@contextlib.contextmanager
def one_folder():
    """Of all processes."""
    with tempfile.TemporaryDirectory() as own:
        folders = [own]
        dist.broadcast_object_list(folders)
        yield Path(folders[0])
        dist.barrier()


def used(how, expert_processes, group):
    """A model that is shared out is recorded, counted, calibrated, merged and saved as any other."""
    generator = torch.Generator().manual_seed(5)
    images = [torch.randn(4, 3, 8, 8, generator=generator) for _ in range(4)]
    plain, shared, network = shared_out(how, expert_processes, group)
    assert ermoe.count(shared) == ermoe.count(plain)
    assert ermoe.calibrate(shared, images, budget=1.5) == ermoe.calibrate(plain, images, budget=1.5)
    with torch.no_grad(), ermoe.record_routing(shared) as here, alone(), ermoe.record_routing(plain) as there:
        assert_close(shared(images[group.rank]), plain(images[group.rank]))
    for name, figures in there.summary().items():
        assert_close(here.summary()[name], figures, equal_nan=True)
    with torch.no_grad():
        assert_close(ermoe.merge(network)(images[0]), plain(images[0]), atol=1e-4, rtol=1e-4)
    with one_folder() as folder:
        ermoe.save(shared, folder)
        for name, tensor in ermoe.load(folder).state_dict().items():
            assert torch.equal(tensor, plain.state_dict()[name]), name


def exported(how, expert_processes, group):
    """Together processes write one file, which has been run by the first and compared with the model."""
    _, _, network = shared_out(how, expert_processes, group)
    with one_folder() as folder:
        written = ermoe.export(network, folder / "model.pt2")
        assert written.difference < 1e-4
        assert [path.name for path in folder.iterdir()] == ["model.pt2"]


if __name__ == "__main__":  # torchrun experts.py AXIS:SIZE,… STEPS CASE…
    layout = [axis.split(":") for axis in sys.argv[1].split(",")]
    names, sizes = (tuple(part) for part in zip(*((name, int(size)) for name, size in layout), strict=True))
    torch.set_num_threads(1)
    with processes("cpu") as own_group:
        for case in sys.argv[3:]:
            if case in ("used", "exported"):
                how = "fsdp+ep" if "efsdp" in names else "ep"
                (used if case == "used" else exported)(how, sizes[-1], own_group)
            else:
                check(case, names, sizes, own_group, steps=int(sys.argv[2]))
            if own_group.is_main:
                print(f"{case} held", flush=True)
