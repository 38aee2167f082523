"""How much memory a piece of work needs beyond what it starts with, measured in a process of its own."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

Build = Callable[..., Callable[[], object]]


def peak_megabytes(build: Build, *arguments: Any) -> float:
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


def _measure(result: Connection, build: Build, arguments: tuple[Any, ...]) -> None:
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
