"""What a training step of each preset of a study costs beside the dense one: timed in turns, after the runs.

The runs of a study are minutes apart, on a machine that others may use too, so their own times are not compared.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict

import torch

from ermoe.data.catalogue import open_images
from ermoe.data.images import Images
from ermoe.data.order import Order
from ermoe.images.classification import transform_for
from ermoe.images.presets import IMAGE_LEVEL, recipe
from ermoe.studies.bench.clock import Measurement, compare, take_turns
from ermoe.studies.bench.model import training_step_of
from ermoe.studies.bench.study import Study, circumstances, data_name, read_record, write_record
from ermoe.train.loader import Loader

_ROUNDS = 30
_NUM_BATCHES = 4


def steps_of(study: Study) -> dict[str, Measurement]:
    """By preset, a step's time beside that of the dense preset of its family, from ``out/steps.json``.

    They are timed first if that file lacks one of them or was made with other data or threads. Presets whose family has
    no dense one in the study are left out, and so are the image-level rivals, whose step changes halfway.
    """
    path = study.out / "steps.json"
    families = _families(study.presets)
    wanted = {preset for family in families.values() for preset in family}
    if not wanted:
        return {}
    settings = {"data": data_name(study.data), "threads": study.threads, "rounds": _ROUNDS}
    record = read_record(path) if path.is_file() else {}
    if record.get("settings") != settings or not wanted <= record["steps"].keys():
        steps = {row.name: asdict(row) for dense, own in families.items() for row in _measure(study, dense, own)}
        record = {"command": study.command, **circumstances(), "settings": settings, "steps": steps}
        write_record(path, record)
    return {preset: Measurement(**record["steps"][preset]) for preset in study.presets if preset in wanted}


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


def _measure(study: Study, dense: str, presets: list[str]) -> list[Measurement]:
    torch.set_num_threads(study.threads)
    images = open_images(study.data, "train")
    return compare(take_turns({preset: _step(preset, images) for preset in presets}, rounds=_ROUNDS), dense)


def _step(preset: str, images: Images) -> Callable[[], object]:
    """A step on batches that are ready in memory: reading them costs every preset the same."""
    chosen = recipe(preset)
    model = chosen.build(len(images.classes))
    order = Order(len(images), chosen.training.batch_size, chosen.training.seed)
    loader = Loader(transform_for(model, chosen.augmentation).of(images), order)
    ready = [(part.image, part.label) for (part,) in itertools.islice(loader.epoch(), _NUM_BATCHES)]
    return training_step_of(model, itertools.cycle(ready))
