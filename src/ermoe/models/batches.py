"""Running a model over whatever a data loader yields."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from ermoe.errors import UserError


@torch.no_grad()
def run(model: nn.Module, batches: Iterable[Any]) -> int:
    """Runs the model in evaluation mode over batches, and returns how many there were.

    A batch is a tensor of images, a list or tuple that starts with one, or a mapping of keyword arguments.
    """
    device = next(model.parameters()).device
    count = 0
    with ExitStack() as after:
        after.callback(model.train, model.training)
        model.eval()
        for batch in batches:
            if isinstance(batch, dict):
                model(**{name: value.to(device) for name, value in batch.items()})
            else:
                model(_images(batch).to(device))
            count += 1
    return count


def _images(batch: Any) -> Tensor:
    images = batch[0] if isinstance(batch, (tuple, list)) and batch else batch
    if not isinstance(images, Tensor):
        raise UserError(
            f"a batch is a {type(batch).__name__}: need a tensor of images, a tuple that starts with one, or a mapping "
            "of the model's keyword arguments"
        )
    return images
