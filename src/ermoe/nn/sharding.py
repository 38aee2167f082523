"""Parameters that are shared out among processes, seen whole or in part: by FSDP2, or with the experts they belong to.

Stacked parameters are sharded over experts, so each process holds whole bases of some of them.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, TypeGuard, overload

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether it is a DTensor, told by its mesh: importing the class takes seconds, which one process need not wait."""
    return hasattr(tensor, "device_mesh")


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, wherever its parts are; every process must ask.

    >>> whole(torch.ones(2)).tolist()
    [1.0, 1.0]
    """
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def whole_copy(model: nn.Module) -> nn.Module:
    """A copy of a model that needs no other process; every process must ask."""
    model = copy.deepcopy(model)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if is_sharded(parameter):
                setattr(module, name, nn.Parameter(whole(parameter.detach()), parameter.requires_grad))
    return model


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


@overload
def at_work(parameter: Tensor) -> Tensor: ...
@overload
def at_work(parameter: None) -> None: ...
def at_work(parameter: Tensor | None) -> Tensor | None:
    """`own_experts` for a forward pass: what they learn is summed over the processes that hold copies of them."""
    if parameter is None or not is_sharded(parameter):
        return parameter
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
