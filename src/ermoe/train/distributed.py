"""A model shared among several processes: copies, or shards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from ermoe.errors import UserError
from ermoe.train.compute import PARALLEL, Processes


def parallelise(model: nn.Module, group: Processes, how: str) -> nn.Module:
    """The model wrapped for training: copies that average their gradients ("ddp"), or shards ("fsdp").

    FSDP2 shards every parameter on its first axis, which is the axis of experts, so that a process holds whole bases.
    """
    if how not in PARALLEL:
        raise UserError(f"parallel={how!r}: use 'ddp' or 'fsdp'")
    if group.num == 1:
        return model
    if how == "ddp":
        return DistributedDataParallel(model, device_ids=[group.device] if group.device.type == "cuda" else None)
    mesh = init_device_mesh(group.device.type, (group.num,))
    for block in _blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _blocks(model: nn.Module) -> Iterable[nn.Module]:
    """The longest list of modules in a model: its transformer blocks."""
    lists = [list(m.children()) for m in model.modules() if isinstance(m, nn.ModuleList | nn.Sequential)]
    return max(lists, key=len, default=[])


@contextmanager
def without_sync(network: nn.Module, *, unless: bool) -> Iterator[None]:
    """Keeps gradients in this process for a part of a batch that is not the last; ``unless`` it is."""
    network = getattr(network, "_orig_mod", network)  # what torch.compile wrapped
    if unless or not isinstance(network, DistributedDataParallel | FSDPModule):
        yield
    elif isinstance(network, DistributedDataParallel):
        with network.no_sync():
            yield
    else:
        network.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            network.set_requires_gradient_sync(True)


def reshard(model: nn.Module) -> None:
    """Frees the whole parameters that FSDP keeps after a forward pass in expectation of a backward pass."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
