"""Images and texts as unit vectors, and zero-shot classification: an image is of the class whose name is nearest.

Every image and text is encoded once, and left in float32 on the CPU.

Letters: I or N images, T texts, L tokens of a text, C classes, D width of the common space.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from timm.data import resolve_model_data_config
from torch import Tensor

from ermoe.data.augment import Transform
from ermoe.data.images import Images
from ermoe.data.order import evaluation_batches
from ermoe.errors import UserError
from ermoe.retrieval.clip.model import CLIP
from ermoe.retrieval.clip.towers import tokenise, trim
from ermoe.retrieval.figures import wide
from ermoe.train.compute import Compute, Processes, sum_over_processes
from ermoe.train.loader import Loader
from ermoe.train.settings import NO_AUGMENTATION, Augmentation

TEMPLATES = ("a photo of a {}.",)


def image_transform(model: CLIP, augmentation: Augmentation = NO_AUGMENTATION, seed: int = 0) -> Transform:
    """Images as the image tower wants them: its size, its mean and deviation; the middle of the shorter side's square.

    Mean and deviation are those of the tower's own pretraining, not CLIP's: a tower from ImageNet expects ImageNet's.
    """
    wants = resolve_model_data_config(model.visual.trunk)
    return Transform(model.visual.image_size[0], augmentation, seed, tuple(wants["mean"]), tuple(wants["std"]))


@torch.no_grad()
def encode_images(model: CLIP, images: Images, *, batch_size: int = 100, compute: Compute | None = None) -> Tensor:
    """Features of all images, (I, D), complete on every process; on the model's device unless ``compute`` has one."""
    compute = _where(model) if compute is None else compute
    loader = Loader(image_transform(model).of(images), batch_size=batch_size, compute=compute)
    model.eval()
    feature_ID = torch.zeros(len(images), model.embed_dim, device=compute.device, dtype=model.logit_scale.dtype)
    for batch in loader:
        assert batch.index is not None
        encoded = model.encode_image(batch.image.to(feature_ID.dtype), normalize=True)
        feature_ID[batch.index.to(compute.device)] = encoded
    return _shared(feature_ID)


@torch.no_grad()
def encode_tokens(model: CLIP, id_TL: Tensor, *, batch_size: int = 256, compute: Compute | None = None) -> Tensor:
    """Features of tokenised texts, (T, D), complete on every process.

    Texts of a batch are of like length, so that little is computed for padding.
    """
    compute = _where(model) if compute is None else compute
    group, device = compute.group, compute.device
    model.eval()
    feature_TD = torch.zeros(len(id_TL), model.embed_dim, device=device, dtype=model.logit_scale.dtype)
    by_length_T = (id_TL != 0).sum(1).argsort(stable=True)
    for index_B in evaluation_batches(len(id_TL), batch_size, rank=group.rank, num_processes=group.num):
        row_B = by_length_T[torch.from_numpy(index_B)]
        encoded = model.encode_text(trim(id_TL[row_B]).long().to(device), normalize=True)
        feature_TD[row_B.to(device)] = encoded
    return _shared(feature_TD)


def encode_texts(model: CLIP, texts: Sequence[str]) -> Tensor:
    """Features of texts, (T, D)."""
    return encode_tokens(model, tokenise(texts, model.context_length).id_TL)


def _where(model: CLIP) -> Compute:
    return Compute(Processes(device=model.logit_scale.device))


def _shared(feature: Tensor) -> Tensor:
    """Every process has filled its own rows, the others are zero."""
    return wide(sum_over_processes(feature).cpu())


def class_features(model: CLIP, classes: Sequence[str], templates: Sequence[str] = TEMPLATES) -> Tensor:
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
    templates: Sequence[str] = TEMPLATES,
    batch_size: int = 100,
    compute: Compute | None = None,
) -> Tensor:
    """The probability of each class for each image, (N, C): a softmax over cosines at the model's own temperature."""
    feature_CD = class_features(model, classes, templates)
    feature_ND = encode_images(model, images, batch_size=batch_size, compute=compute)
    scale = model.logit_scale.detach().exp().cpu().to(feature_ND.dtype)
    return (scale * feature_ND @ feature_CD.mT).softmax(-1)
