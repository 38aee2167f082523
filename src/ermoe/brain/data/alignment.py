"""Masks and labels must lie on the voxels of their T1; here they are put there, or refused."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ermoe.brain.data.affines import lattice_shift
from ermoe.brain.data.nifti import Image
from ermoe.brain.data.problems import Problem, ScanError


def on_grid_of(t1: Image, other: Image, subject: str) -> NDArray[np.float32]:
    """The voxels of ``other`` at the voxels of ``t1``; 0 where it does not reach.

    Empty slices around one of the two, or another order of axes, leave the voxels in the same places. Anything else
    is another grid, and might be another space: it is refused, not resampled.
    """
    shift = lattice_shift(other.affine, t1.affine)
    if shift is None:
        raise ScanError(Problem("error", subject, other.path, _difference(t1, other), _REMEDY))
    if not shift.any() and other.data_XYZ.shape == t1.data_XYZ.shape:
        return other.data_XYZ
    placed = np.zeros(t1.data_XYZ.shape, np.float32)
    # Along each axis: voxels [start, stop) of the T1 are voxels [start − shift, stop − shift) of the other.
    start = np.maximum(shift, 0)
    stop = np.minimum(np.array(placed.shape), shift + other.data_XYZ.shape)
    if np.all(stop > start):
        there = tuple(slice(a, b) for a, b in zip(start, stop, strict=True))
        here = tuple(slice(a - s, b - s) for a, b, s in zip(start, stop, shift, strict=True))
        placed[there] = other.data_XYZ[here]
    return placed


_REMEDY = "resample it onto the T1 with nearest neighbours, after making sure that both are in the same space"


def _difference(t1: Image, other: Image) -> str:
    own, its = (
        f"{' × '.join(map(str, image.data_XYZ.shape))} at {' × '.join(f'{edge:.2f}' for edge in image.spacing_mm)} mm"
        for image in (t1, other)
    )
    apart = "" if own != its else ", shifted or turned"
    return f"lies on another grid ({its}{apart}) than its T1 {t1.path} ({own})"
