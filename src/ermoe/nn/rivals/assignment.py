"""Balanced assignment: tokens to experts, equal numbers each, with the largest total score. Exact for every size.

Tokens prefer the expert with the largest score minus price, and for *any* prices that choice is the best assignment
with the loads it happens to have. So prices are first brought near balance (smoothed, cheap, not exact), and what
surplus is left is moved one token at a time along shortest paths between experts, which keeps the assignment the best
one for its loads (successive shortest paths; the graph has E nodes, however many tokens there are). Where T is not
divisible by E, loads of ⌊T/E⌋ and ⌈T/E⌉ are both allowed, and surplus goes on moving while that raises the total; the
best total is a concave function of the loads (M-concave), so when no single move helps, nothing does.

Letters: B samples of torch.func.vmap, T tokens, E experts.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_Floats = NDArray[np.float64]
_Bools = NDArray[np.bool_]

_SMOOTHING_STEPS = 30
_RELATIVE_TOLERANCE = 1e-12  # of the largest score: below it, a gain is rounding


@torch.library.custom_op("ermoe::balanced_assignment", mutates_args=())  # it runs on the host, on numpy
def balanced_assignment(score_TE: Tensor) -> Tensor:
    """The expert of each token, (T,): the largest Σ_t score among all assignments whose loads differ by at most one.

    >>> balanced_assignment(torch.tensor([[9.0, 0.0], [8.0, 1.0], [7.0, 6.0], [6.0, 0.0]])).tolist()
    [0, 0, 1, 1]
    """
    score = score_TE.detach().double().cpu().numpy()
    num_tokens, num_experts = score.shape
    if not np.isfinite(score).all():
        raise ValueError("scores hold NaN or infinity, so no assignment is best: look for a diverged layer upstream")
    if num_tokens == 0 or num_experts == 1:
        return torch.zeros(num_tokens, dtype=torch.long, device=score_TE.device)
    problem = _Assignment(score, _smooth_prices(score))
    while problem.move_one():
        pass
    return torch.from_numpy(problem.expert).to(score_TE.device)


@balanced_assignment.register_fake
def _(score_TE: Tensor) -> Tensor:
    return torch.empty(score_TE.shape[0], dtype=torch.long, device=score_TE.device)


@balanced_assignment.register_vmap
def _(info: Any, in_dims: tuple[int], score_BTE: Tensor) -> tuple[Tensor, int]:
    """Each sample is a batch of its own."""
    return torch.stack([balanced_assignment(score_TE) for score_TE in score_BTE.unbind(in_dims[0])]), 0


def _smooth_prices(score: _Floats) -> _Floats:
    """Prices (E,) at which softened choices balance: each step is p += τ log(E · share), while τ falls (Sinkhorn)."""
    num_experts = score.shape[1]
    price = np.zeros(num_experts)
    spread = float((score.max(1) - score.min(1)).mean())
    if spread == 0:
        return price
    for step in range(_SMOOTHING_STEPS):
        temperature = spread * max(0.5 * 0.8**step, 0.005)
        value = (score - price) / temperature
        choice = np.exp(value - value.max(1, keepdims=True))
        choice /= choice.sum(1, keepdims=True)
        price += temperature * np.log(np.maximum(num_experts * choice.mean(0), 1e-12))
    return price


def _preferred(value: _Floats) -> NDArray[np.int64]:
    """The expert of largest value for each token; tokens that are indifferent take turns."""
    is_best = value == value.max(1, keepdims=True)
    turn = np.arange(len(value)) % is_best.sum(1)
    chosen: NDArray[np.int64] = (is_best & (is_best.cumsum(1) == turn[:, None] + 1)).argmax(1)
    return chosen


class _Assignment:
    """An assignment that is the best one for its own loads, and the prices that prove it.

    ``loss[e, f]`` is the least total score lost by moving one token from e to f, ``mover[e, f]`` that token. Every
    token sits at its largest score − price, which is why all ``loss − price[e] + price[f]`` are non-negative.
    """

    def __init__(self, score: _Floats, price: _Floats) -> None:
        num_tokens, num_experts = score.shape
        self.score = score
        self.price = price
        self.expert = _preferred(score - price)
        self.load = np.bincount(self.expert, minlength=num_experts)
        self.least, self.most = num_tokens // num_experts, -(-num_tokens // num_experts)
        self.loss = np.full((num_experts, num_experts), np.inf)
        self.mover = np.zeros((num_experts, num_experts), dtype=np.int64)
        self.tolerance = _RELATIVE_TOLERANCE * float(np.abs(score).max())
        for expert in range(num_experts):
            self._find_movers(expert)

    def _find_movers(self, expert: int) -> None:
        own = np.flatnonzero(self.expert == expert)
        self.loss[expert] = np.inf
        if len(own):
            loss = self.score[own, expert, None] - self.score[own]
            cheapest = loss.argmin(0)
            self.loss[expert] = loss[cheapest, np.arange(len(cheapest))]
            self.mover[expert] = own[cheapest]
        self.loss[expert, expert] = np.inf

    def _ends(self) -> tuple[_Bools, _Bools, bool]:
        """Which experts may give, which may take, and whether a move is needed rather than merely welcome."""
        if (self.load > self.most).any():
            return self.load > self.most, self.load < self.most, True
        if (self.load < self.least).any():
            return self.load > self.least, self.load < self.least, True
        return self.load > self.least, self.load < self.most, False

    def move_one(self) -> bool:
        """Moves one token's worth of load along the cheapest path; False when the assignment is done."""
        gives, takes, needed = self._ends()
        if not (gives.any() and takes.any()):
            return False
        base = self.price[gives].min()
        distance, previous = self._distances(np.where(gives, self.price - base, np.inf))
        taker = int(np.where(takes, distance - self.price, np.inf).argmin())
        gain = self.price[taker] - base - distance[taker]
        if not needed and gain <= self.tolerance:
            return False
        # Raising the price of everything nearer than the taker makes the path free and keeps all else non-negative.
        self.price += distance[taker] - np.minimum(distance, distance[taker])
        self._shift_along(previous, taker)
        return True

    def _distances(self, distance: _Floats) -> tuple[_Floats, NDArray[np.int64]]:
        """Dijkstra over experts, on reduced losses; rounding may leave one at −1e-17, hence the clamp."""
        reduced = np.maximum(self.loss - self.price[:, None] + self.price, 0)
        previous = np.full(len(distance), -1)
        open_ = np.ones(len(distance), dtype=bool)
        for _ in range(len(distance)):
            nearest = int(np.where(open_, distance, np.inf).argmin())
            open_[nearest] = False
            through = distance[nearest] + reduced[nearest]
            shorter = open_ & (through < distance)
            distance[shorter], previous[shorter] = through[shorter], nearest
        return distance, previous

    def _shift_along(self, previous: NDArray[np.int64], taker: int) -> None:
        path = [taker]
        while previous[path[-1]] >= 0:
            path.append(int(previous[path[-1]]))
        steps = [(giver, receiver) for receiver, giver in pairwise(path)]
        movers = [self.mover[step] for step in steps]
        for mover, (_, receiver) in zip(movers, steps, strict=True):
            self.expert[mover] = receiver
        self.load[path[-1]] -= 1
        self.load[taker] += 1
        for expert in path:
            self._find_movers(expert)
