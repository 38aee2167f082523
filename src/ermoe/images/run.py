"""From a preset and a data set to a finished run: what `ermoe image train` does, for Python."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from ermoe.errors import UserError
from ermoe.files import read_json
from ermoe.images.labelled import LabelledImages
from ermoe.images.presets import Recipe, recipe
from ermoe.train import recipe as kit
from ermoe.train.compute import Compute
from ermoe.train.run_folder import RunFolder, model_folder

__all__ = ["check_classes", "class_names", "model_folder", "train"]


def train(
    preset: str | Recipe,
    data: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    compute: Compute | None = None,
    resume: str = "auto",
    **changes: Any,
) -> dict[str, float]:
    """Trains a preset on a data set in a run folder, or goes on with the run there; returns the last evaluation.

    Args:
        preset: a name of `ermoe.images.presets.PRESETS`, or a recipe of your own.
        data: a path or name for `ermoe.data.catalogue.open_images`.
        compute: processes, device, workers and console; its fields may also be given one by one.
        resume: see `ermoe.train.loop.fit`.
        changes: fields of the recipe, such as ``weights``, or of its training that are to differ.
    """
    means, changes = kit.means_among(changes)
    compute = means if compute is None else compute
    chosen = kit.changed(recipe(preset) if isinstance(preset, str) else preset, changes)
    images = LabelledImages.open(data)
    compute.say(f"{images.train.found}\n{images.test.found}")
    is_new = compute.group.is_main and not RunFolder(Path(folder)).last.is_file()
    if is_new and chosen.init == "dense" and chosen.weights is None:
        logging.getLogger("ermoe").warning(
            "%s is made to start from pretrained weights and starts from random ones: give --weights FILE, or timm",
            chosen.preset,
        )
    return kit.train(chosen, images, folder, compute=compute, resume=resume)


def class_names(place: str | os.PathLike[str], num_classes: int) -> list[str]:
    """The names of the classes of a run, or of the run a model folder lies in; else their numbers."""
    names = _known_classes(place)
    return names if names is not None and len(names) == num_classes else [str(n) for n in range(num_classes)]


def check_classes(place: str, num_classes: int, data: str, classes: list[str]) -> None:
    """Refuses a data set whose classes are not the model's: by name where they are known, else by number."""
    advice = "evaluate it on the data set it was trained on"
    if len(classes) != num_classes:
        raise UserError(f"{place} knows {num_classes} classes and {data} has {len(classes)}: {advice}")
    known = _known_classes(place)
    if known is not None and len(known) == num_classes and known != classes:
        mine, other = next((mine, other) for mine, other in zip(known, classes, strict=True) if mine != other)
        raise UserError(f"{place} knows the class {mine!r} where {data} has {other!r}: {advice}")


def _known_classes(place: str | os.PathLike[str]) -> list[str] | None:
    """What a run left beside its configuration, for itself or for a model in it; None where there is nothing."""
    folder = Path(place).resolve()
    for candidate in (folder, *folder.parents[:3]):
        if (path := candidate / "classes.json").is_file():
            return [str(name) for name in read_json(path, "copy the run again")]
    return None
