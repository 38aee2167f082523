"""Phantoms of three scanners, each left out in turn: the default beside the ridge and what is known of tissues.

The tissue ridge is given the phantoms' own tissue maps, which are the truth they were made from; everything else reads
the T1 alone.

    python benchmarks/brain_phantom_sites.py [--presets medium-ermoe] [--subjects 240] [--seeds 0 1 2]

A queue that resumes: a line a run in benchmarks/results/brain_phantom_sites.jsonl.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from rich.console import Console

from ermoe.brain.data.phantom import synthesize
from ermoe.brain.evaluation import Evaluation
from ermoe.brain.metrics import paired_difference
from ermoe.brain.run import train
from ermoe.studies.record import Job, Record, run_queue
from ermoe.studies.tables import Table

RESULTS = Path(__file__).parent / "results"
_TRUTH = "tissue ridge"


@dataclass(frozen=True)
class Options:
    """Leave out each scanner of a phantom cohort in turn."""

    out: Path = RESULTS
    runs: Path = Path("runs/brain-phantom-sites")
    cache: Path | None = None
    presets: tuple[str, ...] = ("medium-ermoe",)
    subjects: int = 240
    seeds: tuple[int, ...] = (0, 1, 2)
    """Of the networks."""
    threads: int = 2


def main() -> None:
    options = tyro.cli(Options)
    torch.set_num_threads(options.threads)
    console = Console()
    jobs = [
        Job(preset, seed, partial(figures_of_run, options, preset, seed, console), {"subjects": options.subjects})
        for seed in options.seeds
        for preset in options.presets
    ]
    records = run_queue("brain_phantom_sites", jobs, options.out / "brain_phantom_sites.jsonl", console=console)
    console.print(table(records).markdown(), highlight=False, soft_wrap=True)


def figures_of_run(options: Options, preset: str, seed: int, console: Console) -> dict[str, Any]:
    """What every estimate says of everybody, by the fold that had not seen their scanner."""
    data = synthesize(options.runs / "bids", options.subjects, ages=(20.0, 90.0))
    folder = options.runs / f"{preset}-seed{seed}"
    asked = {"preset": preset, "split": "leave-site-out", "seed": seed}
    model = train(data, folder, cache=options.cache, console=console, check=False, **asked)
    evaluation = Evaluation.read(folder, cache=options.cache)
    return {
        "people": evaluation.people,
        "age": evaluation.held_out.age_N.round(3).tolist(),
        "estimates": {name: values.round(3).tolist() for name, values in evaluation.estimates.items()},
        "network_worth": [own.worth for own in model.blend_of_fold.values()],
    }


def table(records: Sequence[Record]) -> Table:
    """Errors averaged over seeds for each person; the estimate minus the tissue ridge, people resampled."""
    rows = []
    for preset in dict.fromkeys(record["name"] for record in records):
        found = [record["figures"] for record in records if record["name"] == preset]
        error = {
            name: np.mean([np.abs(np.subtract(f["estimates"][name], f["age"])) for f in found], axis=0)
            for name in found[0]["estimates"]
        }
        for name, own in error.items():
            difference = paired_difference(found[0]["people"], own, error[_TRUTH], draws=10_000)
            rows.append([preset, str(len(found)), name, f"{own.mean():.2f}", difference.text()])
    return Table(["preset", "seeds", "estimate", "MAE, years", "estimate − tissue ridge"], rows)


if __name__ == "__main__":
    main()
