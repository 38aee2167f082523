"""Shapes that do not depend on data: those of a model's images, and the path that is the same for all tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.func import functional_call

from ermoe.errors import UserError
from ermoe.models.batches import evaluating
from ermoe.models.families import family_of
from ermoe.nn import moe_layers


def input_shape(model: nn.Module, image_size: int | tuple[int, ...] | None) -> tuple[int, ...]:
    """Channels, height and width (and depth) of the images a model takes, at its own size or at another one."""
    entry = next(m for m in model.modules() if isinstance(m, (nn.Conv2d, nn.Conv3d)))
    own = family_of(model).image_size(model)
    if image_size is None and not own:
        raise UserError(f"this {type(model).__name__} takes images of any size: choose one with image_size=")
    if image_size is None:
        return (entry.in_channels, *own)
    axes = len(entry.kernel_size)
    size = tuple(image_size) if isinstance(image_size, (tuple, list)) else (image_size,) * axes
    if len(size) != axes or not all(isinstance(edge, int) and edge > 0 for edge in size):
        raise UserError(f"image_size={image_size!r}: need a positive whole number, or a tuple of {axes}")
    shape = (entry.in_channels, *size)
    if own and size != own:
        _try(model, shape)
    return shape


def _try(model: nn.Module, shape: tuple[int, ...]) -> None:
    """Refuses what the backbone refuses, in its own words: some sizes, or all but its own."""
    try:
        run_without_data(model, (1, *shape))
    except UserError:
        raise
    except (AssertionError, RuntimeError, ValueError) as problem:
        reason = str(problem).partition("\n")[0].rstrip(".")
        name = type(model).__name__
        raise UserError(f"image_size={shape[1:]}: this {name} does not take such images ({reason})") from problem


@torch.no_grad()
def run_without_data(model: nn.Module, shape: tuple[int, ...]) -> None:
    """A forward pass along the static path over tensors that have a shape and no data; the model stays as it is."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    weightless = {name: tensor.to("meta") for name, tensor in tensors.items()}
    images = torch.empty(shape, device="meta", dtype=next(model.parameters()).dtype)
    with evaluating(model), every_expert(model):
        functional_call(model, weightless, (images,))


@contextmanager
def every_expert(model: nn.Module) -> Iterator[None]:
    """Within it, all experts run on all tokens: E / K times the work, the same numbers, static shapes."""
    before = {layer: layer.every_expert for layer in moe_layers(model).values()}
    try:
        for layer in before:
            layer.every_expert = True
        yield
    finally:
        for layer, value in before.items():
            layer.every_expert = value
