"""Every preset with every seed on one data set: the runs of ``ermoe image study``, and their table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial

import torch
from rich.console import Console

from ermoe.images.presets import recipe
from ermoe.images.run import train
from ermoe.studies.bench.clock import Measurement
from ermoe.studies.image_command import Comparison
from ermoe.studies.queue import Job, run_queue
from ermoe.studies.record import RECORDS, Record
from ermoe.studies.tables import Show, Table, one_row_a_name, spread
from ermoe.train.compute import Compute, Processes, device_named
from ermoe.train.settings import Augmentation, Training

STUDY = "image study"
_COLUMNS = {
    "top1": ("accuracy", ".2%"),
    "load_cv2": ("load CV²", ".4f"),
    "weight_cv2": ("weight CV²", ".4f"),
    "fallback_rate": ("fallback", ".1%"),
    "fluctuation": ("fluctuation", ".1%"),
}


def run_comparison(asked: Comparison, *, console: Console | None = None) -> list[Record]:
    """Trains every preset with every seed, seeds outermost; one that was interrupted goes on."""
    torch.set_num_threads(asked.threads)
    compute = Compute(Processes(device=device_named(asked.device)), console=console)
    jobs = [_job(asked, preset, seed, compute) for seed in asked.seeds for preset in asked.presets]
    return run_queue(
        STUDY,
        jobs,
        asked.out / RECORDS,
        console=console,
        earlier=asked.out.glob("*.json"),
        defaults={"training": asdict(Training()), "augmentation": asdict(Augmentation())},
    )


def _job(asked: Comparison, preset: str, seed: int, compute: Compute) -> Job:
    """The last epoch is read, so none is chosen and nothing is held out of training for it."""
    chosen = replace(recipe(preset), validation=0.0)
    chosen = replace(chosen, training=replace(chosen.training, seed=seed, **asked.changes))
    folder = asked.out / "runs" / f"{preset}-{seed}"
    work = partial(train, chosen, asked.data, folder, compute=compute)
    return Job(preset, seed, work, {**asdict(chosen), "data": str(asked.data)})


def table(records: Sequence[Record], steps: Mapping[str, Measurement] | None = None) -> Table:
    """One row a preset: mean ± standard deviation over seeds, and median (quartiles) of step times.

    >>> print(table([{"name": "a", "seed": 1, "figures": {"top1": 0.5}}]).markdown())
    | preset | seeds | accuracy |
    | :-- | --: | --: |
    | a | 1 | 50.00% |
    """
    columns: dict[str, Show] = {
        title: spread(name, style=style)
        for name, (title, style) in _COLUMNS.items()
        if any(name in record["figures"] for record in records)
    }
    if steps:
        columns["step / dense"] = lambda runs: _ratio(steps.get(runs[0]["name"]))
    return one_row_a_name(records, "preset", columns)


def _ratio(step: Measurement | None) -> str:
    return "–" if step is None else f"{step.ratio:.2f} ({step.ratio_low:.2f}–{step.ratio_high:.2f})"
