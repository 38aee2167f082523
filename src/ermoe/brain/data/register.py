"""Affine registration to MNI152, by dipy. The result is a matrix: the scan is still interpolated only once.

Letters: X, Y, Z voxels.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from ermoe.brain.data.nifti import Bool, Double, Grid, Image, cropped, sample
from ermoe.brain.data.preprocess import centre_of_mask, normalise
from ermoe.errors import UserError

_WORK_MM = 4.0  # an affine is a matter of the whole head, and finer voxels take far longer
_BINS = 32
_ITERATIONS = [100, 60]
_FACTORS = [2, 1]
_SIGMAS = [1.0, 0.0]


def mni_grid(spacing_mm: float, shape: tuple[int, int, int]) -> Grid:
    """A grid around the brain of MNI152, in MNI coordinates."""
    template, mask_XYZ = _template()
    room_mm = spacing_mm * np.array(shape)
    try:
        centre_mm = centre_of_mask(mask_XYZ, template.affine, room_mm)
    except ValueError:
        raise UserError(f"a grid of {shape} voxels of {spacing_mm} mm is too small for the MNI brain") from None
    return Grid.around(centre_mm, spacing_mm, shape)


def mni_to_scan(t1: Image, mask_XYZ: Bool) -> Double:
    """The affine (4, 4) that leads from MNI coordinates to the world of the scan, in mm.

    Found by mutual information of stripped brains: first a shift, then a rigid motion, then all twelve parameters.
    """
    align, transforms = _dipy()
    template, static_grid = _template()[0], _working_grid(_template()[0])
    brain = cropped(Image(t1.data_XYZ * mask_XYZ, t1.affine, t1.path), mask_XYZ)
    grid = _working_grid(brain)
    shown_XYZ = sample(brain, grid, order=1)
    # Intensities from 0 to 1, so that a scale cannot change the bins of the histogram.
    static, moving = sample(template, static_grid, order=1), normalise(shown_XYZ, shown_XYZ > 0, "percentile")
    search = align.AffineRegistration(
        metric=align.MutualInformationMetric(nbins=_BINS, sampling_proportion=None),
        level_iters=_ITERATIONS,
        sigmas=_SIGMAS,
        factors=_FACTORS,
        verbosity=0,
    )
    found = align.transform_centers_of_mass(static, static_grid.affine, moving, grid.affine).affine
    for transform in (transforms.RigidTransform3D(), transforms.AffineTransform3D()):
        found = search.optimize(
            static,
            moving,
            transform,
            None,
            static_grid2world=static_grid.affine,
            moving_grid2world=grid.affine,
            starting_affine=found,
        ).affine
    return np.asarray(found, np.float64)


def _working_grid(brain: Image) -> Grid:
    """World axes, the whole brain, 4 mm: whatever the scan's own grid is."""
    corners = np.array(np.meshgrid(*((0, size - 1) for size in brain.data_XYZ.shape))).reshape(3, -1).T
    world = corners @ brain.affine[:3, :3].T + brain.affine[:3, 3]
    low_mm, high_mm = world.min(axis=0), world.max(axis=0)
    x, y, z = (int(size) for size in np.ceil((high_mm - low_mm) / _WORK_MM).astype(int) + 1)
    return Grid.around((low_mm + high_mm) / 2, _WORK_MM, (x, y, z))


@lru_cache(maxsize=1)
def _template() -> tuple[Image, Bool]:
    from nilearn import datasets

    stored = datasets.load_mni152_template(resolution=2)
    mask_XYZ = np.asarray(datasets.load_mni152_brain_mask(resolution=2).dataobj) > 0
    data_XYZ = normalise(np.asarray(stored.get_fdata(dtype=np.float32)), mask_XYZ, "percentile")
    return Image(data_XYZ, np.asarray(stored.affine, np.float64), Path("MNI152")), mask_XYZ


def _dipy() -> tuple[Any, Any]:
    try:
        from dipy.align import imaffine, transforms
    except ImportError:
        raise UserError("registration needs dipy: pip install 'ermoe[register]', or use register='none'") from None
    return imaffine, transforms
