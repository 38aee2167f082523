"""What a training step of each preset of a study costs beside the dense one: timed in turns, after the runs.

The runs of a study are minutes apart, on a machine that others may use too, so their own times are not compared.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch

from ermoe.data.images import Images, open_images
from ermoe.data.order import Order
from ermoe.images.presets import IMAGE_LEVEL, recipe
from ermoe.images.run import transform_for
from ermoe.studies.bench.clock import Measurement, compare, take_turns
from ermoe.studies.bench.model import training_step_of
from ermoe.studies.comparison import STUDY
from ermoe.studies.image_command import Comparison
from ermoe.studies.record import RECORDS, Record, add_records, new_record, read_records
from ermoe.train.loader import Loader

STEPS = "steps"
_ROUNDS = 30
_NUM_BATCHES = 4


def step_times(asked: Comparison) -> dict[str, Measurement]:
    """By preset, a step's time beside that of the dense preset of its family, from the last record of that name.

    They are timed first if there is none of these presets with this data and this number of threads. Presets whose
    family has no dense one among them are left out, and so are the image-level rivals, whose step changes halfway.
    """
    families = _families(asked.presets)
    wanted = {preset for family in families.values() for preset in family}
    if not wanted:
        return {}
    settings = {"data": asked.data.resolve().name, "threads": asked.threads, "rounds": _ROUNDS}
    figures = recorded_steps(read_records(asked.out / RECORDS), settings)
    if not wanted <= figures.keys():
        steps = {row.name: asdict(row) for dense, own in families.items() for row in _measure(asked, dense, own)}
        (record,) = add_records(asked.out / RECORDS, new_record(STUDY, STEPS, settings=settings, figures=steps))
        figures = record["figures"]
    return {preset: Measurement(**figures[preset]) for preset in asked.presets if preset in wanted}


def recorded_steps(records: Sequence[Record], settings: dict[str, Any] | None = None) -> dict[str, Any]:
    """The figures of the last record of step times, of those with these settings; nothing if there is none."""
    own = [record for record in records if record["name"] == STEPS and settings in (None, record["settings"])]
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
    torch.set_num_threads(asked.threads)
    images = open_images(asked.data, "train")
    return compare(take_turns({preset: _step(preset, images) for preset in presets}, rounds=_ROUNDS), dense)


def _step(preset: str, images: Images) -> Callable[[], object]:
    """A step on batches that are ready in memory: reading them costs every preset the same."""
    chosen = recipe(preset)
    model = chosen.build(len(images.classes))
    order = Order(len(images), chosen.training.batch_size, chosen.training.seed)
    loader = Loader(transform_for(model, chosen.augmentation).of(images), order)
    ready = [(part.image, part.label) for (part,) in itertools.islice(loader.epoch(), _NUM_BATCHES)]
    return training_step_of(model, itertools.cycle(ready))
