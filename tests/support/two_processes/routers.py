"""Every router under DDP, without find_unused_parameters.

The reference is a single process that sees each half of the batch by itself and averages the gradients; that is what
DDP promises also for methods that look at a whole batch. Noise comes from torch's generator, seeded by rank.
"""

import copy

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

import ermoe
from support.routers import build, inputs

WHOLE_BATCH = ("eigen", "loss-free", "logit")  # a step of theirs sees tokens, not batches


def half_of(batch, rank):
    return [part[4 * rank : 4 * rank + 4] for part in batch]


def gradients(layer, network, batch, seed):
    torch.manual_seed(seed)
    network.zero_grad()
    (network(*batch).square().mean() + ermoe.auxiliary_loss(layer)).backward()
    return [parameter.grad.clone() for parameter in layer.parameters()]


def check(name, options, group):
    check_gradients(name, options, group.rank)
    check_idle(name, options, group.rank)


def check_gradients(name, options, rank):
    layer = build(name, options, dtype=torch.float64)
    batch = inputs(batch=8, dtype=torch.float64)
    twin = copy.deepcopy(layer)
    network = DistributedDataParallel(layer)
    for step in range(2):  # the second step is where DDP notices parameters that the first left out
        found = gradients(layer, network, half_of(batch, rank), seed=10 * step + rank)
        halves = [gradients(twin, twin, half_of(batch, r), seed=10 * step + r) for r in range(2)]
        for mine, *theirs in zip(found, *halves, strict=True):
            assert_close(mine, sum(theirs) / 2, rtol=1e-9, atol=1e-12)
    if name in WHOLE_BATCH:
        whole = gradients(twin, twin, batch, seed=0)
        assert_close(gradients(layer, network, half_of(batch, rank), seed=0), whole, rtol=1e-9, atol=1e-12)


def check_idle(name, options, rank):
    """A rank without tokens neither hangs nor fails."""
    layer = build(name, options)
    x, context = inputs(batch=4)
    rows = slice(0, 4 if rank == 0 else 0)
    DistributedDataParallel(layer)(x[rows], context[rows]).sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())
