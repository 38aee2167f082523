"""Running a model over whatever a data loader yields."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ermoe.errors import UserError


@torch.no_grad()
def run(model: nn.Module, batches: Iterable[Any]) -> int:
    """Runs the model in evaluation mode over batches, and returns how many there were.

    A batch is a tensor of images, a list or tuple that starts with one, or a mapping of keyword arguments.
    """
    refuse_tensor(batches)
    device = next(model.parameters()).device
    count = 0
    with evaluating(model):
        for batch in batches:
            if isinstance(batch, dict):
                model(**{name: _finite(value).to(device) for name, value in batch.items()})
            else:
                model(_finite(_images(batch)).to(device))
            count += 1
    return count


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Within it the model is in evaluation mode; afterwards each of its modules is in its own mode again."""
    before = {module: module.training for module in model.modules()}
    try:
        model.eval()
        yield
    finally:
        for module, training in before.items():
            module.training = training


def refuse_tensor(batches: object) -> None:
    """A tensor is one batch, and going through it would yield single images."""
    if isinstance(batches, Tensor):
        raise UserError(f"batches is one tensor of shape {tuple(batches.shape)}: pass a list of batches, [images]")


def _finite(inputs: Tensor) -> Tensor:
    if not bool(inputs.isfinite().all()):
        raise UserError("a batch holds NaN or infinity: look for broken images or for a division by zero before it")
    return inputs


def _images(batch: Any) -> Tensor:
    images = batch[0] if isinstance(batch, (tuple, list)) and batch else batch
    if not isinstance(images, Tensor):
        raise UserError(
            f"a batch is a {type(batch).__name__}: need a tensor of images, a tuple that starts with one, or a mapping "
            "of the model's keyword arguments"
        )
    return images
