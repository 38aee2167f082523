"""The model's grid in the world, and the one interpolation that brings an image onto it.

An image is looked up at every voxel of the grid through its affine. So it is the same wherever its array begins and
however its axes run, and it is blurred by interpolation once and not twice.

Letters: X, Y, Z voxels of the grid, towards right, anterior and superior.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from ermoe.brain.data.nifti import Image

Double = NDArray[np.float64]
Float = NDArray[np.float32]
Bool = NDArray[np.bool_]

_MARGIN = 16  # voxels; beyond them neither the blur nor the spline filter reaches


@dataclass(frozen=True, slots=True)
class Grid:
    """A box of isotropic voxels. ``affine`` leads from its voxels to the world of the image, in mm."""

    shape: tuple[int, int, int]
    affine: Double

    @property
    def spacing_mm(self) -> Double:
        return np.linalg.norm(self.affine[:3, :3], axis=0)

    @classmethod
    def around(cls, centre_mm: Double, spacing_mm: float, shape: tuple[int, int, int]) -> Grid:
        """Axes along those of the world, the middle of the box at ``centre_mm``."""
        affine = np.diag([spacing_mm, spacing_mm, spacing_mm, 1.0])
        affine[:3, 3] = centre_mm - spacing_mm * (np.array(shape) - 1) / 2
        return cls(shape, affine)


def sample(image: Image, grid: Grid, *, order: int) -> Float:
    """The image at the voxels of the grid, 0 outside it, (X, Y, Z).

    Where the grid is coarser than the image, the image is blurred to the grid's resolution first; otherwise detail
    that the grid cannot hold would come back as noise.
    """
    data = _blurred(image, float(grid.spacing_mm.mean()))
    lookup = np.linalg.inv(image.affine) @ grid.affine
    return ndimage.affine_transform(
        data, lookup[:3, :3], lookup[:3, 3], output_shape=grid.shape, order=order, mode="grid-constant", cval=0.0
    ).astype(np.float32)


def _blurred(image: Image, spacing_mm: float) -> Float:
    """With a Gaussian of half the surplus, in voxels of the image: mild, so that a finer copy of a scan stays sharp."""
    sigma = np.maximum(spacing_mm / image.spacing_mm - 1, 0) / 2
    if sigma.max() < 0.05:
        return image.data_XYZ
    return ndimage.gaussian_filter(image.data_XYZ, sigma, mode="constant", cval=0.0)


def cropped(image: Image, box: tuple[slice, slice, slice]) -> Image:
    """The part of an image within a box of voxels and a margin around it, in the same place of the world."""
    wide = tuple(
        slice(max(0, side.start - _MARGIN), min(size, side.stop + _MARGIN))
        for side, size in zip(box, image.data_XYZ.shape, strict=True)
    )
    affine = image.affine.copy()
    affine[:3, 3] = (image.affine @ [*(side.start for side in wide), 1.0])[:3]
    return Image(np.ascontiguousarray(image.data_XYZ[wide]), affine, image.path)


def bounding_box(mask_XYZ: Bool) -> tuple[slice, slice, slice]:
    """The smallest box that holds the mask, which must not be empty."""
    sides = []
    for axis in range(3):
        filled = np.flatnonzero(mask_XYZ.any(axis=tuple(other for other in range(3) if other != axis)))
        sides.append(slice(int(filled[0]), int(filled[-1]) + 1))
    return sides[0], sides[1], sides[2]


def centre_of_mask(mask_XYZ: Bool, affine: Double, room_mm: Double) -> Double:
    """Where to centre a box of ``room_mm`` so that the whole mask is inside: at its centre of mass if that will do.

    The centre of mass hardly moves when a head is tilted. The box moves away from it only as far as it must.
    Raises `ValueError` if the mask is larger than the box.
    """
    low_mm, high_mm = extent_mm(mask_XYZ, affine)
    if np.any(high_mm - low_mm > room_mm):
        raise ValueError("the mask is larger than the box")
    counts = [mask_XYZ.sum(axis=tuple(other for other in range(3) if other != axis)) for axis in range(3)]
    total = counts[0].sum()
    voxel = np.array([count @ np.arange(len(count)) / total for count in counts])
    centre_mm = (affine @ [*voxel, 1.0])[:3]
    return np.clip(centre_mm, high_mm - room_mm / 2, low_mm + room_mm / 2)


def extent_mm(mask_XYZ: Bool, affine: Double) -> tuple[Double, Double]:
    """Lowest and highest world coordinates of the mask's voxels, to the outer edges of voxels."""
    # The outermost voxels of an oblique mask are on its surface: enough to look at the first and last of every column.
    columns = np.argwhere(mask_XYZ.any(axis=2))
    filled = mask_XYZ[columns[:, 0], columns[:, 1]]
    first, last = filled.argmax(axis=1), filled.shape[1] - 1 - filled[:, ::-1].argmax(axis=1)
    ends = np.vstack([np.column_stack([columns, first]), np.column_stack([columns, last])])
    world = ends @ affine[:3, :3].T + affine[:3, 3]
    half = np.abs(affine[:3, :3]).sum(axis=1) / 2
    return world.min(axis=0) - half, world.max(axis=0) + half
