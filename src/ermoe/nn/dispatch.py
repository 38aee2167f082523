"""From tokens to rows sorted by expert, and back: dispatch knows nothing of scores.

Stable sorts fix the order of every sum, so the result is the same in every run and on every device; nothing is
added atomically. Gathering rows and summing them per token are each other's gradients, and are written as such.

Letters: T tokens, D width, A pairs of token and expert, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx

from ermoe.nn.routing import Routing, count_pairs
from ermoe.nn.tracing import has_static_shapes


@dataclass(slots=True)
class Plan:
    """The pairs in expert order, and the way back to tokens.

    ``slot_A`` lists, token by token, where the token's pairs stand in expert order; the pairs of token t start at
    ``start_T[t]``. Where tokens choose, their pairs come token by token, best first, and stay in that order.
    """

    token_A: Tensor
    weight_A: Tensor
    count_E: Tensor
    slot_A: Tensor
    start_T: Tensor


def plan(routing: Routing) -> Plan:
    """Sorts a routing's pairs by expert."""
    by_expert_A = torch.argsort(routing.expert_A, stable=True)
    token_A = routing.token_A.index_select(0, by_expert_A)
    return Plan(
        token_A=token_A,
        weight_A=routing.weight_A.index_select(0, by_expert_A),
        count_E=_count_rows(routing),
        slot_A=torch.argsort(token_A, stable=True) if routing.expert_TK is None else _inverse(by_expert_A),
        start_T=_starts(routing),
    )


def _count_rows(routing: Routing) -> Tensor:
    """Rows of each expert: its pairs, and where shapes are static those that were not kept."""
    return count_pairs(routing.expert_A, routing.num_experts) if has_static_shapes() else routing.count_E


def _starts(routing: Routing) -> Tensor:
    """Where the pairs of each token start in the order of tokens, (T,)."""
    if routing.expert_TK is not None and (routing.kept_TK is None or has_static_shapes()):  # K pairs each
        top_k = routing.expert_TK.shape[1]
        return torch.arange(routing.num_tokens, device=routing.token_A.device) * top_k
    pairs_T = count_pairs(routing.token_A, routing.num_tokens)
    return pairs_T.cumsum(0) - pairs_T


def _inverse(order_A: Tensor) -> Tensor:
    """The permutation that undoes another, without a sort."""
    return torch.empty_like(order_A).scatter(0, order_A, torch.arange(order_A.shape[0], device=order_A.device))


def _sum_per_token(y_AD: Tensor, weight_A: Tensor | None, slot_A: Tensor, start_T: Tensor) -> Tensor:
    weight = None if weight_A is None else weight_A.index_select(0, slot_A)
    return F.embedding_bag(slot_A, y_AD, start_T, mode="sum", per_sample_weights=weight)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x_TD: Tensor, token_A: Tensor, slot_A: Tensor, start_T: Tensor) -> Tensor:
        ctx.save_for_backward(slot_A, start_T)
        return x_TD.index_select(0, token_A)

    @staticmethod
    def backward(ctx: Any, grad_AD: Tensor) -> tuple[Tensor, None, None, None]:
        wide = torch.promote_types(grad_AD.dtype, torch.float32)  # half-precision gradients are summed in float32
        summed_TD = _sum_per_token(grad_AD.to(wide), None, *ctx.saved_tensors)
        return summed_TD.to(grad_AD.dtype), None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, y_AD: Tensor, weight_A: Tensor, token_A: Tensor, slot_A: Tensor, start_T: Tensor
    ) -> Tensor:
        ctx.save_for_backward(y_AD, weight_A, token_A)
        return _sum_per_token(y_AD, weight_A, slot_A, start_T)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        y_AD, weight_A, token_A = ctx.saved_tensors
        grad_AD = grad_TD.index_select(0, token_A)
        return grad_AD * weight_A.unsqueeze(1), (grad_AD * y_AD).sum(1), None, None, None


def gather(x_TD: Tensor, plan: Plan) -> Tensor:
    """The tokens' rows in expert order, (A, D)."""
    if not torch.is_grad_enabled():  # what surrounds a custom function takes as long as the copy of a small layer
        return x_TD.index_select(0, plan.token_A)
    rows: Tensor = _Gather.apply(x_TD, plan.token_A, plan.slot_A, plan.start_T)
    return rows


def combine(y_AD: Tensor, plan: Plan) -> Tensor:
    """Σ_e w_e(i) f_e(x_i) (Eq. 8), (T, D), in the weights' precision; tokens without an expert get zeros."""
    y_AD = y_AD.to(plan.weight_A.dtype)
    if not torch.is_grad_enabled():
        return _sum_per_token(y_AD, plan.weight_A, plan.slot_A, plan.start_T)
    combined: Tensor = _Combine.apply(y_AD, plan.weight_A, plan.token_A, plan.slot_A, plan.start_T)
    return combined
