"""How a brain lies in comparison with a template of adult brains.

The template is laid over the box of the brain mask, so neither position nor size matter, and what is compared are
coarse cells: no scan is too blurred for it.

Letters: X, Y, Z cells of the template, or voxels of a scan.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import resources
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from ermoe.brain.data.nifti import bounding_box

Double = NDArray[np.float64]
_CELLS = (20, 24, 20)


def agreement_with_template(t1_XYZ: NDArray[np.float32], mask_XYZ: NDArray[np.bool_]) -> tuple[float, float, float]:
    """Correlation of brightness inside both brains, Dice of the two, and how much better they agree as the scan lies.

    That is, than upside down, back to front, or both; t1_XYZ and mask_XYZ are the box of a brain.
    """
    template_XYZ, brain_XYZ = _template()
    own_XYZ, inside_XYZ = _in_cells(t1_XYZ * mask_XYZ), _in_cells(mask_XYZ.astype(np.float32))
    mean_XYZ = own_XYZ / np.maximum(inside_XYZ, 1e-6)
    turned = [
        _correlation(mean_XYZ[:, ::y, ::z], template_XYZ, (inside_XYZ[:, ::y, ::z] > 0.9) & (brain_XYZ > 0.9))
        + _correlation(inside_XYZ[:, ::y, ::z], brain_XYZ, (brain_XYZ > 0.02) & (brain_XYZ < 0.98))
        for y, z in ((1, 1), (1, -1), (-1, 1), (-1, -1))
    ]
    agreement = _correlation(mean_XYZ, template_XYZ, (inside_XYZ > 0.9) & (brain_XYZ > 0.9))
    own, other = inside_XYZ > 0.5, brain_XYZ > 0.5
    return agreement, float(2 * (own & other).sum() / (own.sum() + other.sum())), turned[0] - max(turned[1:])


def _correlation(a_XYZ: Double, b_XYZ: Double, where: NDArray[np.bool_]) -> float:
    """Over some cells; 0 where nothing varies."""
    a, b = a_XYZ[where], b_XYZ[where]
    return float(np.corrcoef(a, b)[0, 1]) if where.sum() > 2 and a.std() > 0 and b.std() > 0 else 0.0


def _in_cells(image_XYZ: NDArray[Any]) -> Double:
    """Means of an image over the cells of the template, whatever the image's size, (X, Y, Z)."""
    step = np.array(image_XYZ.shape) / np.array(_CELLS)
    smooth_XYZ = ndimage.uniform_filter(image_XYZ.astype(np.float64), np.maximum(1, np.rint(step)).astype(int))
    return ndimage.affine_transform(smooth_XYZ, step, (step - 1) / 2, output_shape=_CELLS, order=1, mode="nearest")


@lru_cache(maxsize=1)
def _template() -> tuple[Double, Double]:
    """Brightness and mask of the ICBM152 brain in cells, from the tissue maps that nilearn ships."""
    import nibabel

    folder = resources.files("nilearn.datasets") / "data"
    with resources.as_file(folder / "mni_icbm152_t1_tal_nlin_sym_09a_converted.nii.gz") as path:
        t1_XYZ = np.asarray(nibabel.as_closest_canonical(nibabel.load(path)).dataobj, dtype=np.float32)[::2, ::2, ::2]
    box = bounding_box(t1_XYZ > 0)
    t1_XYZ = t1_XYZ[box]
    brain_XYZ = _in_cells((t1_XYZ > 0).astype(np.float32))
    return _in_cells(t1_XYZ) / np.maximum(brain_XYZ, 1e-6), brain_XYZ
