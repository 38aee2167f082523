"""Experts on other processes: rows travel to them, and what the experts make of the rows travels back.

Of n processes, the p-th holds experts p·E/n to (p + 1)·E/n − 1. Rows that are sorted by expert are therefore sorted by
process too, and dispatch and combine stay what they are: they never learn that experts are far away. A process may
send or receive any number of rows, none included, but it takes part in every exchange.

Letters: A rows of this process, B rows that it receives, E experts, P processes, L = E / P experts of one process, D
width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ermoe.nn.products import compute_dtype
from ermoe.nn.sharding import weigh_gradient

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

EXPERTS = "ep"
"""The axis of a mesh along which experts are shared out."""


def exchanged(run: Callable[[Tensor, Tensor], Tensor], x_AD: Tensor, count_E: Tensor, mesh: DeviceMesh) -> Tensor:
    """What ``run(rows, counts)`` makes of the rows of all processes with the experts of each, (A, D) for our own rows.

    Every process has a loss of its own, and their mean is what is descended. An expert learns from the rows of all of
    them, so its gradient is divided by their number; that of the rows, which go home, is not.
    """
    axis = mesh[EXPERTS]
    num_processes, group = axis.size(), axis.get_group()
    num_own_P = [len(count_E) // num_processes] * num_processes
    count_PL = _swapped(count_E, num_own_P, num_own_P, group).view(num_processes, -1)
    # The number of rows decides shapes, so the host waits for it, on a GPU too.
    sent_P, received_P = torch.stack([count_E.view(num_processes, -1).sum(1), count_PL.sum(1)]).tolist()
    by_expert_B, back_B = _orders(count_PL, sum(received_P))

    x_BD = _swapped(x_AD.to(compute_dtype(x_AD)), received_P, sent_P, group)
    x_BD = weigh_gradient(_Permute.apply(x_BD, by_expert_B, back_B), mesh.size())
    y_BD = weigh_gradient(run(x_BD, count_PL.sum(0)), 1 / mesh.size())
    return _swapped(_Permute.apply(y_BD, back_B, by_expert_B), sent_P, received_P, group)


def _swapped(rows: Tensor, received_P: list[int], sent_P: list[int], group: Any) -> Tensor:
    """Sends every process its rows, in order, and returns what the others sent; gradients go the other way."""
    from torch.distributed._functional_collectives import all_to_all_single_autograd, wait_tensor

    swapped: Tensor = wait_tensor(all_to_all_single_autograd(rows.contiguous(), received_P, sent_P, group))
    return swapped


def _orders(count_PL: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """From rows sorted by process, then expert, to rows sorted by expert, then process; and the way back, (B,) each."""
    num_processes, num_own = count_PL.shape
    expert_PL = torch.arange(num_own, device=count_PL.device).repeat(num_processes)
    expert_B = torch.repeat_interleave(expert_PL, count_PL.flatten(), output_size=num_rows)
    by_expert_B = torch.argsort(expert_B, stable=True)
    return by_expert_B, torch.argsort(by_expert_B)


class _Permute(torch.autograd.Function):
    """Rows in another order. Their gradient is put back, where autograd would add to zeros."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return rows[order]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (back,) = ctx.saved_tensors
        return grad[back], None, None
