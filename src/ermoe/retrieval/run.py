"""From a preset and captioned images to a finished run: what `ermoe retrieve train` does, for Python."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from ermoe.errors import UserError
from ermoe.files import StrPath
from ermoe.retrieval.captioned import CaptionedImages
from ermoe.retrieval.presets import RetrievalRecipe, recipe
from ermoe.train import loop as kit
from ermoe.train.compute import Compute
from ermoe.train.run_folder import RunFolder, model_folder
from ermoe.train.settings import changed


def train(
    preset: str | RetrievalRecipe,
    data: StrPath,
    folder: StrPath,
    *,
    protocol: str = "custom",
    images: StrPath | None = None,
    cache: bool = False,
    compute: Compute | None = None,
    resume: str = "auto",
    **changes: Any,
) -> dict[str, float]:
    """Trains on the train split of a protocol in a run folder, or goes on there; returns the last figures on dev.

    Args:
        preset: a name of `ermoe.retrieval.presets.PRESETS`, or a recipe of your own.
        data, protocol, images: see `ermoe.retrieval.captions.catalogue.open_captions`.
        folder: of the run; `evaluate`, `predict` and `build_index` take it.
        cache: decode all images once and keep them in memory.
        compute: processes, device, workers and console; its fields may also be given one by one.
        resume: see `ermoe.train.loop.fit`.
        changes: fields of the recipe, such as ``weights``, or of its training that are to differ.
    """
    compute, changes = kit.means_among(changes, compute)
    chosen = changed(recipe(preset) if isinstance(preset, str) else preset, changes)
    _refuse_to_start_from_nothing(chosen)
    if chosen.text_from is not None:  # config.json names the very epoch
        chosen = replace(chosen, text_from=str(model_folder(chosen.text_from, prefer="best")))
    with RunFolder(Path(folder)).locked(compute.group):
        captioned = CaptionedImages.open(data, protocol, images=images, cache=cache)
        return kit.train(chosen, captioned, folder, compute=compute, resume=resume)


def _refuse_to_start_from_nothing(chosen: RetrievalRecipe) -> None:
    """A preset that is made for weights from a file needs one; a text tower of ours may stand in for a CLIP."""
    if chosen.preset == "own" or chosen.init != "dense" or chosen.weights is not None:
        return
    if chosen.weights_of == "image-tower":
        raise UserError(f"{chosen.preset} starts from a {chosen.architecture}: give its file with --weights")
    if chosen.text_from is None:
        raise UserError(f"{chosen.preset} starts from a CLIP: give its file with --weights")
