"""Does training need more memory when there are more people? One epoch on phantom cohorts of several sizes.

    python benchmarks/brain_memory.py [--subjects 80 160] [--cache FOLDER]

Each size is a process of its own, whose memory is read while it trains: what it holds for itself, without the pages of
prepared volumes, which are files that the system keeps in memory while there is room. Adds
a line to benchmarks/results/bench.jsonl.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import tyro

from ermoe.brain.data.phantom import synthesize
from ermoe.files import cache_folder
from ermoe.studies.record import add_records, new_record


@dataclass(frozen=True)
class Options:
    """Peak memory of training on cohorts of several sizes."""

    subjects: tuple[int, ...] = (80, 160)
    cache: Path | None = None
    out: Path = Path(__file__).parent / "results"


def main() -> None:
    options = tyro.cli(Options)
    cache = options.cache or cache_folder("brain")
    peak = {str(number): peak_megabytes(number, cache) for number in options.subjects}
    record = new_record("bench", "brain_memory", settings={}, figures={"peak_megabytes": peak})
    add_records(options.out / "bench.jsonl", record)
    print(json.dumps(record, indent=1))


def peak_megabytes(subjects: int, cache: Path) -> int:
    """Of one epoch of the small preset, whose volumes are prepared already."""
    data = synthesize(cache / "phantoms" / f"memory-{subjects}", subjects, ages=(20.0, 90.0))
    command = [sys.executable, "-m", "ermoe", "brain", "train", str(data), "--split", "holdout", "--epochs", "1"]
    command += ["--warm-start-epochs", "1", "--cache", str(cache), "--no-check"]
    peaks = []
    for _ in ("prepares volumes", "measured"):
        with tempfile.TemporaryDirectory() as folder:
            peaks.append(watched([*command, "--out", f"{folder}/run"]))
    return peaks[-1]


def watched(command: list[str]) -> int:
    """The largest memory of its own, in MB, that a process had while it ran."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    peak = 0
    while process.poll() is None:
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        peak = max([peak, *(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))])
        time.sleep(0.05)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    return round(peak / 1024)


if __name__ == "__main__":
    main()
