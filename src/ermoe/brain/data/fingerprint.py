"""What a scan tells of its scanner and its file rather than of its brain.

Letters: X, Y, Z voxels of the T1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from ermoe.brain.data.nifti import Image


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Numbers that should not know an age."""

    intensity_scale: float
    """log₁₀ of the median intensity of the brain."""
    voxel_mm: float
    """Geometric mean of the edges of a voxel."""
    field_of_view_mm: float
    """Geometric mean of the edges of the volume."""
    noise: float
    """Relative to the median intensity of the brain."""


def fingerprint(t1: Image, mask_XYZ: NDArray[np.bool_]) -> Fingerprint:
    """Of a T1 and its brain."""
    level = max(float(np.median(np.abs(t1.data_XYZ[mask_XYZ]))), 1e-12)
    spacing = t1.spacing_mm
    return Fingerprint(
        intensity_scale=float(np.log10(level)),
        voxel_mm=float(np.exp(np.log(spacing).mean())),
        field_of_view_mm=float(np.exp(np.log(spacing * t1.data_XYZ.shape).mean())),
        noise=_noise(t1.data_XYZ, mask_XYZ) / level,
    )


def _noise(data_XYZ: NDArray[np.float32], mask_XYZ: NDArray[np.bool_]) -> float:
    """Deviation of a voxel from the mean of its six neighbours, in the brightest third: white matter, far from edges.

    For independent noise of deviation σ that difference has σ √(1 + 1/6); a median is not moved by the edges left.
    """
    bright = mask_XYZ & (data_XYZ > np.percentile(data_XYZ[mask_XYZ], 66))
    inside = ndimage.binary_erosion(bright)
    inside = inside if inside.any() else bright
    neighbours = ndimage.convolve(data_XYZ, _SIX / 6)
    difference = (data_XYZ - neighbours)[inside]
    return float(1.4826 * np.median(np.abs(difference)) / np.sqrt(7 / 6)) if difference.size else 0.0


_SIX = ndimage.generate_binary_structure(3, 1).astype(np.float32)
_SIX[1, 1, 1] = 0
