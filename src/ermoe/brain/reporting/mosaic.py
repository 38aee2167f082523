"""Scans as the network saw them, with the outline of the brain mask: where to look when a prediction is odd."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ermoe.brain.data.preprocess import Volume

_OUTLINE = (0xF2, 0x8E, 0x2B)
_ZOOM = 2


def mosaic(volume: Volume) -> Image.Image:
    """An axial, a coronal and a sagittal slice through the middle of the brain, side by side, outline in orange."""
    t1, mask = np.asarray(volume.t1_XYZ), np.asarray(volume.mask_XYZ)
    where = np.argwhere(mask)
    middle = where.mean(0).round().astype(int) if len(where) else np.array(mask.shape) // 2
    inside = t1[mask] if mask.any() else t1.ravel()
    low, high = np.percentile(inside, [1, 99.5])
    grey = np.where(mask, (t1 - low) / max(high - low, 1e-6), 0).clip(0, 1)
    height = max(mask.shape[1], mask.shape[2])
    panels = [
        _panel(np.take(grey, middle[axis], axis), np.take(mask, middle[axis], axis), height) for axis in (2, 1, 0)
    ]
    picture = Image.fromarray(np.concatenate(panels, axis=1))
    return picture.resize((_ZOOM * picture.width, _ZOOM * picture.height), Image.Resampling.BICUBIC)


def _panel(grey: NDArray[np.float32], mask: NDArray[np.bool_], height: int) -> NDArray[np.uint8]:
    """A slice with its second axis upwards, in colour, padded to a height."""
    colour = np.repeat((255 * grey).astype(np.uint8)[..., None], 3, axis=2)
    colour[_outline(mask)] = _OUTLINE
    upright = np.flip(colour.swapaxes(0, 1), axis=0)
    missing = height - upright.shape[0]
    return np.pad(upright, ((missing // 2, missing - missing // 2), (0, 0), (0, 0)))


def _outline(mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Voxels of the mask with a neighbour outside of it."""
    padded = np.pad(mask, 1)
    inner = padded[:-2, 1:-1] & padded[2:, 1:-1] & padded[1:-1, :-2] & padded[1:-1, 2:]
    return mask & ~inner
