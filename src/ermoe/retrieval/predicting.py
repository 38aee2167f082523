"""What image files show, named by comparing them with words.

Letters: N images, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ermoe.data.images import Prediction
from ermoe.errors import UserError
from ermoe.files import StrPath, several
from ermoe.retrieval.build import load_clip
from ermoe.retrieval.clip.model import CLIP
from ermoe.retrieval.encode import TEMPLATES, classify
from ermoe.retrieval.index import image_files
from ermoe.train.compute import Compute


def predict(
    model: CLIP | StrPath,
    images: StrPath | Sequence[StrPath],
    classes: Sequence[str],
    *,
    templates: Sequence[str] = TEMPLATES,
    top: int = 5,
    compute: Compute | None = None,
) -> list[Prediction]:
    """What image files show, by comparing them with the names of classes; no training.

    Args:
        model: a run folder, a model folder, a repository of the hub, or the model itself.
        images: files, one or several.
        classes: their names, in words.
        templates: sentences around a name, with {} in its place.
        top: classes of each image, best first.
        compute: device and workers.
    """
    if top < 1:
        raise UserError(f"top={top}: need at least 1")
    own = model if isinstance(model, CLIP) else load_clip(model, device=(compute or Compute()).device)
    files = several(images)
    chance_NC = classify(own, image_files(Path(), files), classes, templates=templates, compute=compute)
    value_NC, order_NC = chance_NC.sort(dim=-1, descending=True, stable=True)
    ranked = zip(files, order_NC[:, :top].tolist(), value_NC[:, :top].tolist(), strict=True)
    return [Prediction(file, [classes[c] for c in order_C], value_C) for file, order_C, value_C in ranked]
