"""Images and texts as unit vectors: every one once, in float32, on the CPU.

Letters: I images, T texts, L tokens of a text, D width of the common space.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from timm.data import resolve_model_data_config
from torch import Tensor

from ermoe.data.augment import Transform
from ermoe.data.augmentation import NO_AUGMENTATION, Augmentation
from ermoe.data.images import Images, ImagesInMemory
from ermoe.data.order import evaluation_batches
from ermoe.retrieval.clip.model import CLIP
from ermoe.retrieval.clip.tokens import tokenise
from ermoe.retrieval.clip.towers import trim
from ermoe.train.compute import Compute, Processes, sum_over_processes
from ermoe.train.loader import Loader


def image_transform(model: CLIP, augmentation: Augmentation = NO_AUGMENTATION, seed: int = 0) -> Transform:
    """Images as the image tower wants them: its size, its mean and deviation; the middle of the shorter side's square.

    Mean and deviation are those of the tower's own pretraining, not CLIP's: a tower from ImageNet expects ImageNet's.
    """
    wants = resolve_model_data_config(model.visual.trunk)
    return Transform(model.visual.image_size[0], augmentation, seed, tuple(wants["mean"]), tuple(wants["std"]))


def in_memory(images: Images, size: int, *, portion: int = 256) -> ImagesInMemory:
    """All images decoded once and cut to ``size``, as bytes: for sets that fit."""
    if isinstance(images, ImagesInMemory):
        return images
    cut = Transform(size)
    parts = [
        cut.host(images, np.arange(start, min(start + portion, len(images))), epoch=0)
        for start in range(0, len(images), portion)
    ]
    return ImagesInMemory(
        torch.cat(parts), found=images.found, split=images.split, classes=images.classes, label_N=images.label_N
    )


@torch.no_grad()
def encode_images(
    model: CLIP, images: Images, *, batch_size: int = 100, workers: int = 0, group: Processes | None = None
) -> Tensor:
    """Features of all images, (I, D), complete on every process."""
    group = Processes(device=model.logit_scale.device) if group is None else group
    compute = Compute(group, workers=workers)
    loader = Loader(image_transform(model).of(images), batch_size=batch_size, compute=compute)
    model.eval()
    feature_ID = torch.zeros(len(images), model.embed_dim, device=group.device, dtype=model.logit_scale.dtype)
    for (batch,) in loader.epoch():
        assert batch.index is not None
        encoded = model.encode_image(batch.image.to(feature_ID.dtype), normalize=True)
        feature_ID[batch.index.to(group.device)] = encoded
    return _shared(feature_ID)


@torch.no_grad()
def encode_tokens(model: CLIP, id_TL: Tensor, *, batch_size: int = 256, group: Processes | None = None) -> Tensor:
    """Features of tokenised texts, (T, D), complete on every process.

    Texts of a batch are of like length, so that little is computed for padding.
    """
    group = Processes(device=model.logit_scale.device) if group is None else group
    model.eval()
    feature_TD = torch.zeros(len(id_TL), model.embed_dim, device=group.device, dtype=model.logit_scale.dtype)
    by_length_T = (id_TL != 0).sum(1).argsort(stable=True)
    for index_B in evaluation_batches(len(id_TL), batch_size, rank=group.rank, num_processes=group.num):
        rows = by_length_T[torch.from_numpy(index_B)]
        encoded = model.encode_text(trim(id_TL[rows]).long().to(group.device), normalize=True)
        feature_TD[rows.to(group.device)] = encoded
    return _shared(feature_TD)


def encode_texts(model: CLIP, texts: Sequence[str]) -> Tensor:
    """Features of texts, (T, D)."""
    return encode_tokens(model, tokenise(texts, model.context_length).id_TL)


def _shared(feature: Tensor) -> Tensor:
    """Every process has filled its own rows, the others are zero."""
    summed = sum_over_processes(feature).cpu()
    return summed if summed.dtype == torch.float64 else summed.float()
