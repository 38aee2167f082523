"""Experts with a limited number of places: who gets in.

Letters: G groups (images) of S tokens, K choices per token, E experts, C places per expert and group.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def places(num_tokens: int, top_k: int, num_experts: int, capacity_factor: float, multiple_of: int = 1) -> int:
    """C = ⌈S K f / E⌉, raised to a multiple of ``multiple_of``.

    >>> places(197, 2, 8, 1.05, multiple_of=4)
    52
    """
    wanted = math.ceil(num_tokens * top_k * capacity_factor / num_experts)
    return -(-wanted // multiple_of) * multiple_of


def within_capacity(
    expert_GSK: Tensor,
    num_experts: int,
    capacity: int,
    *,
    kept_GSK: Tensor | None = None,
    priority_GS: Tensor | None = None,
) -> Tensor:
    """Which proposals find a place, (G, S, K): all first choices come before any second choice (V-MoE).

    Among equal choices tokens come in their order, or by falling ``priority_GS`` (batch-priority routing). Proposals
    that are not in ``kept_GSK`` take no place.

    >>> within_capacity(torch.tensor([[[0], [0], [1]]]), num_experts=2, capacity=1).flatten().tolist()
    [True, False, True]
    """
    num_groups, num_tokens, top_k = expert_GSK.shape
    kept_GSK = torch.ones_like(expert_GSK, dtype=torch.bool) if kept_GSK is None else kept_GSK
    order_GS = None if priority_GS is None else torch.argsort(priority_GS, dim=1, descending=True, stable=True)
    proposal_GSKE = F.one_hot(expert_GSK, num_experts) * kept_GSK.unsqueeze(-1)
    if order_GS is not None:
        proposal_GSKE = proposal_GSKE.gather(1, order_GS[:, :, None, None].expand_as(proposal_GSKE))
    queue_GQE = proposal_GSKE.transpose(1, 2).reshape(num_groups, top_k * num_tokens, num_experts)
    position_GQE = queue_GQE.cumsum(1) * queue_GQE  # 1 for the first in the queue of its expert
    position_GSK = position_GQE.sum(-1).view(num_groups, top_k, num_tokens).transpose(1, 2)
    if order_GS is not None:
        position_GSK = torch.empty_like(position_GSK).scatter(
            1, order_GS.unsqueeze(-1).expand_as(expert_GSK), position_GSK
        )
    return (position_GSK >= 1) & (position_GSK <= capacity)
