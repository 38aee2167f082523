"""From a preset and captioned images to a finished run: what `ermoe retrieve train` does, for Python."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from ermoe.errors import UserError
from ermoe.models.io import load
from ermoe.retrieval.captions.catalogue import open_captions
from ermoe.retrieval.captions.schema import CaptionSet
from ermoe.retrieval.clip.model import CLIP
from ermoe.retrieval.contrastive import Contrastive
from ermoe.retrieval.encode import in_memory
from ermoe.retrieval.presets import Recipe, recipe
from ermoe.train.compute import Processes
from ermoe.train.loop import fit
from ermoe.train.run_folder import RunFolder


def train(
    preset: str | Recipe,
    data: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    protocol: str = "custom",
    images: str | os.PathLike[str] | None = None,
    weights: str | None = None,
    image_weights: str | None = None,
    text_from: str | None = None,
    cache: bool = False,
    workers: int = 0,
    group: Processes | None = None,
    parallel: str = "ddp",
    resume: str = "auto",
    console: Console | None = None,
    **changes: Any,
) -> dict[str, float]:
    """Trains on the train split of a protocol in a run folder, or goes on there; returns the last figures on dev.

    Args:
        preset: a name of `ermoe.retrieval.presets.PRESETS`, or a recipe of your own.
        data, protocol, images: see `ermoe.retrieval.captions.catalogue.open_captions`.
        weights, image_weights, text_from: what the towers start from; see `Recipe.build`.
        cache: decode all images once and keep them in memory.
        workers: processes that read image files ahead.
        group, parallel, resume, console: see `ermoe.train.loop.fit`.
        changes: fields of `ermoe.train.settings.Training` that are to differ from the preset.
    """
    group = Processes() if group is None else group
    name = preset if isinstance(preset, str) else "own"
    chosen = recipe(preset) if isinstance(preset, str) else preset
    chosen = replace(chosen, training=replace(chosen.training, **changes))
    if isinstance(preset, str) and chosen.init == "dense" and weights is None and text_from is None:
        raise UserError(f"{preset} starts from a CLIP: give its file with --weights")
    text_from = None if text_from is None else str(chosen_model(text_from))
    model = chosen.build(weights=weights, image_weights=image_weights, text_from=text_from)
    train_set, dev_set = (open_captions(data, protocol, split, images=images) for split in ("train", "dev"))
    if cache:
        hold_images((train_set, dev_set), model.visual.image_size[0])
    model.remember(train_set.ids)
    task = Contrastive(
        model, train_set, dev_set, chosen.training, augmentation=chosen.augmentation, objective=chosen.objective,
        label_smoothing=chosen.label_smoothing, group=group, workers=workers,
    )  # fmt: skip
    if group.is_main and console is not None:
        _introduce(task, console)
    config = asdict(chosen) | {"preset": name, "data": os.fspath(data), "protocol": protocol, "weights": weights}
    config |= {"image_weights": image_weights, "text_from": text_from, "num_images": len(train_set)}
    config.pop("training")
    return fit(
        task, chosen.training, folder, config=config, group=group, parallel=parallel, resume=resume, console=console
    )


def hold_images(sets: Sequence[CaptionSet], size: int) -> None:
    """Decodes the images of caption sets once, to ``size`` pixels a side."""
    for captions in sets:
        captions.images = in_memory(captions.images, size)


def _introduce(task: Contrastive, console: Console) -> None:
    lines = [task.train_set.found, task.dev_set.found]
    if task.num_cut:
        share = task.num_cut / len(task.train_set.texts)
        lines.append(f"{task.num_cut:,} captions ({share:.1%}) are longer than {task.clip.context_length} tokens: cut")
    if task.clip.text_is_frozen:
        lines.append("the text tower is frozen: every text is encoded once")
    console.print("\n".join(lines), highlight=False, soft_wrap=True)


def chosen_model(place: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """The model of a run folder that dev chose, the best epoch; anything else is returned as it is."""
    run = RunFolder(Path(place))
    if not run.config.is_file() or not run.metrics.is_file():
        return place
    if not run.best.is_dir():
        raise UserError(f"{place} has no model yet: its first epoch is not over")
    return run.best


def load_clip(place: str | os.PathLike[str]) -> CLIP:
    """The CLIP of a run folder, a model folder or a hub repository, in evaluation mode."""
    model = load(chosen_model(place))
    if not isinstance(model, CLIP):
        raise UserError(f"{place} holds a {type(model).__name__}, not a CLIP: name a run of ermoe retrieve train")
    return model.eval()


def save_id(place: str | os.PathLike[str]) -> str | None:
    """Which save of a model lies there, so that one that was trained further is told apart; None on the hub."""
    config = Path(chosen_model(place)) / "config.json"
    if not config.is_file():
        return None
    try:
        content: dict[str, Any] = json.loads(config.read_text(encoding="utf-8"))
        return content.get("save")
    except (ValueError, AttributeError) as problem:
        raise UserError(f"{config} is damaged: copy the model again, or train it anew") from problem
