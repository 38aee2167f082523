"""Where the brain is in a T1: from a derivative, from deepbet, or because the skull is gone already.

And whether it looks like the brain of a T1.

Letters: X, Y, Z voxels of the T1.
"""

from __future__ import annotations

import importlib.util
import math
import warnings
from functools import lru_cache
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import ndimage

from ermoe.brain.data.nifti import Image, bounding_box, on_grid_of, read_image
from ermoe.brain.data.scans import Problem, Scan, ScanError

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
        return _a_brain(_deepbet_mask(t1), t1, scan, "deepbet"), "deepbet"
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


_PROBABLE = 0.5


def _deepbet_mask(t1: Image) -> NDArray[np.bool_]:
    """The brain of a head, (X, Y, Z); empty if deepbet finds none.

    deepbet stretches what it gets to a cube, so empty slices around a head would change its answer. They are cut off
    first, and the axes are in world order already: the mask does not depend on how the scan is stored.
    """
    mask_XYZ = np.zeros(t1.data_XYZ.shape, np.bool_)
    shown_XYZ = t1.data_XYZ != 0
    if not shown_XYZ.any():
        return mask_XYZ
    box = bounding_box(shown_XYZ)
    head_XYZ = np.ascontiguousarray(t1.data_XYZ[box]) / np.abs(t1.data_XYZ).max()
    import torch

    extraction = _extraction()
    try:
        with torch.inference_mode():
            probability_XYZ = extraction.run_model(head_XYZ)
        found_XYZ = extraction.postprocess(probability_XYZ > _PROBABLE)
    except (AssertionError, RuntimeError):  # what deepbet raises when nothing looks like a brain
        return mask_XYZ
    mask_XYZ[box] = found_XYZ
    return mask_XYZ


@lru_cache(maxsize=1)
def _extraction() -> Any:
    from deepbet import BrainExtraction

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch, about the format of deepbet's weights
        return BrainExtraction(no_gpu=True)


_SURFACE_MM = 4.0
_DEEP_MM = 16.0
_COARSE_MM = 2.0  # finer voxels tell no more, and distances in them take long
_LEAST = 0.5


def looks_like_t1(t1_XYZ: NDArray[np.float32], mask_XYZ: NDArray[np.bool_], spacing_mm: ArrayLike) -> bool:
    """False if the brain is not clearly brighter inside than at its surface; also newborns' T1 are not."""
    return not _depth_contrast(t1_XYZ, mask_XYZ, spacing_mm) < _LEAST


def _depth_contrast(t1_XYZ: NDArray[np.float32], mask_XYZ: NDArray[np.bool_], spacing_mm: ArrayLike) -> float:
    """How much brighter the brain is inside than at its surface, in standard deviations; NaN if it has no inside.

    Of fifty T1 scans of adults the lowest has 1.5, of phantoms 1.2; a T1 turned into its negative has −0.2.

    >>> ball = np.linalg.norm(np.indices((40, 40, 40)) - 19.5, axis=0)
    >>> round(_depth_contrast(20 - ball, ball < 18, [2.0] * 3), 1)
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
