"""Parameters that are shared out among processes, seen whole or in part: by FSDP2, or with the experts they belong to.

Stacked parameters are sharded over experts, so each process holds whole bases of some of them.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether it is a DTensor, told by its mesh: importing the class takes seconds, which one process need not wait."""
    return hasattr(tensor, "device_mesh")


def by_mesh(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Tensors apart by the processes that share them: torch computes on many at once only within one mesh.

    >>> len(by_mesh([torch.ones(1), torch.ones(2)]))
    1
    """
    groups: dict[DeviceMesh | None, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.device_mesh if is_sharded(tensor) else None, []).append(tensor)
    return list(groups.values())


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, wherever its parts are; every process must ask.

    >>> whole(torch.ones(2)).tolist()
    [1.0, 1.0]
    """
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def whole_copy(model: nn.Module) -> nn.Module:
    """A copy of a model that needs no other process; every process must ask."""
    model = _without_ddp(model)
    with without_fsdp(model):
        known = {
            id(parameter): nn.Parameter(_own_memory(whole(parameter.detach())), parameter.requires_grad)
            for parameter in model.parameters()
            if is_sharded(parameter)
        }
        return copy.deepcopy(model, known)


def _own_memory(tensor: Tensor) -> Tensor:
    """Without what surrounds it in memory: shards that were uneven come padded."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def usable_copy(model: nn.Module) -> nn.Module:
    """A copy whose experts stay where they are; of a model in shards, which FSDP does not copy, a `whole_copy`."""
    model = _without_ddp(model)
    return whole_copy(model) if any(map(_is_in_shards, model.modules())) else copy.deepcopy(model)


def _without_ddp(model: nn.Module) -> nn.Module:
    """The model inside: what averages its gradients cannot be copied if it has a line of its own."""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def _is_in_shards(module: nn.Module) -> bool:
    return hasattr(module, "set_requires_gradient_sync")  # an FSDPModule, told without importing FSDP


def unshard(model: nn.Module) -> None:
    """Gathers what FSDP keeps outside of blocks: passes through a part of a model alone would find it in shards."""
    if _is_in_shards(model):
        sharded = cast(Any, model)
        sharded._get_fsdp_state()._lazy_init()  # else a block that runs first would take itself for the whole
        sharded.unshard()


@contextmanager
def without_fsdp(model: nn.Module) -> Iterator[None]:
    """Within the block modules have the classes that they had before FSDP, none of its hooks, and their own shards."""
    hooks = ("_forward_pre_hooks", "_forward_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks")
    changed = [(module, type(module), dict(vars(module))) for module in filter(_is_in_shards, model.modules())]
    for module, _, _ in changed:
        cast(Any, module).reshard()
    try:
        for module, kind, own in changed:
            module.__class__ = kind.__mro__[2]  # after FSDP's own two
            vars(module).update({name: OrderedDict() for name in hooks})
            for name in (name for name in own if name.startswith("__composable_api")):
                del vars(module)[name]
        yield
    finally:
        for module, kind, own in changed:
            module.__class__ = kind
            vars(module).update(own)


def sharded_as(parameter: Tensor, values: Tensor) -> Tensor:
    """This process's part of whole ``values``, as it holds a part of ``parameter``."""
    if not is_sharded(parameter):
        return values
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(values, parameter.device_mesh, parameter.placements, src_data_rank=None)


def own_experts(parameter: Tensor) -> Tensor:
    """The experts this process holds, each with its whole basis."""
    if not is_sharded(parameter):
        return parameter
    if any(getattr(placement, "dim", 0) != 0 for placement in parameter.placements):
        raise ValueError(
            f"a basis is sharded as {parameter.placements}: shard expert parameters over experts, Shard(0)"
        )
    return parameter.to_local()


def at_work(parameter: Tensor) -> Tensor:
    """`own_experts` for a forward pass: what they learn is summed over the processes that hold copies of them."""
    if not is_sharded(parameter):
        return parameter
    if not any(placement.is_replicate() for placement in parameter.placements):
        return parameter.to_local()
    from torch.distributed.tensor import Partial

    learns = [Partial() if placement.is_replicate() else placement for placement in parameter.placements]
    return parameter.redistribute(placements=parameter.placements).to_local(grad_placements=learns)


def everywhere(part: Tensor) -> Tensor:
    """All of a sharded tensor on every process, for a forward pass there; what they learn from it is averaged."""
    if not is_sharded(part):
        return part
    from torch.distributed.tensor import Partial, Replicate

    mesh = part.device_mesh
    copied = part.redistribute(placements=[Replicate()] * mesh.ndim)
    return weigh_gradient(copied.to_local(grad_placements=[Partial()] * mesh.ndim), 1 / mesh.size())


def over_processes(own: Tensor, parameter: Tensor, reduce: str) -> Tensor:
    """The sum or maximum over the processes among which ``parameter`` is sharded."""
    if not is_sharded(parameter):
        return own
    from torch.distributed.tensor import DTensor, Partial, Replicate

    placements = [Replicate() if placement.is_replicate() else Partial(reduce) for placement in parameter.placements]
    return DTensor.from_local(own, parameter.device_mesh, placements).full_tensor()


class _WeighGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: float) -> Tensor:
        ctx.weight = weight
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.weight, None


def weigh_gradient(x: Tensor, weight: float) -> Tensor:
    """``x`` itself, whose gradient is multiplied by ``weight``.

    >>> x = torch.ones(1, requires_grad=True)
    >>> weigh_gradient(x, 0.5).backward()
    >>> x.grad
    tensor([0.5000])
    """
    weighed: Tensor = _WeighGradient.apply(x, weight)
    return weighed
