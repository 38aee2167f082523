"""Brain age of the fifty IXI people: ERMoE-ba beside a 3D ViT, SFCN, Swin and estimates that need no network.

Five folds by person, several shuffles of the folds and several seeds; every method has the same folds
and epochs. The two batches of this data set are confounded with age, so methods are judged inside one batch: errors are
averaged over runs for each person, and people are resampled.

    python benchmarks/brain_ixi50.py DATA [--shuffles 3] [--seeds 3] [--threads 2]

A queue that resumes: one JSON a run, and runs that have one are not repeated; one that was interrupted goes on.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import tyro
from rich.console import Console

from ermoe.brain.data.preprocess import Preprocessing
from ermoe.brain.evaluation import Evaluation
from ermoe.brain.metrics import figures, paired_difference
from ermoe.brain.run import train
from ermoe.files import replacing
from ermoe.studies.bench.record import commit, machine, versions

RESULTS = Path(__file__).parent / "results" / "brain_ixi50"


@dataclass(frozen=True)
class Study:
    """Train every method over shuffles of the folds and seeds, and compare within one batch."""

    data: Annotated[Path, tyro.conf.Positional]
    out: Path = RESULTS
    runs: Path = Path("runs/brain-ixi50")
    """Where the run folders go; they are not part of the results."""
    cache: Path | None = None
    shuffles: int = 3
    seeds: int = 3
    methods: tuple[str, ...] = ("ermoe", "vit3d")
    """Trained with every shuffle and seed."""
    once: tuple[str, ...] = ("sfcn", "swin3d")
    """Trained with the first shuffle and seed."""
    label: str = "batch"
    level: str = "B"
    """Judged inside this level of this column."""
    init: str = "random"
    """Or phantom."""
    register: str = "none"
    """Or affine: to MNI space."""
    threads: int = 2
    changes: dict[str, int | float] = field(default_factory=dict)
    """Fields of the recipe that are to differ from the preset, for example epochs 2."""


def main() -> None:
    study = tyro.cli(Study)
    torch.set_num_threads(study.threads)
    console = Console()
    records = [run(study, *job, console) for job in jobs(study)]
    summary = summarise(records, study)
    write(study.out / "summary.json", summary)
    console.print(table(summary), highlight=False, soft_wrap=True)


def jobs(study: Study) -> list[tuple[str, int, int]]:
    """(method, shuffle, seed), methods innermost, so that an unfinished study still compares them."""
    pairs = [(shuffle, seed) for seed in range(study.seeds) for shuffle in range(study.shuffles)]
    every = [(method, *pair) for pair in pairs for method in study.methods]
    return every[: len(study.methods)] + [(method, 0, 0) for method in study.once] + every[len(study.methods) :]


def run(study: Study, method: str, shuffle: int, seed: int, console: Console) -> dict[str, Any]:
    """One five-fold run: trained, or read if it is there."""
    name = f"{method}-shuffle{shuffle}-seed{seed}"
    path = study.out / f"{name}.json"
    if path.is_file():
        return dict(json.loads(path.read_text()))
    console.rule(name)
    start = time.perf_counter()
    folder = study.runs / name
    options: dict[str, Any] = {"init": study.init, "fold_seed": shuffle, "seed": seed, **study.changes}
    if study.register != "none":
        options["preprocessing"] = Preprocessing(register=study.register)
    train(study.data, folder, method=method, cache=study.cache, console=console, **options)
    evaluation = Evaluation.read(folder, cache=study.cache)
    record = {
        "method": method,
        "shuffle": shuffle,
        "seed": seed,
        "command": command(study, method, shuffle, seed),
        "wall_seconds": round(time.perf_counter() - start, 1),
        "threads": study.threads,
        "commit": commit(),
        "machine": machine(),
        "versions": versions(),
        "people": evaluation.people,
        "level": [scan.columns.get(study.label) for scan in evaluation.scans],
        "age": evaluation.held_out.age_N.round(3).tolist(),
        "estimates": {estimate: values.round(3).tolist() for estimate, values in evaluation.estimates.items()},
        "coverage": evaluation.held_out.coverage,
        "config": {**evaluation.config, "data": study.data.name},
    }
    write(path, record)
    console.print({estimate: round(mae(record, estimate, study), 2) for estimate in record["estimates"]})
    return record


def command(study: Study, method: str, shuffle: int, seed: int) -> str:
    """What makes this run, among others."""
    changes = "".join(f" {name} {value:g}" for name, value in study.changes.items())
    return (
        f"python benchmarks/brain_ixi50.py DATA --methods {method} --shuffles {shuffle + 1} --seeds {seed + 1} "
        f"--init {study.init} --register {study.register}" + (f" --changes{changes}" if changes else "")
    )


def inside(record: dict[str, Any], study: Study) -> np.ndarray:
    """Which scans belong to the batch that is judged."""
    return np.array([level == study.level for level in record["level"]])


def errors(record: dict[str, Any], estimate: str, study: Study) -> np.ndarray:
    """Absolute errors inside the batch."""
    rows = inside(record, study)
    return np.abs(np.array(record["estimates"][estimate])[rows] - np.array(record["age"])[rows])


def mae(record: dict[str, Any], estimate: str, study: Study) -> float:
    """Mean absolute error inside the batch."""
    return float(errors(record, estimate, study).mean())


def summarise(records: list[dict[str, Any]], study: Study) -> dict[str, Any]:
    """Errors of every estimate, averaged over runs for each person; differences with intervals over people."""
    rows = inside(records[0], study)
    people = [person for person, wanted in zip(records[0]["people"], rows, strict=True) if wanted]
    own = {
        method: [r for r in records if r["method"] == method] for method in dict.fromkeys(r["method"] for r in records)
    }
    error = {method: np.mean([errors(r, method, study) for r in runs], axis=0) for method, runs in own.items()}
    spread = {method: [mae(r, method, study) for r in runs] for method, runs in own.items()}
    for estimate in records[0]["estimates"]:
        if estimate not in error:
            error[estimate] = np.mean([errors(r, estimate, study) for r in records], axis=0)
            spread[estimate] = [mae(r, estimate, study) for r in records]
    label_only = f"{study.label} only"
    pairs = [("ermoe", label_only), ("ermoe", "vit3d"), ("ermoe", "tissue ridge"), ("vit3d", label_only)]
    pairs += [(method, label_only) for method in study.once] + [("ermoe", method) for method in study.once]
    differences = {}
    for first, second in pairs:
        if first in error and second in error:
            found = paired_difference(people, error[first], error[second], draws=10_000)
            differences[f"{first} - {second}"] = [round(value, 3) for value in (found.value, found.low, found.high)]
    return {
        "judged": f"{len(people)} people of {study.label} {study.level}; {label_only} is their training mean",
        "mae": {name: round(float(values.mean()), 3) for name, values in error.items()},
        "mae_of_runs": {name: [round(value, 3) for value in values] for name, values in spread.items()},
        "r_of_runs": {method: [round(_r(r, method, study), 3) for r in runs] for method, runs in own.items()},
        "difference_low_high": differences,
        "num_runs": {method: len(runs) for method, runs in own.items()},
    }


def _r(record: dict[str, Any], estimate: str, study: Study) -> float:
    rows = inside(record, study)
    return figures(np.array(record["age"])[rows], np.array(record["estimates"][estimate])[rows])["r"]


def table(summary: dict[str, Any]) -> str:
    """In Markdown."""
    lines = [
        f"Judged: {summary['judged']}.",
        "",
        "| estimate | runs | MAE | lowest – highest run |",
        "| :-- | --: | --: | --: |",
    ]
    for name, value in sorted(summary["mae"].items(), key=lambda item: item[1]):
        runs = summary["mae_of_runs"][name]
        lines.append(f"| {name} | {len(runs)} | {value:.2f} | {min(runs):.2f} – {max(runs):.2f} |")
    lines += ["", "| difference of MAE | years | 95 % interval |", "| :-- | --: | --: |"]
    for name, (value, low, high) in summary["difference_low_high"].items():
        lines.append(f"| {name} | {value:+.2f} | {low:+.2f} to {high:+.2f} |")
    return "\n".join(lines)


def write(path: Path, content: dict[str, Any]) -> None:
    with replacing(path) as draft:
        draft.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
