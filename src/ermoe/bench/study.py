"""Studies: many runs, one JSON each, in a queue that can be stopped at any time and started again."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ermoe.bench.record import commit, machine, versions
from ermoe.errors import UserError
from ermoe.files import replacing
from ermoe.tasks.image.run import train
from ermoe.train.run_folder import read_lines

COLUMNS = {
    "top1": ("accuracy", ".2%"),
    "load_cv2": ("load CV²", ".4f"),
    "weight_cv2": ("weight CV²", ".4f"),
    "fallback_rate": ("fallback", ".1%"),
    "fluctuation": ("fluctuation", ".1%"),
    "step_to_dense": ("step / dense", ".2f"),
}


def run_queue(
    presets: Sequence[str],
    data: Path,
    seeds: Sequence[int],
    out: Path,
    *,
    threads: int = 2,
    console: Console | None = None,
    **changes: Any,
) -> list[dict[str, Any]]:
    """Trains every preset with every seed, seeds outermost, so that an unfinished study still compares all presets.

    A run leaves ``out/PRESET-SEED.json``. Runs that have theirs are not repeated; one that was interrupted goes on.
    """
    torch.set_num_threads(threads)
    records = []
    for seed in seeds:
        for preset in presets:
            path = out / f"{preset}-{seed}.json"
            if not path.is_file():
                _run_one(preset, data, seed, path, threads, console, changes)
            records.append(_read(path))
    return records


def _run_one(
    preset: str, data: Path, seed: int, path: Path, threads: int, console: Console | None, changes: dict[str, Any]
) -> None:
    folder = path.parent / "runs" / f"{preset}-{seed}"
    start = time.perf_counter()
    figures = train(preset, data, folder, seed=seed, console=console, **changes)
    record = {
        "preset": preset,
        "seed": seed,
        "command": f"ermoe image study {preset} --data {data} --seeds {seed}",
        "changes": changes,
        "figures": {**figures, **_time_per_step(folder)},
        "wall_seconds": round(time.perf_counter() - start, 1),
        "threads": threads,
        "commit": commit(),
        "machine": machine(),
        "versions": versions(),
        "config": json.loads((folder / "config.json").read_text()),
    }
    with replacing(path) as draft:
        draft.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")


def _time_per_step(folder: Path) -> dict[str, float]:
    """The median over logged stretches of training; a resumed run's clock starts again, which the median forgives."""
    lines = read_lines(folder / "timing.jsonl")
    stretches = [
        (after["seconds"] - before["seconds"]) / (after["step"] - before["step"])
        for before, after in pairwise(lines)
        if before["kind"] == after["kind"] == "train" and after["seconds"] > before["seconds"]
    ]
    return {"seconds_per_step": statistics.median(stretches)} if stretches else {}


def _read(path: Path) -> dict[str, Any]:
    try:
        record: dict[str, Any] = json.loads(path.read_text())
    except ValueError as problem:
        raise UserError(f"{path} is damaged: remove it, and its run is repeated") from problem
    return record


def table(records: Sequence[dict[str, Any]]) -> str:
    """Mean ± standard deviation over seeds, one row a preset, in Markdown.

    >>> print(table([{"preset": "a", "seed": 1, "figures": {"top1": 0.5}}]))
    | preset | seeds | accuracy |
    | :-- | --: | --: |
    | a | 1 | 50.00% |
    """
    records = _beside_dense(records)
    shown = [name for name in COLUMNS if any(name in record["figures"] for record in records)]
    lines = ["| " + " | ".join(["preset", "seeds", *(COLUMNS[name][0] for name in shown)]) + " |"]
    lines.append("| :-- |" + " --: |" * (1 + len(shown)))
    for preset in dict.fromkeys(record["preset"] for record in records):
        own = [record["figures"] for record in records if record["preset"] == preset]
        cells = [_cell([f[name] for f in own if name in f], COLUMNS[name][1]) for name in shown]
        lines.append("| " + " | ".join([preset, str(len(own)), *cells]) + " |")
    return "\n".join(lines)


def _beside_dense(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records with the time of a step relative to that of the dense preset with the same seed, where it ran."""
    dense = {
        record["seed"]: record["figures"].get("seconds_per_step")
        for record in records
        if record["preset"].endswith("-dense")
    }
    compared = []
    for record in records:
        own, other = record["figures"].get("seconds_per_step"), dense.get(record["seed"])
        ratio = {"step_to_dense": own / other} if own and other else {}
        compared.append({**record, "figures": {**record["figures"], **ratio}})
    return compared


def _cell(values: list[float], style: str) -> str:
    if not values:
        return "–"
    spread = f" ± {statistics.stdev(values):{style}}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):{style}}{spread}"
