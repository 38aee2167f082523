"""The brain all phantoms grow from: the MNI152 tissue maps of nilearn, and what ageing needs to know of them.

Letters: X, Y, Z voxels of the atlas, towards right, anterior and superior.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from scipy import ndimage

from ermoe.brain.data.nifti import Float, Grid, Image, sample
from ermoe.brain.data.preprocess import largest_piece
from ermoe.errors import UserError

SPACING_MM = 2.0
AFFINE = np.array([[2.0, 0, 0, -90], [0, 2, 0, -126], [0, 0, 2, -72], [0, 0, 0, 1]])
"""Voxels to MNI coordinates."""
_SHAPE = (91, 109, 91)
_SEED_BOX_MM = ((-45, 45), (-70, 45), (-22, 36))
_SEED_DEPTH_MM = 18.0


@dataclass(frozen=True, slots=True)
class Atlas:
    """Maps on the 2 mm grid of MNI152."""

    white_XYZ: Float
    grey_XYZ: Float
    brain_XYZ: Float
    """White, grey and CSF together, in [0, 1]."""
    ventricle_distance_XYZ: Float
    """Signed distance to the lateral ventricles in mm, negative inside."""
    away_3XYZ: Float
    """Unit vectors that lead away from the ventricles."""
    atrophy_XYZ: Float
    """Where cortex gives way to CSF, in [0, 1.25]: along the sulci, more so in front."""

    @property
    def volume_ml(self) -> float:
        """Of everything inside the skull."""
        return float(self.brain_XYZ.sum()) * SPACING_MM**3 / 1000


@lru_cache(maxsize=1)
def atlas() -> Atlas:
    """Builds the atlas, once a process."""
    white, grey, brain = _maps()
    csf = np.clip(brain - grey - white, 0, 1)
    edges_mm = (origin + SPACING_MM * np.arange(size) for origin, size in zip(AFFINE[:3, 3], _SHAPE, strict=True))
    x, y, z = np.meshgrid(*edges_mm, indexing="ij")
    deep = ndimage.distance_transform_edt(brain > 0.5) * SPACING_MM > _SEED_DEPTH_MM
    in_box = deep & (csf > 0.5)
    for axis, (low, high) in zip((x, y, z), _SEED_BOX_MM, strict=True):
        in_box &= (axis > low) & (axis < high)
    seed = largest_piece(in_box)
    distance = ndimage.distance_transform_edt(~seed) - ndimage.distance_transform_edt(seed)
    distance = ndimage.gaussian_filter(distance * SPACING_MM, 1.0)
    slope = np.stack(np.gradient(distance))
    away = slope / np.maximum(np.linalg.norm(slope, axis=0), 1e-6)
    sulci = ndimage.gaussian_filter(csf * (distance > 6), 1.0)
    reference = np.percentile(sulci[grey > 0.5], 95)
    atrophy = np.clip(sulci / reference, 0, 1) * (1 + 0.25 * np.tanh((y + 10) / 40))
    maps = (np.ascontiguousarray(one, np.float32) for one in (white, grey, brain, distance, away, atrophy))
    return Atlas(*maps)


def _maps() -> tuple[Float, Float, Float]:
    """White matter, grey matter and everything inside the skull, resampled from 1 to 2 mm."""
    datasets = _templates()
    white = _resampled(datasets.load_mni152_wm_template(resolution=1))
    grey = _resampled(datasets.load_mni152_gm_template(resolution=1))
    brain = _resampled(datasets.load_mni152_template(resolution=1), is_filled=True)
    return white, grey, np.maximum(brain, white + grey)


def _templates() -> Any:
    try:
        from nilearn import datasets
    except ImportError:
        raise UserError("phantoms are made from nilearn's templates: pip install 'ermoe[brain]'") from None
    return datasets


def _resampled(template: Any, *, is_filled: bool = False) -> Float:
    """On the atlas' grid; ``is_filled`` for the inside of a stripped template."""
    data = np.asarray(template.get_fdata(dtype=np.float32))
    data = ndimage.binary_fill_holes(data > 0).astype(np.float32) if is_filled else data
    image = Image(data, np.asarray(template.affine, np.float64), Path("MNI152"))
    return np.clip(sample(image, Grid(_SHAPE, AFFINE), order=1), 0, 1)
