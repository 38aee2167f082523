"""Shapes that do not depend on data: those of a model's images, and the path that is the same for all tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ermoe.models.families import family_of
from ermoe.nn import Experts


def input_shape(model: nn.Module, image_size: int | tuple[int, ...] | None) -> tuple[int, ...]:
    """Channels, height and width (and depth) of the images a model takes, at its own size or at another one."""
    channels = next(m.in_channels for m in model.modules() if isinstance(m, (nn.Conv2d, nn.Conv3d)))
    own = family_of(model).image_size(model)
    if image_size is None:
        return (channels, *own)
    return (channels, *((image_size,) * len(own) if isinstance(image_size, int) else image_size))


def expert_layers(model: nn.Module) -> dict[str, Any]:
    """Every layer of experts in a model, by name; also those that mix without choosing, like Soft MoE."""
    return {
        name: layer for name, layer in model.named_modules() if isinstance(getattr(layer, "experts", None), Experts)
    }


@contextmanager
def every_expert(model: nn.Module) -> Iterator[None]:
    """Within it, all experts run on all tokens: E / K times the work, the same numbers, static shapes."""
    before = {layer: layer.every_expert for layer in expert_layers(model).values()}
    try:
        for layer in before:
            layer.every_expert = True
        yield
    finally:
        for layer, value in before.items():
            layer.every_expert = value
