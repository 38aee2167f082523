"""Whether a scan is T1-weighted, told by its brain alone: white matter, which lies deep, is bright in a T1, and fluid,
which surrounds the brain, is dark. In a T2 it is the other way round.

Letters: X, Y, Z voxels.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import ndimage

_SURFACE_MM = 4.0
_DEEP_MM = 16.0
_COARSE_MM = 2.0  # finer voxels tell no more, and distances in them take long
_LEAST = 0.5


def looks_like_t1(t1_XYZ: NDArray[np.float32], mask_XYZ: NDArray[np.bool_], spacing_mm: ArrayLike) -> bool:
    """False if the brain is not clearly brighter inside than at its surface; also newborns' T1 are not."""
    return not depth_contrast(t1_XYZ, mask_XYZ, spacing_mm) < _LEAST


def depth_contrast(t1_XYZ: NDArray[np.float32], mask_XYZ: NDArray[np.bool_], spacing_mm: ArrayLike) -> float:
    """How much brighter the brain is inside than at its surface, in standard deviations; NaN if it has no inside.

    Of fifty T1 scans of adults the lowest has 1.5, of phantoms 1.2; a T1 turned into its negative has −0.2.

    >>> ball = np.linalg.norm(np.indices((40, 40, 40)) - 19.5, axis=0)
    >>> round(depth_contrast(20 - ball, ball < 18, [2.0] * 3), 1)
    2.7
    """
    edge_mm = np.broadcast_to(np.asarray(spacing_mm, float), (3,))
    step = [max(1, round(_COARSE_MM / edge)) for edge in edge_mm]
    thinned = tuple(slice(None, None, every) for every in step)
    edge_mm, t1_XYZ, mask_XYZ = edge_mm * step, t1_XYZ[thinned], mask_XYZ[thinned]
    depth_XYZ = ndimage.distance_transform_edt(np.pad(mask_XYZ, 1), sampling=edge_mm)[1:-1, 1:-1, 1:-1]
    surface = t1_XYZ[mask_XYZ & (depth_XYZ <= max(_SURFACE_MM, edge_mm.max()))]
    deep = t1_XYZ[mask_XYZ & (depth_XYZ > _DEEP_MM)]
    spread = float(t1_XYZ[mask_XYZ].std()) if mask_XYZ.any() else 0.0
    return float(deep.mean() - surface.mean()) / spread if deep.size and surface.size and spread > 0 else math.nan
