"""Which expert each patch of an image went to, as a picture.

Letters: B images, h × w patches, H × W pixels, T tokens, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from matplotlib.colors import to_rgb
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from ermoe.nn import Routing, moe_layers

_NOBODY = "#d9dce3"
_SMALLEST_SIDE = 96


@torch.no_grad()
def patch_experts(model: nn.Module, image_BCHW: Tensor, grid_hw: tuple[int, int]) -> dict[str, Tensor]:
    """For every MoE layer, the expert with the largest weight in each patch, (B, h, w); −1 where none had any.

    Class and register tokens come before the patches and are left out. The model is run once, in evaluation mode.
    """
    weights: dict[str, Tensor] = {}

    def keep(name: str, routing: Routing) -> None:
        weights[name] = routing.dense_weights()

    layers, was_training = moe_layers(model), model.training
    observers = {name: partial(keep, name) for name in layers}
    try:
        for name, layer in layers.items():
            layer.observers.append(observers[name])
        model.eval()(image_BCHW)
    finally:
        model.train(was_training)
        for name, layer in layers.items():
            layer.observers.remove(observers[name])
    return {
        name: _largest(weight_TE.view(len(image_BCHW), -1, weight_TE.shape[-1]), grid_hw)
        for name, weight_TE in weights.items()
    }


def patch_grid(model: Any, image_BCHW: Tensor) -> tuple[int, int]:
    """Rows and columns of patches into which a model cuts these images, from the strides of its first convolution."""
    first = next(module for module in model.modules() if isinstance(module, nn.Conv2d))
    return image_BCHW.shape[-2] // first.stride[0], image_BCHW.shape[-1] // first.stride[1]


def _largest(weight_BNE: Tensor, grid_hw: tuple[int, int]) -> Tensor:
    num_patches = grid_hw[0] * grid_hw[1]
    weight, expert = weight_BNE[:, -num_patches:].max(-1)
    return torch.where(weight > 0, expert, -1).view(-1, *grid_hw).cpu()


def tinted(brightness_HW: NDArray[np.floating], expert_hw: NDArray[np.integer], washes: Sequence[str]) -> Image.Image:
    """A picture on whose paper one can see the experts: every patch is washed with the colour of its expert.

    ``brightness_HW`` runs from 0 (black) to 1. Small pictures are enlarged smoothly, and thin white lines separate
    the patches.

    >>> tinted(np.ones((8, 8)), np.zeros((4, 4), dtype=int), ["#8ea8c6"]).size
    (96, 96)
    """
    factor = max(1, -(-_SMALLEST_SIDE // min(brightness_HW.shape)))
    height, width = (factor * side for side in brightness_HW.shape)
    enlarged = Image.fromarray(brightness_HW.astype(np.float32)).resize((width, height), Image.Resampling.BICUBIC)
    brightness = np.clip(np.asarray(enlarged), 0, 1)
    wash = np.array([to_rgb(colour) for colour in (*washes, _NOBODY)])  # −1 takes the last
    rows = np.arange(height) * expert_hw.shape[0] // height
    columns = np.arange(width) * expert_hw.shape[1] // width
    rgb = brightness[:, :, None] * wash[expert_hw[rows[:, None], columns[None, :]]]
    rgb[np.flatnonzero(np.diff(rows))] = 1
    rgb[:, np.flatnonzero(np.diff(columns))] = 1
    return Image.fromarray((255 * rgb).round().astype(np.uint8))
