"""Zero-shot classification: an image belongs to the class whose name, in a sentence, is nearest.

Letters: N images, C classes, D width of the common space.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ermoe.data.images import Images
from ermoe.errors import UserError
from ermoe.retrieval.clip.model import CLIP
from ermoe.retrieval.encode import encode_images, encode_texts
from ermoe.train.compute import Compute

_TEMPLATES = ("a photo of a {}.",)


def class_features(model: CLIP, classes: Sequence[str], templates: Sequence[str] = _TEMPLATES) -> Tensor:
    """One unit vector a class, (C, D): the mean over templates of the features of its name in them."""
    if len(classes) < 2:
        raise UserError(f"{len(classes)} classes: give at least two names to choose among")
    if any(not name.strip() for name in classes):
        raise UserError("a class has no name: write one for each")
    if len(set(classes)) < len(classes):
        raise UserError(
            f"the class {next(c for c in classes if list(classes).count(c) > 1)!r} is there twice: name it once"
        )
    if bad := [template for template in templates if "{}" not in template]:
        raise UserError(f"the template {bad[0]!r} has no place for a class: write {{}} where its name belongs")
    texts = [template.replace("{}", name) for name in classes for template in templates]
    feature_CD = encode_texts(model, texts).unflatten(0, (len(classes), len(templates))).mean(1)
    return torch.nn.functional.normalize(feature_CD, dim=-1)


def classify(
    model: CLIP,
    images: Images,
    classes: Sequence[str],
    *,
    templates: Sequence[str] = _TEMPLATES,
    batch_size: int = 100,
    compute: Compute | None = None,
) -> Tensor:
    """The probability of each class for each image, (N, C): a softmax over cosines at the model's own temperature."""
    feature_CD = class_features(model, classes, templates)
    feature_ND = encode_images(model, images, batch_size=batch_size, compute=compute)
    scale = model.logit_scale.detach().exp().cpu().to(feature_ND.dtype)
    return (scale * feature_ND @ feature_CD.mT).softmax(-1)


def accuracy(chance_NC: Tensor, label_N: Tensor, *, top: int = 1) -> float:
    """Share of images whose class is among the ``top`` most probable.

    >>> accuracy(torch.tensor([[0.7, 0.3], [0.4, 0.6]]), torch.tensor([0, 0]))
    0.5
    """
    best_NK = chance_NC.topk(min(top, chance_NC.shape[1])).indices
    return float((best_NK == label_N.unsqueeze(1)).any(1).double().mean())
