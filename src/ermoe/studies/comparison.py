"""Every preset with every seed on one data set: the runs of ``ermoe image study``, their step times, and their table.

Runs are minutes apart, on a machine that others may use too, so their own times are not compared: steps of all presets
are timed in turns, after the runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from rich.console import Console

from ermoe.analysis.summary import MEASURES
from ermoe.data.images import Images, open_images
from ermoe.data.order import Order
from ermoe.images.presets import IMAGE_LEVEL, recipe
from ermoe.images.run import train, transform_for
from ermoe.studies.bench.measure import Measurement, compare, take_turns
from ermoe.studies.bench.step import training_step_of
from ermoe.studies.image_command import Comparison
from ermoe.studies.record import RECORDS, Job, Record, add_records, new_record, read_records, run_queue
from ermoe.studies.tables import Show, Table, one_row_a_name, spread
from ermoe.train.compute import Compute, Processes, device_named
from ermoe.train.loader import Loader
from ermoe.train.settings import Augmentation, Training

STEPS = "steps"
_STUDY = "image study"
_ROUNDS = 30
_NUM_BATCHES = 4
_MEASURED = ("load_cv2", "weight_cv2", "fallback_rate", "fluctuation")
_COLUMNS = {"top1": ("accuracy", ".2%")} | {name: (MEASURES[name].label, MEASURES[name].style) for name in _MEASURED}


def run_comparison(asked: Comparison, *, console: Console | None = None) -> list[Record]:
    """Trains every preset with every seed, seeds outermost; one that was interrupted goes on."""
    torch.set_num_threads(_threads(asked))
    compute = Compute(Processes(device=device_named(asked.device)), console=console)
    jobs = [_job(asked, preset, seed, compute) for seed in asked.seeds for preset in asked.presets]
    return run_queue(
        _STUDY,
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


def _threads(asked: Comparison) -> int:
    return asked.threads or torch.get_num_threads()


def step_times(asked: Comparison) -> dict[str, Measurement]:
    """By preset, a step's time beside that of the dense preset of its family, from the last record of that name.

    They are timed first if there is none of these presets with this data, device and number of threads. Presets whose
    family has no dense one among them are left out, and so are the image-level rivals, whose step changes halfway.
    """
    families = _families(asked.presets)
    wanted = {preset for family in families.values() for preset in family}
    if not wanted:
        return {}
    settings = {"data": asked.data.resolve().name, "threads": _threads(asked), "rounds": _ROUNDS}
    settings["device"] = device_named(asked.device).type
    figures = recorded_steps(read_records(asked.out / RECORDS), settings)
    if not wanted <= figures.keys():
        steps = {row.name: asdict(row) for dense, own in families.items() for row in _measure(asked, dense, own)}
        (record,) = add_records(asked.out / RECORDS, new_record(_STUDY, STEPS, settings=settings, figures=steps))
        figures = record["figures"]
    return {preset: Measurement(**figures[preset]) for preset in asked.presets if preset in wanted}


def recorded_steps(records: Sequence[Record], settings: dict[str, Any] | None = None) -> dict[str, Any]:
    """The figures of the last record of step times, of those with these settings; nothing if there is none."""
    own = [record for record in records if record["name"] == STEPS]
    if settings is not None:  # earlier versions timed on the CPU and did not say so
        own = [record for record in own if {"device": "cpu", **record["settings"]} == settings]
    return dict(own[-1]["figures"]) if own else {}


def _families(presets: Sequence[str]) -> dict[str, list[str]]:
    """Dense preset → presets that differ from it in nothing but the method, itself among them.

    >>> _families(["cifar-dense", "cifar-ermoe", "cifar17-ermoe", "cifar-deep-moe"])
    {'cifar-dense': ['cifar-dense', 'cifar-ermoe']}
    """
    comparable = [preset for preset in presets if recipe(preset).architecture not in IMAGE_LEVEL]
    return {
        dense: [preset for preset in comparable if preset.startswith(dense.removesuffix("dense"))]
        for dense in comparable
        if dense.endswith("-dense")
    }


def _measure(asked: Comparison, dense: str, presets: list[str]) -> list[Measurement]:
    torch.set_num_threads(_threads(asked))
    images, device = open_images(asked.data, "train"), device_named(asked.device)
    return compare(take_turns({preset: _step(preset, images, device) for preset in presets}, rounds=_ROUNDS), dense)


def _step(preset: str, images: Images, device: torch.device) -> Callable[[], object]:
    """A step on batches that are ready on the device: reading them costs every preset the same."""
    chosen = recipe(preset)
    model = chosen.build(len(images.classes)).to(device)
    order = Order(len(images), chosen.training.batch_size, chosen.training.seed)
    where = Compute(Processes(device=device))
    loader = Loader(transform_for(model, chosen.augmentation).of(images), order, compute=where)
    ready = [(part.image, part.label) for part in itertools.islice(loader, _NUM_BATCHES)]
    return training_step_of(model, itertools.cycle(ready))


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
