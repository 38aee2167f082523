"""Brain age of the fifty IXI people: ERMoE-ba beside a 3D ViT, SFCN, Swin and estimates that need no network.

Five folds by person, several shuffles of the folds and several seeds; every method has the same folds
and epochs. The two batches of this data set are confounded with age, so methods are judged inside one batch: errors are
averaged over runs for each person, and people are resampled.

    python benchmarks/brain_ixi50.py DATA [--shuffles 3] [--seeds 0 1 2] [--threads 2]

A queue that resumes: a line a run in benchmarks/results/brain_ixi50.jsonl; one that was interrupted goes on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import tyro
from rich.console import Console

from ermoe.brain.data.preprocess import Preprocessing
from ermoe.brain.evaluation import Evaluation
from ermoe.brain.metrics import paired_difference
from ermoe.brain.run import train
from ermoe.studies.record import Job, Record, run_queue
from ermoe.studies.tables import Table

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Options:
    """Train every method over shuffles of the folds and seeds, and compare within one batch."""

    data: Annotated[Path, tyro.conf.Positional]
    out: Path = RESULTS
    runs: Path = Path("runs/brain-ixi50")
    """Where the run folders go; they are not part of the results."""
    cache: Path | None = None
    shuffles: int = 3
    seeds: tuple[int, ...] = (0, 1, 2)
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
    options = tyro.cli(Options)
    torch.set_num_threads(options.threads)
    console = Console()
    records = run_queue("brain_ixi50", jobs(options, console), options.out / "brain_ixi50.jsonl", console=console)
    for part in tables(records, options):
        console.print(part.markdown(), end="\n\n", highlight=False, soft_wrap=True)


def jobs(options: Options, console: Console) -> list[Job]:
    """Methods innermost, so that an unfinished study still compares them."""
    pairs = [(shuffle, seed) for seed in options.seeds for shuffle in range(options.shuffles)]
    every = [(method, *pair) for pair in pairs for method in options.methods]
    first = len(options.methods)
    ordered = every[:first] + [(method, 0, 0) for method in options.once] + every[first:]
    asked = {"init": options.init, "register": options.register, "changes": options.changes}
    changed = [str(value) for value in (options.init, options.register) if value not in ("random", "none")]
    changed += [f"{name} {value:g}" for name, value in options.changes.items()]
    return [
        Job(
            ", ".join([method, f"shuffle {shuffle}", *changed]),
            seed,
            partial(figures_of_run, options, method, shuffle, seed, console),
            {"method": method, "shuffle": shuffle, **asked},
        )
        for method, shuffle, seed in ordered
    ]


def figures_of_run(options: Options, method: str, shuffle: int, seed: int, console: Console) -> dict[str, Any]:
    """One five-fold run: the estimates of everybody by the fold that had not learnt from them."""
    folder = options.runs / f"{method}-shuffle{shuffle}-seed{seed}"
    changes: dict[str, Any] = {"init": options.init, "fold_seed": shuffle, "seed": seed, **options.changes}
    if options.register != "none":
        changes["preprocessing"] = Preprocessing(register=options.register)
    train(options.data, folder, method=method, cache=options.cache, console=console, **changes)
    evaluation = Evaluation.read(folder, cache=options.cache)
    return {
        "people": evaluation.people,
        "level": [scan.columns.get(options.label) for scan in evaluation.scans],
        "age": evaluation.held_out.age_N.round(3).tolist(),
        "estimates": {estimate: values.round(3).tolist() for estimate, values in evaluation.estimates.items()},
        "coverage": evaluation.held_out.coverage,
        "config": {**evaluation.config, "data": options.data.name},
    }


def errors(record: Record, estimate: str, level: str) -> np.ndarray:
    """Absolute errors inside the batch that is judged."""
    figures = record["figures"]
    rows = np.array(figures["level"]) == level
    return np.abs(np.array(figures["estimates"][estimate])[rows] - np.array(figures["age"])[rows])


def tables(records: list[Record], options: Options) -> tuple[Table, Table]:
    """Errors of every estimate, averaged over runs for each person; differences with intervals over people."""
    first = records[0]["figures"]
    people = [person for person, level in zip(first["people"], first["level"], strict=True) if level == options.level]
    methods = dict.fromkeys(record["settings"]["method"] for record in records)
    errors_of = {
        estimate: [
            errors(record, estimate, options.level)
            for record in records
            if estimate not in methods or record["settings"]["method"] == estimate
        ]
        for estimate in [*methods, *(estimate for estimate in first["estimates"] if estimate not in methods)]
    }
    error = {estimate: np.mean(runs, axis=0) for estimate, runs in errors_of.items()}
    rows = []
    for name in sorted(error, key=lambda name: error[name].mean()):
        of_runs = [run.mean() for run in errors_of[name]]
        rows.append([name, f"{len(of_runs)}", f"{error[name].mean():.2f}", f"{min(of_runs):.2f} – {max(of_runs):.2f}"])
    label_only = f"{options.label} only"
    pairs = [("ermoe", label_only), ("ermoe", "vit3d"), ("ermoe", "tissue ridge"), ("vit3d", label_only)]
    pairs += [(method, label_only) for method in options.once] + [("ermoe", method) for method in options.once]
    compared = []
    for one, other in pairs:
        if one in error and other in error:
            found = paired_difference(people, error[one], error[other], draws=10_000)
            compared.append([f"{one} − {other}", f"{found.value:+.2f}", f"{found.low:+.2f} to {found.high:+.2f}"])
    judged = f"MAE of {len(people)} people of {options.label} {options.level}, years"
    return (
        Table(["estimate", "runs", judged, "lowest – highest run"], rows),
        Table(["difference of MAE", "years", "95 % interval"], compared),
    )


def everybody(records: list[Record], level: str) -> Table:
    """Errors over all people, and how far predictions follow age: slope and r, inside the level and over all."""
    rows = []
    for estimate in dict.fromkeys(name for record in records for name in record["figures"]["estimates"]):
        own = [record for record in records if record["settings"]["method"] == estimate]
        found = [_follows(record, estimate, level) for record in own or records]
        coverage = [record["figures"]["coverage"] for record in own]
        means = [f"{mean:.2f}" for mean in np.mean(found, axis=0)]
        rows.append([estimate, *means, f"{np.mean(coverage):.0%}" if coverage else "–"])
    inside = [f"slope inside {level}", f"r inside {level}"]
    return Table(["estimate", "MAE of all, years", "slope", *inside, "held by 90 % intervals"], rows)


def _follows(record: Record, estimate: str, level: str) -> tuple[float, float, float, float]:
    figures = record["figures"]
    age, predicted = np.array(figures["age"]), np.array(figures["estimates"][estimate])
    inside = np.array(figures["level"]) == level
    error = float(np.abs(predicted - age).mean())
    return error, _slope(age, predicted), _slope(age[inside], predicted[inside]), _r(age[inside], predicted[inside])


def _slope(age: np.ndarray, predicted: np.ndarray) -> float:
    return float(np.polyfit(age, predicted, 1)[0])


def _r(age: np.ndarray, predicted: np.ndarray) -> float:
    return float(np.corrcoef(age, predicted)[0, 1]) if predicted.std() > 0 else float("nan")


def changed(records: list[Record], labels: Mapping[str, str], level: str) -> Table:
    """Runs with something changed, beside the run with the same shuffle and seed as it is."""
    usual = next(record for record in records if record["name"] == "ermoe, shuffle 0" and record["seed"] == 0)
    people = [
        person
        for person, own in zip(usual["figures"]["people"], usual["figures"]["level"], strict=True)
        if own == level
    ]
    rows = []
    for record in records:
        if record["name"] in labels:
            error, slope, inside, _ = _follows(record, "ermoe", level)
            own, other = errors(record, "ermoe", level), errors(usual, "ermoe", level)
            difference = "–" if record is usual else paired_difference(people, own, other, draws=10_000).text()
            figures = [f"{own.mean():.2f}", difference, f"{inside:.2f}", f"{error:.2f}", f"{slope:.2f}"]
            rows.append([labels[record["name"]], *figures])
    header = [f"MAE inside {level}, years", "difference", f"slope inside {level}", "MAE of all", "slope over all"]
    return Table(["", *header], rows)


if __name__ == "__main__":
    main()
