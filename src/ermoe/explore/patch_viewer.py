"""Images whose patches are coloured by expert, with a slider through the layers: markup for a page with patches.js.

Letters: P pictures, h × w patches.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ermoe.analysis.page import Markup, data_uri, heading, legend
from ermoe.analysis.plots import expert_colours

SCRIPT = "patches.js"
_SIDES = (96, 176)
_FIRST_LETTER = ord("0")


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
