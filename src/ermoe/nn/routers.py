"""The router of ERMoE: thresholded top-k over scores, with offsets for balance and an optional capacity.

Letters: G groups (images) of S tokens, T = G·S tokens, D width, E experts, K experts per token, R basis rank.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from ermoe.nn.attention import Context
from ermoe.nn.balance import Balance
from ermoe.nn.capacity import places, places_per_group, within_capacity
from ermoe.nn.order import stable_top_k
from ermoe.nn.precision import widen
from ermoe.nn.routing import Routing
from ermoe.nn.scores import Score

_NO_LIMIT = (0.0, math.inf)  # as saved: the second by versions before 0.1


class Router(nn.Module, ABC):
    """Decides which experts see which tokens. All but the routing itself is known before any forward."""

    num_experts: int
    top_k: int | None = None  # of routers by which every token chooses equally many experts
    threshold: float | None = None  # of routers that have one
    needs_context = False
    shares_places = False  # whether, at inference, what a token gets depends on other images of its batch

    @property
    def experts_per_token(self) -> float:
        """How many experts a token meets in the mean, without pruning and drops, which depend on the data."""
        if self.top_k is None:
            raise NotImplementedError(f"{type(self).__name__} has no top_k, so it must say its experts_per_token")
        return self.top_k

    @abstractmethod
    def forward(
        self, x_GSD: Tensor, context: Tensor | Context | None, mask_GS: Tensor | None, basis_EDR: Tensor | None
    ) -> Routing:
        """The routing of all tokens; ``basis_EDR`` is the experts' token basis, which some routers borrow."""

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draws the router's parameters anew, if it has any."""

    def observe(self, routing: Routing) -> None:
        """Called once per training forward, for routers that keep count."""


def check_top_k(top_k: int, num_experts: int) -> None:
    """Raises a ValueError unless a token can have ``top_k`` of the experts."""
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k={top_k}: need 1 <= top_k <= num_experts={num_experts}")


def _check_limits(threshold: float, capacity_factor: float | None) -> None:
    if not 0 <= threshold < 1:
        raise ValueError(f"threshold={threshold}: need 0 <= threshold < 1 (the paper uses 0.5)")
    if capacity_factor is not None and not capacity_factor > 0:
        raise ValueError(f"capacity_factor={capacity_factor}: use a positive number, or None for no limit")


class OneWayRouter(Router):
    """The router of a layer with one expert: every token goes there with weight 1, and nothing is computed.

    >>> OneWayRouter()(torch.randn(2, 9, 16)).weight_TK.unique().tolist()
    [1.0]
    """

    num_experts = 1
    top_k = 1

    def forward(
        self,
        x_GSD: Tensor,
        context: Tensor | Context | None = None,
        mask_GS: Tensor | None = None,
        basis_EDR: Tensor | None = None,
    ) -> Routing:
        weight_T1 = widen(x_GSD.new_ones(x_GSD.shape[0] * x_GSD.shape[1], 1))
        expert_T1 = torch.zeros_like(weight_T1, dtype=torch.long)
        mask_T = None if mask_GS is None else mask_GS.reshape(-1)
        routing = Routing.from_choice(expert_T1, weight_T1, num_experts=1, mask_T=mask_T)
        routing.meets_all = mask_T is None
        return routing


class TopKRouter(Router):
    """Ranks by score + offset, chooses K, weighs by the plain scores (Eq. 6 and 7).

    A token "fell back" when no plain score reaches the threshold. With ``below_threshold="fill"``, the paper's rule,
    experts below the threshold fill the K places, so the threshold changes the statistic and never the choice. With
    ``"prune"`` they are left out, and a token that fell back keeps its single best expert.

    ``weight_floor`` is added to each chosen expert's positive score before the scores are divided by their sum. Near
    zero, an expert whose score is negative is chosen for nothing; at 0.5 it still has a third of the mixture beside
    one that scores 0.5.
    """

    top_k: int
    threshold: float

    def __init__(
        self,
        score: Score,
        *,
        num_experts: int,
        top_k: int = 2,
        threshold: float = 0.5,
        below_threshold: str = "fill",
        balance: Balance | None = None,
        capacity_factor: float | None = None,
        weight_floor: float = 1e-3,
    ) -> None:
        super().__init__()
        check_top_k(top_k, num_experts)
        _check_limits(threshold, capacity_factor)
        if not weight_floor > 0:
            raise ValueError(f"weight_floor={weight_floor}: need a positive number, for scores may all be negative")
        if below_threshold not in ("fill", "prune"):
            raise ValueError(f"below_threshold={below_threshold!r}: use 'fill' (the paper's rule) or 'prune'")
        self.score = score
        self.balance = balance
        self.num_experts = num_experts
        self.top_k = top_k
        self.threshold = threshold
        self.below_threshold = below_threshold
        self.capacity_factor = capacity_factor
        self.weight_floor = weight_floor

    @property
    def needs_context(self) -> bool:  # type: ignore[override]
        """Whether the score compares a token with its attention context."""
        return self.score.needs_context

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draws the score's parameters anew and clears the offsets."""
        self.score.reset_parameters(generator)
        if self.balance is not None:
            self.balance.reset_parameters()

    def get_extra_state(self) -> Tensor:
        """Threshold, capacity factor and routing rank: set per layer once it is built, they belong to its weights.

        0 stands for no limit.
        """
        limits = [0.0 if limit is None else limit for limit in (self.capacity_factor, self.score.route_rank)]
        return torch.tensor([self.threshold, *limits], dtype=torch.float64)

    def set_extra_state(self, state: Tensor) -> None:
        """Takes them from saved weights. A single number is the threshold; the others then stay as they are."""
        if state.numel() not in (1, 3):
            raise ValueError(f"a router has {state.numel()} saved settings: need threshold, capacity and routing rank")
        threshold, *limits = state.flatten().tolist()
        limits = [None if limit in _NO_LIMIT else limit for limit in limits]
        capacity_factor, route_rank = limits or (self.capacity_factor, self.score.route_rank)
        _check_limits(threshold, capacity_factor)
        if (route_rank is None) is not (self.score.route_rank is None) or (
            route_rank is not None and not route_rank >= 1
        ):
            raise ValueError(f"route_rank={route_rank}: at least one column of a basis routes")
        self.threshold = threshold
        self.capacity_factor = capacity_factor
        self.score.route_rank = None if route_rank is None else int(route_rank)

    def extra_repr(self) -> str:
        return f"top_k={self.top_k}, threshold={self.threshold}, below_threshold={self.below_threshold!r}"

    def forward(
        self, x_GSD: Tensor, context: Tensor | Context | None, mask_GS: Tensor | None, basis_EDR: Tensor | None
    ) -> Routing:
        context = context.flatten(0, 1) if isinstance(context, Tensor) else context
        score_TE = self.score(x_GSD.flatten(0, 1), context, basis_EDR)
        return self.choose(score_TE, mask_GS, num_groups=x_GSD.shape[0])

    def choose(self, score_TE: Tensor, mask_GS: Tensor | None = None, *, num_groups: int = 1) -> Routing:
        """The decision on given scores."""
        mask_T = None if mask_GS is None else mask_GS.reshape(-1)
        with torch.no_grad():
            expert_TK, kept_TK = self._select(score_TE)
            if mask_T is not None:
                real_TK = mask_T.unsqueeze(1).expand_as(expert_TK)
                kept_TK = real_TK if kept_TK is None else kept_TK & real_TK
        weight_TK = _mixture_weights(score_TE.gather(1, expert_TK), kept_TK, floor=self.weight_floor)
        admitted_TK, num_dropped = self._admit(expert_TK, kept_TK, mask_GS, num_groups)
        return Routing.from_choice(
            expert_TK,
            weight_TK,
            num_experts=self.num_experts,
            kept_TK=admitted_TK,
            score_TE=score_TE,
            threshold=self.threshold,
            mask_T=mask_T,
            num_dropped=num_dropped,
        )

    def _select(self, score_TE: Tensor) -> tuple[Tensor, Tensor | None]:
        """Top-k ids by score + offset, and which of them the threshold keeps (None: all)."""
        ranking_TE = score_TE if self.balance is None else score_TE + self.balance.offset_E
        if self.below_threshold == "fill":
            return stable_top_k(ranking_TE, self.top_k), None
        eligible_TE = score_TE >= self.threshold
        fell_back_T1 = ~eligible_TE.any(-1, keepdim=True)
        eligible_ranking_TE = ranking_TE.masked_fill(~eligible_TE, torch.finfo(ranking_TE.dtype).min)
        ranking_TE = torch.where(fell_back_T1, score_TE, eligible_ranking_TE)
        expert_TK = stable_top_k(ranking_TE, self.top_k)
        kept_TK = eligible_TE.gather(1, expert_TK)
        first_K = torch.arange(self.top_k, device=score_TE.device) == 0
        return expert_TK, kept_TK | (fell_back_T1 & first_K)

    def _admit(
        self, expert_TK: Tensor, kept_TK: Tensor | None, mask_GS: Tensor | None, num_groups: int
    ) -> tuple[Tensor | None, Tensor | None]:
        """Which proposals find a place within the capacity, and how many did not; padding earns no places."""
        if self.capacity_factor is None:
            return kept_TK, None
        shape_GSK = (num_groups, expert_TK.shape[0] // max(num_groups, 1), self.top_k)
        limits = (self.top_k, self.num_experts, self.capacity_factor)
        capacity = places(shape_GSK[1], *limits) if mask_GS is None else places_per_group(mask_GS, *limits)
        wanted_GSK = torch.ones_like(expert_TK, dtype=torch.bool) if kept_TK is None else kept_TK
        wanted_GSK = wanted_GSK.reshape(shape_GSK)
        admitted_GSK = within_capacity(expert_TK.view(shape_GSK), self.num_experts, capacity, kept_GSK=wanted_GSK)
        return admitted_GSK.reshape(expert_TK.shape), (wanted_GSK & ~admitted_GSK).sum()

    def observe(self, routing: Routing) -> None:
        if self.balance is not None:
            self.balance.observe(routing)


def _mixture_weights(score_TK: Tensor, kept_TK: Tensor | None, *, floor: float) -> Tensor:
    """Eq. 7 with a floor: (max(score, 0) + ε) / Σ. The floor replaces 0/0 and bounds the gradient."""
    positive_TK = score_TK.clamp_min(0) + floor
    if kept_TK is None:
        return positive_TK / positive_TK.sum(-1, keepdim=True)
    positive_TK = positive_TK * kept_TK
    total_T1 = positive_TK.sum(-1, keepdim=True)
    return positive_TK / torch.where(total_T1 > 0, total_T1, 1)
