"""A learned gate balanced without a loss: a bias on the choice, moved by fixed steps (DeepSeek-V3, torchtitan).

Letters: G groups of S tokens, T = G·S tokens, D width, E experts, K experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor

from ermoe.nn.balance import OffsetBalance, Seen
from ermoe.nn.rivals.router import GatedRouter, weighted_top_k
from ermoe.nn.routing import Routing
from ermoe.nn.settings import RouterSettings
from ermoe.nn.start import Start

_SCORES = {"sigmoid": torch.sigmoid, "softmax": lambda logit: logit.softmax(-1)}


class _SignBalance(OffsetBalance):
    """Each bias moves by the same small step, up for experts below the mean load and down for those above it."""

    def move(self, seen: Seen) -> None:
        """b += δ − mean(δ), with δ_e = rate · sign(mean load − load_e)."""
        step_E = self.rate * torch.sign(seen.count_E.mean() - seen.count_E)
        self.offset_E += step_E - step_E.mean()


@dataclass(frozen=True)
class LossFree(RouterSettings):
    """The options of the router that a bias balances.

    Args:
        top_k: experts per token K.
        score: "sigmoid" or "softmax" of the logits.
        normalise: weights divided by their sum over the K chosen. With K = 1 that leaves the gate without gradient.
        route_scale: factor on all weights.
        rate: step of the biases.
    """

    top_k: int = 2
    score: str = "sigmoid"
    normalise: bool = False
    route_scale: float = 1.0
    rate: float = 1e-3

    def __post_init__(self) -> None:
        if self.score not in _SCORES:
            raise ValueError(f"score={self.score!r}: use one of {', '.join(_SCORES)}")

    def router(self, dim: int, num_experts: int, **start: Unpack[Start]) -> LossFreeRouter:
        return LossFreeRouter(dim, num_experts, self, **start)


class LossFreeRouter(GatedRouter):
    """Chooses the K largest of score + bias and weighs by the scores alone.

    Call `ermoe.update_balance` after each optimiser step; forward passes only count.

    >>> LossFreeRouter(16, 4, LossFree())(torch.randn(2, 9, 16)).expert_TK.shape
    torch.Size([18, 2])
    """

    top_k: int
    settings: LossFree

    def __init__(self, dim: int, num_experts: int, settings: LossFree, **start: Unpack[Start]) -> None:
        super().__init__(dim, num_experts, settings, top_k=settings.top_k, **start)
        self.balance = _SignBalance(num_experts, rate=settings.rate, device=start.get("device"))

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        super().reset_parameters(generator)
        self.balance.reset_parameters()

    def decide(self, x_GSD: Tensor, mask_GS: Tensor | None) -> Routing:
        score_TE = _SCORES[self.settings.score](self.gate(x_GSD.flatten(0, 1)))
        return self.choose(score_TE, None if mask_GS is None else mask_GS.reshape(-1))

    def choose(self, score_TE: Tensor, mask_T: Tensor | None = None) -> Routing:
        """The decision on given scores."""
        ranking_TE = score_TE + self.balance.offset_E
        expert_TK, weight_TK = weighted_top_k(
            score_TE, self.top_k, ranking_TE=ranking_TE, normalised=self.settings.normalise
        )
        weight_TK = self.settings.route_scale * weight_TK
        return Routing.from_choice(expert_TK, weight_TK, num_experts=self.num_experts, score_TE=score_TE, mask_T=mask_T)

    def observe(self, routing: Routing) -> None:
        self.balance.observe(routing)
