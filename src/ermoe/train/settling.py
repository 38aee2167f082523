"""Offsets for a model that is about to be judged and kept, from training images as they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ermoe.models.calibrate import settle_offsets
from ermoe.train.loader import Source, some_batches


def settle_on(model: nn.Module, source: Source[Any], device: torch.device) -> str | None:
    """Solves the offsets of ``model`` for some batches of ``source``, the same on every process; says for which.

    None if the model has no offsets. Batches have their images as ``image``.
    """
    weight, sizes = next(model.parameters()), []

    def images() -> Iterator[Tensor]:
        for batch in some_batches(source, device):
            sizes.append(len(batch.image))
            yield batch.image.to(weight.dtype)

    if not settle_offsets(model, images()):
        return None
    return f"{sum(sizes):,} training images without augmentation, drawn by a hash"
