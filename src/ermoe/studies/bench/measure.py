"""Measuring candidates fairly on a machine that others use too: their times side by side, and the memory of each.

Candidates take turns, in an order that rotates, so a slow minute hits all of them; with glibc, none pays for memory
that another has handed back to the system. What counts is each candidate's time over the reference's time *in the
same round*. Medians and quartiles of these ratios are reported, never a single time.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import track

from ermoe import cpu

_Build = Callable[..., Callable[[], object]]


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
    cpu.keep_freed()
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
    found = []
    for name, times in seconds.items():
        ratios = np.divide(times, seconds[reference])
        found.append(Measurement(name, statistics.median(times), *np.quantile(ratios, (0.5, 0.25, 0.75)).tolist()))
    return found


def peak_megabytes(build: _Build, *arguments: Any) -> float:
    """Peak growth of the resident set while the callable made by ``build(*arguments)`` runs. Linux only.

    ``build`` runs in a fresh process, so it must be importable there. What it allocates itself (the parameters) and
    what libraries set aside at the first run are not counted.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(there, build, arguments))
    process.start()
    there.close()
    try:
        grown = here.recv()
    except EOFError as problem:
        raise RuntimeError(f"the process that measures {build.__name__}{arguments} ended with no result") from problem
    finally:
        process.join()
    return float(grown)


def _measure(result: Connection, build: _Build, arguments: tuple[Any, ...]) -> None:
    work = build(*arguments)
    work()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # hand free memory back, so that the next run has to ask for it again
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew here
    before = _kilobytes("VmRSS")
    work()
    result.send((_kilobytes("VmHWM") - before) / 1024)


def _kilobytes(entry: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{entry}:"))
