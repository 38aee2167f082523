"""Where the brain is in a T1: from a derivative, from deepbet, or because the skull is gone already.

Letters: X, Y, Z voxels of the T1.
"""

from __future__ import annotations

import importlib.util
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from ermoe.brain.data.alignment import on_grid_of
from ermoe.brain.data.nifti import Image, read_image
from ermoe.brain.data.problems import Problem, ScanError
from ermoe.brain.data.scans import Scan

MaskSource = Literal["derivative", "dseg", "deepbet", "stripped"]
MASK_SOURCES: tuple[str, ...] = get_args(MaskSource)

Bool = NDArray[np.bool_]

_BRAIN_ML = (400.0, 2300.0)
_POSSIBLE_ML = (150.0, 3500.0)
"""Of any mask: a newborn's brain is larger than the first, a whole head than the second."""
_SMALLEST_BACKGROUND = 0.2
_ONE_PIECE = 0.95


def brain_mask(scan: Scan, t1: Image) -> tuple[Bool, MaskSource]:
    """The mask on the voxels of the T1, and where it comes from; `ScanError` if there is none to be had.

    The order: a derivative ``_desc-brain_mask``, a ``_dseg`` above 0, deepbet if it is installed, and a scan that is
    skull-stripped already.
    """
    if scan.mask is not None:
        values_XYZ = on_grid_of(t1, read_image(scan.mask, scan.key, is_label=True), scan.key)
        return _a_brain(values_XYZ > values_XYZ.max() / 2, t1, scan, "derivative"), "derivative"
    if scan.labels is not None:
        labels_XYZ = on_grid_of(t1, read_image(scan.labels, scan.key, is_label=True), scan.key)
        return _a_brain(labels_XYZ > 0, t1, scan, "dseg"), "dseg"
    if has_deepbet():
        from ermoe.brain.data.skull_strip import deepbet_mask

        return _a_brain(deepbet_mask(t1), t1, scan, "deepbet"), "deepbet"
    stripped_XYZ = stripped_mask(t1)
    if stripped_XYZ is not None:
        return stripped_XYZ, "stripped"
    what = "has no brain mask among its derivatives and is not skull-stripped"
    remedy = "pip install 'ermoe[brain-mask]' to make masks with deepbet, or add …_desc-brain_mask.nii.gz"
    raise ScanError(Problem("error", scan.key, scan.t1, what, remedy))


def has_deepbet() -> bool:
    """Whether the extra ``brain-mask`` is installed."""
    return importlib.util.find_spec("deepbet") is not None


def stripped_mask(t1: Image) -> Bool | None:
    """The brain of a scan whose skull is gone already; None if the scan shows a head.

    Outside a stripped brain the image is one constant. What remains is one piece, and not larger than a brain can be:
    a whole head on a constant background is larger.
    """
    data_XYZ = t1.data_XYZ
    corners = data_XYZ[np.ix_([0, -1], [0, -1], [0, -1])]
    if corners.min() != corners.max():
        return None
    shown_XYZ = data_XYZ != corners.flat[0]
    if not shown_XYZ.any() or 1 - shown_XYZ.mean() < _SMALLEST_BACKGROUND:
        return None
    pieces_XYZ, _ = ndimage.label(shown_XYZ)
    sizes = np.bincount(pieces_XYZ.ravel())
    sizes[0] = 0
    if sizes.max() < _ONE_PIECE * sizes.sum():
        return None
    mask_XYZ = ndimage.binary_fill_holes(pieces_XYZ == sizes.argmax())
    return mask_XYZ if _BRAIN_ML[0] < volume_ml(mask_XYZ, t1) < _BRAIN_ML[1] else None


def volume_ml(mask_XYZ: Bool, image: Image) -> float:
    """Volume of a mask."""
    return float(mask_XYZ.sum() * abs(np.linalg.det(image.affine[:3, :3])) / 1000)


def _a_brain(mask_XYZ: Bool, t1: Image, scan: Scan, source: MaskSource) -> Bool:
    """The mask, if it has a size that a brain can have."""
    size_ml = volume_ml(mask_XYZ, t1)
    if _POSSIBLE_ML[0] <= size_ml <= _POSSIBLE_ML[1]:
        return mask_XYZ
    path = {"derivative": scan.mask, "dseg": scan.labels}.get(source, scan.t1)
    if size_ml:
        what = f"marks {size_ml:.0f} mL as brain, and no brain is of that size"
    else:
        what = "marks no voxel of the T1 as brain" if source != "deepbet" else "shows no brain that deepbet could find"
    raise ScanError(Problem("error", scan.key, path, what, "make the mask again and look at it"))
