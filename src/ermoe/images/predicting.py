"""The classes of single images, and the names that a run gives its classes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ermoe.data.augment import ImageSource
from ermoe.data.images import ImagesInFiles, Prediction
from ermoe.errors import UserError
from ermoe.files import StrPath, printable, read_json, several
from ermoe.images.run import as_model, opened, transform_for
from ermoe.train.compute import Compute
from ermoe.train.loader import Request, prepared

_BATCH_SIZE = 16


@torch.inference_mode()
def predict(
    model: nn.Module | StrPath,
    images: StrPath | Sequence[StrPath],
    classes: Sequence[str] | None = None,
    *,
    top: int = 5,
    compute: Compute | None = None,
) -> list[Prediction]:
    """The most probable classes of image files; one that cannot be read stops no other.

    Args:
        model: a run folder, a model folder, a repository of the hub, or the model itself.
        images: files, one or several.
        classes: names of the classes; by default those of the run, else their numbers.
        top: classes of each image, best first.
        compute: device and workers; a model that is given stays where it is.
    """
    if top < 1:
        raise UserError(f"top={top}: need at least 1")
    compute = compute or Compute()
    own: Any = model if isinstance(model, nn.Module) else opened(model, compute)
    if classes is None:
        classes = class_names("" if isinstance(model, nn.Module) else model, own.num_classes)
    return _predict(own, several(images), classes, top=top, workers=compute.workers)


def _predict(
    model: nn.Module, paths: Sequence[str], classes: Sequence[str], *, top: int, workers: int
) -> list[Prediction]:
    unlabelled = torch.zeros(len(paths), dtype=torch.long)
    summary = f"{len(paths)} files"
    images = ImagesInFiles(Path(), paths, summary=summary, split="test", classes=list(classes), label_N=unlabelled)
    model.eval()
    source = transform_for(model).of(images)
    requests = [(0, np.array([number])) for number in range(len(paths))]
    outcomes = prepared(partial(_read, source), requests, workers=workers)
    predictions: list[Prediction] = []
    for start in range(0, len(paths), _BATCH_SIZE):
        some = paths[start : start + _BATCH_SIZE]
        read = list(islice(outcomes, len(some)))
        readable = [image for image in read if isinstance(image, Tensor)]
        ranked = iter(_rank(model, readable, source, min(top, len(classes))) if readable else ())
        for path, outcome in zip(some, read, strict=True):
            if isinstance(outcome, str):
                predictions.append(Prediction(path, [], [], problem=outcome))
            else:
                chance_K, class_K = next(ranked)
                predictions.append(Prediction(path, [classes[number] for number in class_K], chance_K))
    return predictions


def _read(source: ImageSource, request: Request) -> Tensor | str:
    """Bytes (1, 3, S, S), or why there are none."""
    try:
        return source.read(request[1], request[0])
    except UserError as problem:
        return str(problem)


def _rank(
    model: nn.Module, readable: list[Tensor], source: ImageSource, top: int
) -> list[tuple[list[float], list[int]]]:
    """For each image, probabilities and numbers of its best classes."""
    batch = source.finish(torch.cat(readable), np.arange(len(readable)), 0, next(model.parameters()).device)
    chance_BK, class_BK = model(as_model(model, batch.image)).float().softmax(-1).topk(top)
    return list(zip(chance_BK.tolist(), class_BK.tolist(), strict=True))


def class_names(model: StrPath, num_classes: int) -> list[str]:
    """The names of the classes of a run, or of the run a model folder lies in; else their numbers."""
    names = _known_classes(model) if model else None
    return names if names is not None and len(names) == num_classes else [str(n) for n in range(num_classes)]


def check_classes(model: str, num_classes: int, data: str, classes: list[str]) -> None:
    """Refuses a data set whose classes are not the model's: by name where they are known, else by number."""
    advice = "evaluate it on the data set it was trained on"
    if len(classes) != num_classes:
        raise UserError(f"{model} knows {num_classes} classes and {data} has {len(classes)}: {advice}")
    known = _known_classes(model)
    if known is not None and len(known) == num_classes and known != classes:
        mine, other = next((mine, other) for mine, other in zip(known, classes, strict=True) if mine != other)
        raise UserError(f"{model} knows the class {mine!r} where {data} has {other!r}: {advice}")


def _known_classes(model: StrPath) -> list[str] | None:
    """What a run left beside its configuration, for itself or for a model in it; None where there is nothing."""
    folder = Path(model).resolve()
    for candidate in (folder, *folder.parents[:3]):
        if (path := candidate / "classes.json").is_file():
            names = read_json(path, "copy the run again")
            if not isinstance(names, list):
                raise UserError(f"{path} is damaged: it lists no classes; copy the run again")
            return [printable(str(name)) for name in names]
    return None
