"""Which expert each patch of an image went to: as a picture, and on a page with a slider through the layers.

Letters: B images, P pictures, h × w patches, H × W pixels, T tokens, E experts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from matplotlib.colors import to_rgb
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from ermoe.analysis.page import Markup, data_uri, escape, heading, legend
from ermoe.analysis.plots import expert_colours
from ermoe.nn import Routing, moe_layers

SCRIPT = "patches.js"
_SIDES = (96, 176)
_FIRST_LETTER = ord("0")
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


@dataclass(frozen=True, slots=True)
class Patched:
    """Pictures with their captions, and by layer which expert had the largest say in each patch, (P, h, w) or −1.

    ``mistakes`` holds what the model took a picture for where it was wrong, "" elsewhere.
    """

    pictures: Sequence[Image.Image]
    captions: Sequence[str]
    experts: Mapping[str, NDArray[np.integer]]
    num_experts: int
    mistakes: Sequence[str]


def viewer(models: Mapping[str, Patched]) -> list[Markup]:
    """The slider, and the pictures of every model; the page must also run `SCRIPT`."""
    deepest = max(len(patched.experts) for patched in models.values()) - 1
    most = max(patched.num_experts for patched in models.values())
    slider = (
        '<div class="slider"><label for="layer">layer</label>'
        f'<input id="layer" type="range" min="0" max="{deepest}" step="1" value="{deepest}">'
        '<output id="layer-name" for="layer"></output></div>'
    )
    blocks = [
        Markup(slider),
        legend((f"expert {e}" if most <= 16 else str(e), c) for e, c in enumerate(expert_colours(most))),
    ]
    for number, (name, patched) in enumerate(models.items()):
        blocks += [heading(name)] if len(models) > 1 else []
        blocks.append(_pictures(number, patched))
    return [*blocks, _experts(models)]


def _pictures(number: int, patched: Patched) -> Markup:
    cells = []
    for picture, caption, mistake in zip(patched.pictures, patched.captions, patched.mistakes, strict=True):
        taken_for = f' <span class="wrong">taken for {escape(mistake)}</span>' if mistake else ""
        address = data_uri(_sized(picture))
        cells.append(
            f'<figure class="patched"><div><img src="{address}" alt="{escape(caption)}"><canvas></canvas></div>'
            f"<figcaption>{escape(caption)}{taken_for}</figcaption></figure>"
        )
    return Markup(f'<div class="patched-images" data-model="{number}">\n' + "\n".join(cells) + "\n</div>")


def _sized(picture: Image.Image) -> Image.Image:
    """Large enough to be enlarged smoothly, small enough for a page of many."""
    shorter = min(picture.size)
    side = min(max(shorter, _SIDES[0]), _SIDES[1])
    if side == shorter:
        return picture
    size = tuple(max(1, round(side * length / shorter)) for length in picture.size)
    return picture.resize((size[0], size[1]), Image.Resampling.BICUBIC)


def _experts(models: Mapping[str, Patched]) -> Markup:
    described = []
    for patched in models.values():
        layers = [{"name": name, "experts": [_letters(p) for p in maps]} for name, maps in patched.experts.items()]
        height, width = next(iter(patched.experts.values())).shape[1:]
        described.append(
            {"colours": expert_colours(patched.num_experts), "grid": [int(height), int(width)], "layers": layers}
        )
    text = json.dumps(described, ensure_ascii=True).replace("<", "\\u003c")
    return Markup(f'<script type="application/json" id="patch-experts">{text}</script>')


def _letters(expert_hw: NDArray[np.integer]) -> str:
    """A patch is one letter: "0" for expert 0 and so on, a space for none.

    >>> _letters(np.array([[0, 2], [-1, 1]]))
    '02 1'
    """
    return "".join(chr(_FIRST_LETTER + int(e)) if e >= 0 else " " for e in expert_hw.reshape(-1))
