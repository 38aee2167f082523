"""What FSDP2 has shared out among processes, seen whole or in part.

Stacked parameters are sharded over experts, so each process holds whole bases of some of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeGuard

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether it is a DTensor, told by its mesh: importing the class takes seconds, which one process need not wait."""
    return hasattr(tensor, "device_mesh")


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, wherever its parts are; every process must ask.

    >>> import torch
    >>> whole(torch.ones(2)).tolist()
    [1.0, 1.0]
    """
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def own_experts(parameter: Tensor) -> Tensor:
    """The experts this process holds, each with its whole basis."""
    if not is_sharded(parameter):
        return parameter
    if any(placement.is_shard() and not placement.is_shard(0) for placement in parameter.placements):
        raise ValueError(
            f"a basis is sharded as {parameter.placements}: shard expert parameters over experts, Shard(0)"
        )
    return parameter.to_local()


def over_processes(own: Tensor, parameter: Tensor, reduce: str) -> Tensor:
    """The sum or maximum over the processes among which ``parameter`` is sharded."""
    if not is_sharded(parameter):
        return own
    from torch.distributed.tensor import DTensor, Partial, Replicate

    placements = [Partial(reduce) if placement.is_shard() else Replicate() for placement in parameter.placements]
    return DTensor.from_local(own, parameter.device_mesh, placements).full_tensor()
