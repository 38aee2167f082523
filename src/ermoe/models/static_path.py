"""Running a model along the path that has the same shapes whatever its tokens choose."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ermoe.nn import Experts


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
