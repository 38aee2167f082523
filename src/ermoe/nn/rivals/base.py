"""BASE: every expert gets equally many tokens in training, every token its best expert at test (Lewis et al. 2021).

In a `MoE` it replaces the feed-forward layer of a block: the block normalises before it and adds the residual after it,
x + α MLP_e(LN x). The original is an extra layer between blocks, with both inside.

Letters: G groups of S tokens, T = G·S tokens, D width, E experts, A pairs of token and expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor, nn

from ermoe.nn.order import stable_top_k
from ermoe.nn.precision import full_precision, widen
from ermoe.nn.rivals.assignment import balanced_assignment
from ermoe.nn.rivals.router import RivalRouter
from ermoe.nn.routing import Routing
from ermoe.nn.settings import RouterSettings
from ermoe.nn.start import Start, parameter


@dataclass(frozen=True)
class Base(RouterSettings):
    """BASE has no options."""

    def router(self, dim: int, num_experts: int, **start: Unpack[Start]) -> BaseRouter:
        return BaseRouter(dim, num_experts, **start)


class BaseRouter(RivalRouter):
    """One expert per token, mixed in by α = sigmoid(⟨h, w_e⟩); the expert vectors w learn through α alone.

    In training the assignment is the best among those with equal loads, over all tokens of the forward pass, so there
    it depends on the whole batch (each process balances its own tokens). At inference a token takes its best expert.
    Where E does not divide the number of tokens, loads differ by one.

    >>> router = BaseRouter(16, num_experts=4)
    >>> router(torch.randn(2, 10, 16)).count_E.tolist()
    [5, 5, 5, 5]
    """

    experts_per_token = 1

    def __init__(self, dim: int, num_experts: int = 8, **start: Unpack[Start]) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.centroid_ED = parameter(num_experts, dim, **start)
        self.reset_parameters(start.get("generator"))

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Orthogonal vectors of length 0.1, so that α starts near one half."""
        if not self.centroid_ED.is_meta:
            device = generator.device if generator is not None else None
            start_ED = torch.empty(self.centroid_ED.shape, device=device)  # in float32, whatever the parameter is in
            with torch.no_grad():
                self.centroid_ED.copy_(nn.init.orthogonal_(start_ED, gain=0.1, generator=generator))

    def decide(self, x_GSD: Tensor, mask_GS: Tensor | None) -> Routing:
        with full_precision(x_GSD):
            score_TE = widen(x_GSD).flatten(0, 1) @ widen(self.centroid_ED).mT
        mask_T = None if mask_GS is None else mask_GS.reshape(-1)
        return self.choose(score_TE, self.best_experts(score_TE, mask_T), mask_T)

    def best_experts(self, score_TE: Tensor, mask_T: Tensor | None = None) -> Tensor:
        """The expert of each token, (T,): balanced over the real tokens in training, greedy at inference."""
        greedy_T = stable_top_k(score_TE.detach(), 1).squeeze(1)
        if not self.training:
            return greedy_T
        balanced: Tensor = balanced_assignment((score_TE if mask_T is None else score_TE[mask_T]).detach())
        return balanced if mask_T is None else greedy_T.masked_scatter(mask_T, balanced)

    def choose(self, score_TE: Tensor, expert_T: Tensor, mask_T: Tensor | None = None) -> Routing:
        """The routing of a given assignment."""
        expert_T1 = expert_T.unsqueeze(1)
        return Routing.from_choice(
            expert_T1,
            score_TE.gather(1, expert_T1).sigmoid(),
            num_experts=self.num_experts,
            kept_TK=None if mask_T is None else mask_T.unsqueeze(1),
            score_TE=score_TE,
            mask_T=mask_T,
        )
