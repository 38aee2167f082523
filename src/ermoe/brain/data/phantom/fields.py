"""Smooth random fields: drawn coarsely, because they are smooth, and interpolated."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

_COARSE_MM = 8.0


def smooth_field(
    shape: tuple[int, int, int], spacing_mm: float, width_mm: float, rng: np.random.Generator
) -> NDArray[np.float32]:
    """Gaussian noise of mean 0 and deviation 1, smooth over ``width_mm`` (full width at half maximum)."""
    step_mm = min(_COARSE_MM, width_mm / 2)
    sigma = width_mm / 2.355 / step_mm
    rim = int(np.ceil(3 * sigma))
    coarse = tuple(int(np.ceil((size - 1) * spacing_mm / step_mm)) + 2 for size in shape)
    noise = rng.normal(size=tuple(size + 2 * rim for size in coarse)).astype(np.float32)
    field = ndimage.gaussian_filter(noise, sigma)[rim:-rim, rim:-rim, rim:-rim] * _restored(sigma)
    return _upsampled(field, shape, spacing_mm / step_mm)


def _restored(sigma: float) -> float:
    """What a Gaussian filter takes from the deviation of white noise, given back; in 3-D it is (4πσ²)^¾."""
    return float((4 * np.pi * sigma**2) ** 0.75)


def _upsampled(field: NDArray[np.float32], shape: tuple[int, int, int], ratio: float) -> NDArray[np.float32]:
    """Linear interpolation, axis by axis: as matrix products, far faster than looking up every voxel."""
    for axis, size in enumerate(shape):
        field = np.moveaxis(np.tensordot(_linear(size, field.shape[axis], ratio), field, (1, axis)), 0, axis)
    return np.ascontiguousarray(field, np.float32)


def _linear(fine: int, coarse: int, ratio: float) -> NDArray[np.float32]:
    """Weights (fine, coarse) of linear interpolation."""
    place = np.arange(fine) * ratio
    lower = np.minimum(place.astype(int), coarse - 2)
    weights = np.zeros((fine, coarse), np.float32)
    weights[np.arange(fine), lower] = 1 - (place - lower)
    weights[np.arange(fine), lower + 1] = place - lower
    return weights
