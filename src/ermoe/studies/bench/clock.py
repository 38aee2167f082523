"""Timing several candidates fairly on a machine that others use too.

Candidates take turns, in an order that rotates, so a slow minute hits all of them; what counts is each candidate's time
over the reference's time *in the same round*. Medians and quartiles of these ratios are reported, never a single time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from rich.progress import track


@dataclass(frozen=True, slots=True)
class Measurement:
    """Seconds (median) of one candidate, and its ratio to the reference: median and quartiles over rounds."""

    name: str
    seconds: float
    ratio: float
    ratio_low: float
    ratio_high: float


def inferring(work: Callable[..., object], *arguments: object) -> Callable[[], object]:
    """``work(*arguments)`` without gradients, as a candidate.

    >>> inferring(torch.is_inference_mode_enabled)()
    True
    """

    @torch.inference_mode()
    def run() -> object:
        return work(*arguments)

    return run


def take_turns(
    candidates: Mapping[str, Callable[[], object]], *, rounds: int, warmup: int = 2
) -> dict[str, list[float]]:
    """Seconds of every candidate in every round.

    >>> sorted(take_turns({"a": lambda: 1, "b": lambda: 2}, rounds=3, warmup=0)["b"])[0] >= 0
    True
    """
    names = list(candidates)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in track(range(warmup + rounds), description="timing", transient=True):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            start = time.perf_counter()
            candidates[name]()
            elapsed = time.perf_counter() - start
            if turn >= warmup:
                seconds[name].append(elapsed)
    return seconds


def compare(seconds: Mapping[str, list[float]], reference: str) -> list[Measurement]:
    """Every candidate against ``reference``, round by round.

    >>> compare({"floor": [1.0, 2.0], "x": [2.0, 4.0]}, "floor")[1].ratio
    2.0
    """
    return [
        Measurement(
            name, statistics.median(times), *_quartiles([t / r for t, r in zip(times, seconds[reference], strict=True)])
        )
        for name, times in seconds.items()
    ]


def _quartiles(values: list[float]) -> tuple[float, float, float]:
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return middle, low, high
