"""Equal load without a loss: offsets added to the scores when experts are ranked, and to nothing else.

A forward pass only adds what it saw to an accumulator. `update_balance`, called once per optimiser step, sums the
accumulators over processes and moves the offsets, so that gradient accumulation, activation checkpointing and ranks
with unequal batches all count every token exactly once.

Letters: T tokens, E experts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ermoe.nn.routing import Routing
from ermoe.nn.tracing import is_recomputing, is_transformed


@dataclass(slots=True)
class Seen:
    """What the tokens since the last update did.

    Pairs and sum of scores per expert, sum over tokens of the variance of score + offset over experts, tokens.
    """

    count_E: Tensor
    score_sum_E: Tensor
    variance_sum: Tensor
    num_tokens: Tensor

    @classmethod
    def unpack(cls, flat: Tensor) -> Seen:
        """Reads the accumulator of a `Balance`."""
        num_experts = (len(flat) - 2) // 2
        return cls(flat[:num_experts], flat[num_experts : 2 * num_experts], flat[-2], flat[-1])


class _AddOfAllSamples(torch.autograd.Function):
    """Adds what was seen from within torch.func, whose functions may change nothing outside: vmap's samples summed."""

    @staticmethod
    def forward(seen: Tensor, add: Callable[[Tensor], Tensor]) -> Tensor:
        return add(seen).clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass  # counts have no gradient

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int, None], seen: Tensor, add: Callable[[Tensor], Tensor]) -> tuple[Any, None]:
        return _AddOfAllSamples.apply(seen.sum(in_dims[0]), add), None


class Balance(nn.Module, ABC):
    """Offsets (E,), and the accumulator from which they are moved. Subclasses say how."""

    offset_E: Tensor

    def __init__(self, num_experts: int, *, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.register_buffer("offset_E", torch.zeros(num_experts, device=device, dtype=torch.float32))
        # Not a buffer: DDP broadcasts buffers from rank 0, which would overwrite what the other ranks counted. On the
        # meta device there is none, because whoever gives the buffers memory there, one by one, does not know of it.
        self._counted: Tensor | None = None if self.offset_E.is_meta else self._nothing()

    def _nothing(self) -> Tensor:
        return self.offset_E.new_zeros(2 * len(self.offset_E) + 2, dtype=torch.float32)

    @property
    def _accumulator(self) -> Tensor:
        """What was seen since the last update, where the offsets are."""
        if self._counted is None or self._counted.device != self.offset_E.device:
            self._counted = self._nothing()
        return self._counted

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Balance:
        """Follows the module to another device, but stays in float32 when it is cast to half precision."""
        offset_E, counted = self.offset_E, self._counted
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.offset_E = _moved_in_float32(offset_E, self.offset_E)
        if counted is not None:
            self._counted = None if self.offset_E.is_meta else _moved_in_float32(counted, fn(counted))
        return self

    def reset_parameters(self) -> None:
        """Zero offsets, nothing seen."""
        self.offset_E.zero_()
        self._counted = None if self.offset_E.is_meta else self._nothing()

    @torch.no_grad()
    def observe(self, routing: Routing) -> None:
        """Adds one forward pass to the accumulator, unless it is a recomputation of one already added."""
        if is_recomputing():
            return
        assert routing.score_TE is not None
        score_TE, mask_T = routing.score_TE.detach().float(), routing.mask_T
        variance_T = (score_TE + self.offset_E).var(-1, correction=0)
        num_tokens_1 = score_TE.new_full((1,), len(score_TE))
        if mask_T is not None:
            score_TE, variance_T = score_TE * mask_T.unsqueeze(1), variance_T * mask_T
            num_tokens_1 = mask_T.sum(0, keepdim=True).float()
        seen = torch.cat([routing.count_E.float(), score_TE.sum(0), variance_T.sum(0, keepdim=True), num_tokens_1])
        if is_transformed():
            _AddOfAllSamples.apply(seen, self._accumulator.add_)
        else:
            self._accumulator.add_(seen)

    @abstractmethod
    def move(self, seen: Seen) -> None:
        """Moves the offsets after a step, given what all processes saw."""


class OffsetBalance(Balance):
    """Steers the offsets towards equal load: each moves in proportion to its expert's shortfall.

    The step is measured in σ, the spread over experts of what a token ranks them by, score + offset, because that is
    the distance on which an offset changes a choice. The loop gain, and with it the damping, is then the same for
    scores that differ in the third digit and for scores that fill [−1, 1], and offsets that are far too large
    shrink in proportion to themselves.
    """

    def __init__(self, num_experts: int, *, rate: float = 0.1, device: torch.device | str | None = None) -> None:
        super().__init__(num_experts, device=device)
        self.rate = rate

    def move(self, seen: Seen) -> None:
        """offset_e += rate · σ · (1 − load_e / mean load)."""
        mean_load = seen.count_E.mean().clamp_min(1)
        sigma = (seen.variance_sum / seen.num_tokens.clamp_min(1)).sqrt()
        shortfall_E = torch.where(seen.count_E.sum() > 0, 1 - seen.count_E / mean_load, 0)
        self.offset_E += self.rate * sigma * shortfall_E


class MeanBalance(Balance):
    """offset_e = −(running mean score of expert e): no expert is favoured for scoring high on everything."""

    momentum = 0.1
    num_updates: Tensor

    def __init__(self, num_experts: int, *, device: torch.device | str | None = None) -> None:
        super().__init__(num_experts, device=device)
        self.register_buffer("num_updates", torch.zeros((), dtype=torch.long, device=device))

    def reset_parameters(self) -> None:
        """Zero offsets, nothing seen."""
        super().reset_parameters()
        self.num_updates.zero_()

    def move(self, seen: Seen) -> None:
        """An exponential mean that is a plain average until it has seen 1 / momentum updates."""
        has_seen = seen.num_tokens > 0
        self.num_updates += has_seen
        share = (1 / self.num_updates.clamp_min(1)).clamp_min(self.momentum) * has_seen
        self.offset_E.lerp_(-seen.score_sum_E / seen.num_tokens.clamp_min(1), share)


def _moved_in_float32(old: Tensor, new: Tensor) -> Tensor:
    return new.float() if old.is_meta or new.is_meta else old.to(new.device)


@contextmanager
def offsets_restored(model: nn.Module) -> Iterator[None]:
    """After the block every layer has the offsets it had before."""
    before = [(module, module.offset_E.clone()) for module in model.modules() if isinstance(module, Balance)]
    try:
        yield
    finally:
        for balance, offset_E in before:
            balance.offset_E.copy_(offset_E)


@torch.no_grad()
def update_balance(model: nn.Module) -> None:
    """Moves the offsets of every layer of ``model`` by what was seen since the last call, over all processes.

    Call it once after each optimiser step, on every rank. Layers without offsets are left alone. A batch that
    overflowed moves nothing, as it moves no weight under a gradient scaler: one NaN would stay for good.
    """
    balances = [module for module in model.modules() if isinstance(module, Balance)]
    if not balances:
        return
    seen = torch.cat([balance._accumulator for balance in balances])
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(seen)
    for balance, flat in zip(balances, torch.split(seen, [len(b._accumulator) for b in balances]), strict=True):
        balance.move(Seen.unpack(torch.where(flat.isfinite().all(), flat, 0)))
        balance._accumulator.zero_()
