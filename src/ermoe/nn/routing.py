"""What a router decides, as one record that dispatch, balance and analyses all read.

Letters: T tokens, E experts, K experts chosen per token, A (token, expert) pairs really assigned.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ermoe.nn.tracing import has_static_shapes


@dataclass(slots=True)
class Routing:
    """Pairs of token and expert with their mixing weights.

    The flat assignment ``token_A``, ``expert_A``, ``weight_A`` is all that dispatch needs, so token choice,
    expert choice, pruning and capacity look the same to it. The other fields describe the decision and may be
    ``None`` for methods that have no such notion.

    ``kept_TK`` tells which of the proposals ``expert_TK`` became pairs: a proposal is not kept when its token is
    masked, its score was pruned by the threshold or its expert was full. Where shapes must not depend on data,
    proposals that are not kept stay in the flat assignment with weight zero.

    ``meets_all`` says that there is one expert, which every token meets with weight 1: nothing has to be weighed.

    >>> choice = torch.tensor([[0, 1], [2, 0]])
    >>> kept = torch.tensor([[True, True], [True, False]])
    >>> routing = Routing.from_choice(choice, torch.full((2, 2), 0.5), num_experts=3, kept_TK=kept)
    >>> routing.token_A.tolist(), routing.expert_A.tolist(), routing.count_E.tolist()
    ([0, 0, 1], [0, 1, 2], [1, 1, 1])
    """

    token_A: Tensor
    expert_A: Tensor
    weight_A: Tensor
    num_tokens: int
    num_experts: int
    count_E: Tensor
    expert_TK: Tensor | None = None
    weight_TK: Tensor | None = None
    kept_TK: Tensor | None = None
    score_TE: Tensor | None = None
    threshold: float | None = None
    mask_T: Tensor | None = None
    num_dropped: Tensor | None = None
    auxiliary_loss: Tensor | None = None
    meets_all: bool = False

    @classmethod
    def from_choice(
        cls,
        expert_TK: Tensor,
        weight_TK: Tensor,
        *,
        num_experts: int,
        kept_TK: Tensor | None = None,
        score_TE: Tensor | None = None,
        threshold: float | None = None,
        mask_T: Tensor | None = None,
        num_dropped: Tensor | None = None,
    ) -> Routing:
        """The record of a token-choice decision; ``kept_TK=None`` keeps every proposal of a real token."""
        num_tokens, top_k = expert_TK.shape
        if kept_TK is None and mask_T is not None:
            kept_TK = mask_T.unsqueeze(1).expand_as(expert_TK)
        token_TK = torch.arange(num_tokens, device=expert_TK.device).unsqueeze(1).expand(-1, top_k)
        if kept_TK is None:
            token_A, expert_A, weight_A = token_TK.reshape(-1), expert_TK.reshape(-1), weight_TK.reshape(-1)
            count_E = count_pairs(expert_A, num_experts)
        else:
            weight_TK = weight_TK.masked_fill(~kept_TK, 0)
            count_E = count_pairs(expert_TK.reshape(-1), num_experts, kept_TK.reshape(-1))
            token_A, expert_A, weight_A = (part.reshape(-1) for part in (token_TK, expert_TK, weight_TK))
            if not has_static_shapes() and not kept_TK.is_meta:
                kept_A = kept_TK.reshape(-1).nonzero().squeeze(1)  # on a GPU, the one wait for the number of pairs
                token_A, expert_A, weight_A = token_A[kept_A], expert_A[kept_A], weight_A[kept_A]
        return cls(
            token_A=token_A,
            expert_A=expert_A,
            weight_A=weight_A,
            num_tokens=num_tokens,
            num_experts=num_experts,
            count_E=count_E,
            expert_TK=expert_TK,
            weight_TK=weight_TK,
            kept_TK=kept_TK,
            score_TE=score_TE,
            threshold=threshold,
            mask_T=mask_T,
            num_dropped=num_dropped,
        )

    def forced(self, expert_G: Tensor) -> Routing:
        """The same tokens, all of group g with expert ``expert_G[g]`` alone; scores are what they were."""
        expert_T = expert_G.to(self.expert_A.device).repeat_interleave(self.num_tokens // len(expert_G))
        return Routing.from_choice(
            expert_T.unsqueeze(1),
            self.weight_A.new_ones(self.num_tokens, 1),
            num_experts=self.num_experts,
            score_TE=self.score_TE,
            mask_T=self.mask_T,
        )

    @property
    def fell_back_T(self) -> Tensor | None:  # noqa: N802 - a tensor, named by its shape as the fields are
        """Which real tokens have no score that reaches the threshold, (T,); None without one."""
        if self.threshold is None or self.score_TE is None:
            return None
        below_T = self.score_TE.detach().amax(-1) < self.threshold
        return below_T if self.mask_T is None else below_T & self.mask_T

    def dense_weights(self) -> Tensor:
        """The mixing weights as a matrix (T, E), zero where a token does not use an expert."""
        flat = self.weight_A.new_zeros(self.num_tokens * self.num_experts)
        index = self.token_A * self.num_experts + self.expert_A
        return flat.scatter_add(0, index, self.weight_A).view(self.num_tokens, self.num_experts)


def count_pairs(expert_A: Tensor, num_experts: int, kept_A: Tensor | None = None) -> Tensor:
    """How many pairs each expert has. Integer adds commute, so the result is deterministic on every device."""
    ones_A = torch.ones_like(expert_A) if kept_A is None else kept_A.to(expert_A.dtype)
    return expert_A.new_zeros(num_experts).scatter_add(0, expert_A, ones_A)
