"""Experts with a limited number of places: who gets in.

Letters: G groups (images) of S tokens, K choices per token, E experts, C places per expert and group.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ermoe.nn.order import falling_order, is_one_of
from ermoe.nn.precision import double


def places(
    num_tokens: int,
    top_k: float,
    num_experts: int,
    capacity_factor: float,
    multiple_of: int = 1,
    rounding: str = "ceil",
) -> int:
    """C = ⌈S K f / E⌉ (or rounded, half to even, but at least 1), raised to a multiple of ``multiple_of``.

    >>> places(197, 2, 8, 1.05, multiple_of=4)
    52
    """
    exact = num_tokens * top_k * capacity_factor / num_experts
    wanted = math.ceil(exact) if rounding == "ceil" else round(exact)
    return -(-max(wanted, 1) // multiple_of) * multiple_of


def places_per_group(
    mask_GS: Tensor,
    top_k: int,
    num_experts: int,
    capacity_factor: float,
    multiple_of: int = 1,
) -> Tensor:
    """`places` for groups with padding, (G,): only real tokens count, so padding does not change who gets in."""
    exact_G = double(mask_GS.sum(1)) * top_k * capacity_factor / num_experts
    return (exact_G.ceil().long().to(mask_GS.device).clamp_min(1) + multiple_of - 1) // multiple_of * multiple_of


def queue_positions(
    expert_GSK: Tensor,
    num_experts: int,
    *,
    kept_GSK: Tensor | None = None,
    priority_GS: Tensor | None = None,
) -> Tensor:
    """Where each proposal stands in the queue of its expert, (G, S, K), from 0; −1 if it does not queue.

    All first choices come before any second choice (V-MoE). Among equal choices tokens come in their order, or by
    falling ``priority_GS`` (batch-priority routing). Only proposals in ``kept_GSK`` queue.

    >>> queue_positions(torch.tensor([[[0, 1], [0, 1], [1, 0]]]), num_experts=2).tolist()
    [[[0, 1], [1, 2], [0, 2]]]
    """
    num_groups, num_tokens, top_k = expert_GSK.shape
    kept_GSK = torch.ones_like(expert_GSK, dtype=torch.bool) if kept_GSK is None else kept_GSK
    order_GS = None if priority_GS is None else falling_order(priority_GS, dim=1)
    proposal_GSKE = is_one_of(expert_GSK, num_experts).long() * kept_GSK.unsqueeze(-1)
    if order_GS is not None:
        proposal_GSKE = proposal_GSKE.gather(1, order_GS[:, :, None, None].expand_as(proposal_GSKE))
    queue_GQE = proposal_GSKE.transpose(1, 2).reshape(num_groups, top_k * num_tokens, num_experts)
    position_GQE = queue_GQE.cumsum(1) * queue_GQE  # 1 for the first in the queue of its expert
    position_GSK = position_GQE.sum(-1).view(num_groups, top_k, num_tokens).transpose(1, 2) - 1
    if order_GS is not None:
        position_GSK = torch.empty_like(position_GSK).scatter(
            1, order_GS.unsqueeze(-1).expand_as(expert_GSK), position_GSK
        )
    return position_GSK


def within_capacity(
    expert_GSK: Tensor,
    num_experts: int,
    capacity: int | Tensor,
    *,
    kept_GSK: Tensor | None = None,
    priority_GS: Tensor | None = None,
) -> Tensor:
    """Which proposals find a place, (G, S, K), in the order of `queue_positions`; ``capacity`` may be (G,).

    >>> within_capacity(torch.tensor([[[0], [0], [1]]]), num_experts=2, capacity=1).flatten().tolist()
    [True, False, True]
    """
    position_GSK = queue_positions(expert_GSK, num_experts, kept_GSK=kept_GSK, priority_GS=priority_GS)
    limit = capacity[:, None, None] if isinstance(capacity, Tensor) else capacity
    return (position_GSK >= 0) & (position_GSK < limit)
