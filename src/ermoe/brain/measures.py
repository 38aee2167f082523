"""What a T1 and its brain mask tell of a brain without labels and without learning: a few numbers a scan.

A brain that ages loses grey matter, and fluid takes its place: in the ventricles, deep inside, and in the sulci. So the
measures are shares of three tissues, read off the intensities, at several depths below the surface of the mask, and the
size of the brain. Three steps keep scanners out of them:

1. Shading. White matter is as bright everywhere; what differs smoothly from place to place is the coil. The brightness
   of white matter around every place divides it out.
2. Brightness. Three normal distributions of one width are fitted to the intensities. Their means say where fluid, grey
   and white matter lie on this scan's scale, whatever the scale is.
3. Mask. Tools differ in how much fluid they leave around a brain. What lies within 4 mm of the mask's surface is left
   out of every share, and the others count from deeper still.

What each step is worth was judged by how well shares follow those of a segmentation over fifty people of IXI; what else
was looked at meanwhile: docs/explanation/brain-age.md.

Letters: N voxels of the brain, M = 3 tissues: wm, gm, csf, K bins of the histogram.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from ermoe.brain.data.nifti import bounding_box
from ermoe.errors import UserError

Double = NDArray[np.float64]
Bool = NDArray[np.bool_]

_BLOCK_MM = 8.0  # of the places at which shading is known
_SHADING_MM = 32.0  # over which it is smooth
_ROUNDS = 3
_LARGEST_SHADING = 1.6
_NUM_BINS = 200
_ITERATIONS = 60
_FIRST_SHARES = (0.35, 0.50, 0.15)
_TRIM = 0.002
_FEWEST_VOXELS = 400
_DEPTHS_MM = (4, 8, 12, 16)
_FLUID_MM, _VENTRICLES_MM = 8, 16

MEASURES = (
    *(f"grey_{depth}mm" for depth in _DEPTHS_MM),
    f"fluid_{_FLUID_MM}mm",
    "log_ventricles",
    "cortex_mm",
    "log_litres",
)
"""Grey matter among grey and white, deeper than so many mm; fluid in all that is deeper than 8 mm; the logarithm of the
fluid deeper than 16 mm, mostly ventricles, over the brain's volume; grey matter over the surface of the white, which is
how thick the cortex is; the logarithm of the volume."""


@dataclass(frozen=True, slots=True)
class Tissues:
    """The voxels of a brain and what they hold.

    Args:
        place_N3: indices of the voxels.
        depth_N: distance from the surface of the mask in mm.
        share_MN: of white matter, grey matter and fluid in each voxel; they sum to 1.
        contrast: (grey − fluid) / (white − fluid), of mean intensities.
        spread: deviation of a tissue's intensities over (white − fluid).
    """

    place_N3: NDArray[np.int64]
    depth_N: Double
    share_MN: Double
    contrast: float
    spread: float


def tissues_of(t1_XYZ: NDArray[np.float32], mask_XYZ: Bool, spacing_mm: float) -> Tissues:
    """Shares of tissues in every voxel of the mask; `UserError` if its voxels cannot be told apart."""
    if mask_XYZ.sum() < _FEWEST_VOXELS:
        raise UserError(f"a brain mask of {mask_XYZ.sum()} voxels is too small to tell tissues apart")
    box = bounding_box(mask_XYZ)
    t1_XYZ, mask_XYZ = t1_XYZ[box], mask_XYZ[box]
    place_N3 = np.argwhere(mask_XYZ)
    depth_XYZ = ndimage.distance_transform_edt(np.pad(mask_XYZ, 1), sampling=spacing_mm)[1:-1, 1:-1, 1:-1]
    depth_N = depth_XYZ[mask_XYZ]
    value_N = t1_XYZ[mask_XYZ].astype(np.float64)
    darkest = np.quantile(value_N, _TRIM)
    if not np.quantile(value_N, 1 - _TRIM) > darkest:
        raise UserError("the voxels inside the brain mask are all equal: this is no T1 scan")
    even_N = _without_shading(np.maximum(value_N - darkest, 0), np.asarray(place_N3 * spacing_mm, dtype=np.float64))
    mean_M, width = fit_brightness(even_N)
    bright, grey, dark = mean_M
    fluid_N = np.clip((grey - even_N) / (grey - dark), 0, 1)
    white_N = np.clip((even_N - grey) / (bright - grey), 0, 1)
    share_MN = np.stack([white_N, 1 - fluid_N - white_N, fluid_N])
    return Tissues(place_N3, depth_N, share_MN, (grey - dark) / (bright - dark), width / (bright - dark))


def _without_shading(value_N: Double, place_mm_N3: Double) -> Double:
    """Intensities over the brightness of the white matter around them."""
    block_N3 = (place_mm_N3 // _BLOCK_MM).astype(np.int64)
    shape = tuple(block_N3.max(0) + 1)
    block_N = np.ravel_multi_index(tuple(block_N3.T), shape)
    between_N3 = place_mm_N3 / _BLOCK_MM - 0.5
    for _ in range(_ROUNDS):
        (bright, grey, _), _ = fit_brightness(value_N)
        white_N = value_N > (bright + grey) / 2
        count, total = (
            ndimage.gaussian_filter(
                np.bincount(block_N[white_N], weights, minlength=int(np.prod(shape))).reshape(shape),
                _SHADING_MM / _BLOCK_MM,
            )
            for weights in (None, value_N[white_N])
        )
        # Where there is no white matter near, the mean of all of it: no correction.
        mean = value_N[white_N].mean()
        field = (total + 1e-3 * mean) / (count + 1e-3) / mean
        field = np.clip(field, 1 / _LARGEST_SHADING, _LARGEST_SHADING)
        value_N = value_N / ndimage.map_coordinates(field, between_N3.T, order=1, mode="nearest")
    return value_N


def fit_brightness(value_N: Double) -> tuple[Double, float]:
    """Mean intensities of white matter, grey matter and fluid, (M,), and the deviation that they share.

    Expectation–maximisation on the histogram, from the quantiles that usual shares of tissue suggest. With a width of
    its own, fluid, which is little and lies beside everything, would take the dark half of the grey matter.
    """
    share_M = np.array(_FIRST_SHARES)
    middle_M = 1 - (share_M.cumsum() - share_M / 2)  # white matter is the brightest
    low, *middle, high = np.quantile(value_N, [_TRIM, *middle_M, 1 - _TRIM])
    count_K, edge_K = np.histogram(value_N, _NUM_BINS, (low, high))
    centre_K1 = ((edge_K[:-1] + edge_K[1:]) / 2 - low)[:, None] / (high - low)
    mean_M, variance = (np.array(middle) - low) / (high - low), 0.1**2
    for _ in range(_ITERATIONS):
        likelihood_KM = share_M * np.exp(-((centre_K1 - mean_M) ** 2) / (2 * variance))
        weight_KM = likelihood_KM / (likelihood_KM.sum(1, keepdims=True) + 1e-300) * count_K[:, None]
        total_M = np.maximum(weight_KM.sum(0), 1)
        mean_M = (weight_KM * centre_K1).sum(0) / total_M
        variance = max(float((weight_KM * (centre_K1 - mean_M) ** 2).sum() / total_M.sum()), 0.02**2)
        share_M = np.maximum(total_M / total_M.sum(), 0.02)
    dark, grey, bright = np.sort(mean_M)
    apart_M = np.array([max(bright, grey + 0.02), grey, min(dark, grey - 0.02)])  # no two tissues coincide
    return low + (high - low) * apart_M, float(np.sqrt(variance) * (high - low))


def measures_among(tissues: Tissues, spacing_mm: float) -> Double:
    """`MEASURES` of a brain whose tissues are known, (F,); `UserError` if it has no inside."""
    depth_N, share_MN = tissues.depth_N, tissues.share_MN
    voxel_mm3, num_voxels = spacing_mm**3, len(depth_N)
    if depth_N.max() <= _VENTRICLES_MM:
        raise UserError(f"no part of the brain mask is deeper than {_VENTRICLES_MM} mm: look at the mask")
    deeper_MD = np.stack([share_MN[:, depth_N > depth].sum(1) for depth in _DEPTHS_MM], axis=1)
    grey_D = deeper_MD[1] / np.maximum(deeper_MD[0] + deeper_MD[1], 1)
    fluid = share_MN[2, depth_N > _FLUID_MM].mean()
    ventricles = (deeper_MD[2, _DEPTHS_MM.index(_VENTRICLES_MM)] + 1) / num_voxels  # + 1: a logarithm needs some
    cortex_mm = deeper_MD[1, 0] * voxel_mm3 / (_surface_voxels(tissues) * spacing_mm**2)
    return np.array([*grey_D, fluid, np.log(ventricles), cortex_mm, np.log(num_voxels * voxel_mm3 / 1e6)])


def _surface_voxels(tissues: Tissues) -> int:
    """How many voxels of white matter touch something else."""
    white_XYZ = np.zeros(tissues.place_N3.max(0) + 3, dtype=bool)
    white_XYZ[tuple(tissues.place_N3.T + 1)] = tissues.share_MN[0] > 0.5
    return max(1, int(white_XYZ.sum() - ndimage.binary_erosion(white_XYZ).sum()))
