"""Generated pictures of coloured shapes with captions: something to retrieve without a download.

A scene has two shapes, each with a colour and a size, one beside or above the other. Five captions say so in different
words. Scenes with the same content are told apart by nothing, as in real sets.

Letters: S pixels of a side.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ermoe.files import write_json

COLOURS = {
    "red": (214, 45, 40),
    "green": (44, 150, 60),
    "blue": (40, 90, 205),
    "yellow": (236, 200, 40),
    "purple": (135, 70, 170),
    "orange": (240, 130, 30),
}
_SIZES = {"small": 0.11, "large": 0.19}
_PLACES = {"left of": (0, -1), "right of": (0, 1), "above": (-1, 0), "below": (1, 0)}
_SPLITS = ("train", "val", "test")
_Mask = Callable[[NDArray[np.float64], NDArray[np.float64]], NDArray[np.bool_]]
SHAPES: dict[str, _Mask] = {
    "circle": lambda y, x: x**2 + y**2 <= 1,
    "square": lambda y, x: np.maximum(abs(x), abs(y)) <= 0.88,
    "triangle": lambda y, x: (y <= 0.85) & (abs(x) <= (y + 1) * 0.55),
    "cross": lambda y, x: (np.minimum(abs(x), abs(y)) <= 0.33) & (np.maximum(abs(x), abs(y)) <= 1),
}


@dataclass(frozen=True, slots=True)
class Scene:
    """Pixels, uint8 (S, S, 3), and five captions."""

    pixels: NDArray[np.uint8]
    captions: tuple[str, ...]


def scene(seed: int, index: int, *, side: int = 48) -> Scene:
    """One scene, a function of (seed, index).

    >>> made = scene(0, 3)
    >>> made.pixels.shape, len(made.captions)
    ((48, 48, 3), 5)
    """
    random = np.random.default_rng((seed, index))
    first, second = (
        (str(random.choice(list(_SIZES))), str(random.choice(list(COLOURS))), str(random.choice(list(SHAPES))))
        for _ in range(2)
    )
    place = str(random.choice(list(_PLACES)))
    direction = np.array(_PLACES[place])
    centre = 0.5 + random.uniform(-0.06, 0.06, 2)
    paper = random.uniform(200, 245) + random.normal(0, 6, (side, side, 3))
    for (size, colour, shape), sign in ((first, 1), (second, -1)):
        _paint(paper, shape, COLOURS[colour], _SIZES[size], centre + sign * 0.24 * direction)
    return Scene(paper.clip(0, 255).astype(np.uint8), _captions(first, second, place))


def _paint(
    paper: NDArray[np.float64], shape: str, colour: tuple[int, int, int], radius: float, centre: NDArray[np.float64]
) -> None:
    place = (np.arange(len(paper)) + 0.5) / len(paper)
    y, x = np.meshgrid((place - centre[0]) / radius, (place - centre[1]) / radius, indexing="ij")
    paper[SHAPES[shape](y, x)] = colour


def _captions(first: tuple[str, str, str], second: tuple[str, str, str], place: str) -> tuple[str, ...]:
    a, b = (f"{size} {colour} {shape}" for size, colour, shape in (first, second))
    opposite = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}[place]
    return (
        f"a {a} {place} a {b}",
        f"a {b} {opposite} a {a}",
        f"there is a {a} and, {opposite} it, a {b}",
        f"the {first[2]} is {first[0]} and {first[1]}, {place} the {second[0]} {second[1]} {second[2]}",
        f"two shapes: the {a} is {place} the {b}",
    )


def write_shapes(
    folder: Path, *, train: int = 800, dev: int = 100, test: int = 100, side: int = 48, seed: int = 0
) -> Path:
    """Writes the splits as images and one JSON in Karpathy's layout, unless they are there; returns the folder."""
    listing = folder / "dataset_shapes.json"
    if listing.is_file():
        return folder
    (folder / "images").mkdir(parents=True, exist_ok=True)
    entries, index = [], 0
    for split, count in zip(_SPLITS, (train, dev, test), strict=True):
        for _ in range(count):
            made, name = scene(seed, index, side=side), f"shapes-{seed}-{index:05d}.png"
            Image.fromarray(made.pixels).save(folder / "images" / name)
            sentences = [{"raw": caption} for caption in made.captions]
            entries.append({"filename": name, "split": split, "sentences": sentences, "imgid": index})
            index += 1
    write_json(listing, {"dataset": "shapes", "images": entries})
    return folder
