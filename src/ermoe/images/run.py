"""From a preset and a data set to a finished run: what `ermoe image train` does, for Python."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from ermoe.data.catalogue import open_images
from ermoe.errors import UserError
from ermoe.files import replacing
from ermoe.images.classification import Classification
from ermoe.images.presets import Recipe, recipe
from ermoe.images.rivals.image_level import STYLES
from ermoe.images.two_stages import TwoStageClassification
from ermoe.train.distributed import Processes
from ermoe.train.loop import fit
from ermoe.train.run_folder import RunFolder


def train(
    preset: str | Recipe,
    data: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    weights: str | None = None,
    workers: int = 0,
    group: Processes | None = None,
    parallel: str = "ddp",
    compile: bool = False,
    resume: str = "auto",
    console: Console | None = None,
    **changes: Any,
) -> dict[str, float]:
    """Trains a preset on a data set in a run folder, or goes on with the run there; returns the last evaluation.

    Args:
        preset: a name of `ermoe.images.presets.PRESETS`, or a recipe of your own.
        data: a path or name for `ermoe.data.catalogue.open_images`.
        weights: what the model starts from: a file, or "timm".
        workers: processes that read image files ahead.
        group, parallel, compile, resume, console: see `ermoe.train.loop.fit`.
        changes: fields of `ermoe.train.settings.Training` that are to differ from the preset.
    """
    group = Processes() if group is None else group
    name = preset if isinstance(preset, str) else "own"
    chosen = recipe(preset) if isinstance(preset, str) else preset
    chosen = replace(chosen, training=replace(chosen.training, **changes))
    images, held_out = open_images(data, "train"), open_images(data, "test")
    if group.is_main and console is not None:
        console.print(f"{images.found}\n{held_out.found}", highlight=False, soft_wrap=True)
    task_class = TwoStageClassification if chosen.architecture in STYLES else Classification
    task = task_class(
        chosen.build(len(images.classes), weights=weights),  # type: ignore[arg-type]
        images,
        held_out,
        chosen.training,
        augmentation=chosen.augmentation,
        label_smoothing=chosen.label_smoothing,
        group=group,
        workers=workers,
    )
    config = asdict(chosen) | {"preset": name, "data": os.fspath(data), "weights": weights}
    config |= {"num_images": len(images), "num_classes": len(images.classes)}
    goes_on = RunFolder(Path(folder)).open(config, resume, group)
    claim_classes(Path(folder), images.classes, group)
    if group.is_main and not goes_on and chosen.init == "dense" and weights is None:
        logging.getLogger("ermoe").warning(
            "%s is made to start from pretrained weights and starts from random ones: give --weights FILE, or timm",
            name,
        )
    return fit(
        task,
        chosen.training,
        folder,
        config=config,
        group=group,
        parallel=parallel,
        compile=compile,
        resume=resume,
        console=console,
    )


def claim_classes(folder: Path, classes: list[str], group: Processes) -> None:
    """Leaves the names of the classes in a run folder, for `ermoe image predict`; a run that has others is refused."""
    path = folder / "classes.json"
    if path.is_file():
        if json.loads(path.read_text(encoding="utf-8")) != classes:
            raise UserError(f"{folder} holds a run with other classes: choose another folder, or look at the data")
    elif group.is_main:
        with replacing(path) as draft:
            draft.write_text(json.dumps(classes, ensure_ascii=False) + "\n", encoding="utf-8")


def model_folder(place: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """The model of a run folder: the final one, else the best so far; anything else is returned as it is."""
    run = RunFolder(Path(place))
    if not run.config.is_file() or not (run.folder / "metrics.jsonl").is_file():
        return place
    found = next((folder for folder in (run.final, run.best) if folder.is_dir()), None)
    if found is None:
        raise UserError(f"{place} has no model yet: its first epoch is not over")
    return found


def class_names(place: str | os.PathLike[str], num_classes: int) -> list[str]:
    """The names of the classes of a run, or of the run a model folder lies in; else their numbers."""
    names = known_classes(place)
    return names if names is not None and len(names) == num_classes else [str(n) for n in range(num_classes)]


def known_classes(place: str | os.PathLike[str]) -> list[str] | None:
    """What `claim_classes` left for a run or for a model in it; None where it left nothing."""
    folder = Path(place).resolve()
    for candidate in (folder, *folder.parents[:3]):
        if (candidate / "classes.json").is_file():
            return [str(name) for name in json.loads((candidate / "classes.json").read_text(encoding="utf-8"))]
    return None
