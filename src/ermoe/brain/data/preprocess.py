"""From a scan in any orientation, spacing and intensity scale to a normalised volume on the model's grid.

Where the brain is comes from a derivative, from a scan whose skull is gone already, or from deepbet. An image is looked
up at every voxel of the grid through its affine. So it is the same wherever its array begins and however its axes run,
and it is blurred by interpolation once and not twice.

Letters: X, Y, Z voxels of the T1 or of the grid, towards right, anterior and superior; the 3 of tissues is wm, gm, csf.
"""

from __future__ import annotations

import importlib.util
import math
import warnings
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import ndimage

from ermoe.brain.data.nifti import Grid, Image, bounding_box, cropped, on_grid_of, read_image, sample
from ermoe.brain.data.scans import TISSUES, Normalisation, Preprocessing, ProbabilityMaps, Scan, Segmentation, Tissue
from ermoe.errors import UserError

MaskSource = Literal["derivative", "dseg", "deepbet", "stripped"]
Double = NDArray[np.float64]
Float = NDArray[np.float32]
Bool = NDArray[np.bool_]

_ORDER = {"linear": 1, "cubic": 3}
# Not exactly ½: a grid that falls halfway between voxels would leave the surface of the brain to rounding.
_INSIDE = 0.4999
_PERCENTILES = (0.5, 99.5)
_BRAIN_ML = (400.0, 2300.0)
_POSSIBLE_ML = (150.0, 3500.0)
"""Of any mask: a newborn's brain is larger than the first, a whole head than the second."""
_SMALLEST_BACKGROUND = 0.2
_ONE_PIECE = 0.95
_DEEPBET_THRESHOLD = 0.5
_SURFACE_MM, _DEEP_MM = 4.0, 16.0
_COARSE_MM = 2.0  # finer voxels tell no more, and distances in them take long
_LEAST_CONTRAST = 0.5


@dataclass(frozen=True, slots=True)
class Volume:
    """A scan on the model's grid."""

    t1_XYZ: Float
    """Normalised inside the mask, 0 outside."""
    mask_XYZ: Bool
    tissue_3XYZ: Float | None
    """Share of each tissue in every voxel, in the order wm, gm, csf."""
    mask_source: MaskSource
    affine: Double
    """From voxels of the grid to the world of the scan in mm, or to MNI with ``register="affine"``, (4, 4)."""


def prepare(scan: Scan, preprocessing: Preprocessing, *, with_tissue: bool = False) -> Volume:
    """Reads a scan and brings it onto the grid; `ScanError`, in one sentence, if it cannot be used.

    The result does not depend on how the scan is stored: orientation of the array, file format, integer type,
    intensity scale and empty slices make no difference beyond rounding.
    """
    t1 = read_image(scan.t1, scan.key)
    mask_XYZ, source = brain_mask(scan, t1)
    grid, place = _grid(scan, t1, mask_XYZ, preprocessing)
    brain = Image(mask_XYZ.astype(np.float32), t1.affine, t1.path)
    inside = sample(cropped(brain, mask_XYZ), grid, order=1) > _INSIDE
    t1_XYZ = sample(cropped(t1, mask_XYZ), grid, order=_ORDER[preprocessing.interpolation])
    try:
        normal = normalise(t1_XYZ, inside, preprocessing.normalisation)
    except ValueError as problem:
        raise scan.unusable(str(problem), "look at the scan and its mask") from problem
    tissue_3XYZ = _tissue_maps(scan, t1, grid) * inside if with_tissue and scan.tissue is not None else None
    return Volume(normal, inside, tissue_3XYZ, source, place)


def brain_mask(scan: Scan, t1: Image) -> tuple[Bool, MaskSource]:
    """The mask on the voxels of the T1, and where it comes from; `ScanError` if there is none to be had.

    The order: a derivative ``_desc-brain_mask``, a ``_dseg`` above 0, a scan that is skull-stripped already, and
    deepbet if it is installed. deepbet learnt heads: of a stripped brain it cuts off the surface.
    """
    if scan.mask is not None:
        values_XYZ = on_grid_of(t1, read_image(scan.mask, scan.key, is_label=True), scan.key)
        return _a_brain(values_XYZ > values_XYZ.max() / 2, t1, scan, "derivative"), "derivative"
    if scan.labels is not None:
        labels_XYZ = on_grid_of(t1, read_image(scan.labels, scan.key, is_label=True), scan.key)
        return _a_brain(labels_XYZ > 0, t1, scan, "dseg"), "dseg"
    stripped_XYZ = stripped_mask(t1)
    if stripped_XYZ is not None:
        return stripped_XYZ, "stripped"
    if has_deepbet():
        return _a_brain(_deepbet_mask(t1), t1, scan, "deepbet"), "deepbet"
    what = "has no brain mask among its derivatives and is not skull-stripped"
    remedy = "pip install 'ermoe[brain-mask]' to make masks with deepbet, or add …_desc-brain_mask.nii.gz"
    raise scan.unusable(what, remedy)


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
    piece_XYZ = largest_piece(shown_XYZ)
    if piece_XYZ.sum() < _ONE_PIECE * shown_XYZ.sum():
        return None
    mask_XYZ = ndimage.binary_fill_holes(piece_XYZ)
    return mask_XYZ if _BRAIN_ML[0] < volume_ml(mask_XYZ, t1) < _BRAIN_ML[1] else None


def largest_piece(mask_XYZ: Bool) -> Bool:
    """The largest part of a mask whose voxels hang together by their faces."""
    pieces_XYZ, _ = ndimage.label(mask_XYZ)
    return pieces_XYZ == 1 + np.bincount(pieces_XYZ.ravel())[1:].argmax()


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
    raise scan.unusable(what, "make the mask again and look at it", path)


def _deepbet_mask(t1: Image) -> Bool:
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
        found_XYZ = extraction.postprocess(probability_XYZ > _DEEPBET_THRESHOLD)
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


def _grid(scan: Scan, t1: Image, mask_XYZ: Bool, preprocessing: Preprocessing) -> tuple[Grid, Double]:
    """The grid in the world of the scan, and the affine of the same grid in the space the model knows."""
    if preprocessing.register == "affine":
        from ermoe.brain.data.register import mni_grid, mni_to_scan

        standard = mni_grid(preprocessing.spacing_mm, preprocessing.shape)
        return Grid(standard.shape, mni_to_scan(t1, mask_XYZ) @ standard.affine), standard.affine
    grid = Grid.around(grid_centre(scan, t1, mask_XYZ, preprocessing), preprocessing.spacing_mm, preprocessing.shape)
    return grid, grid.affine


def grid_centre(scan: Scan, t1: Image, mask_XYZ: Bool, preprocessing: Preprocessing) -> Double:
    """Where in the world of the scan the grid is centred; `ScanError` if the brain is larger than it."""
    try:
        return centre_of_mask(mask_XYZ, t1.affine, preprocessing.room_mm)
    except ValueError as too_large:
        remedy = "look at the mask; if it is right, use a larger --shape"
        raise scan.unusable(f"has a brain mask of {too_large}", remedy, scan.mask or scan.labels) from too_large


def centre_of_mask(mask_XYZ: Bool, affine: Double, room_mm: ArrayLike) -> Double:
    """Where to centre a box of ``room_mm`` so that the whole mask is inside: at its centre of mass if that will do.

    The centre of mass hardly moves when a head is tilted. The box moves away from it only as far as it must.
    Raises `ValueError` if the mask is larger than the box.
    """
    low_mm, high_mm = _extent_mm(mask_XYZ, affine)
    half_mm = np.asarray(room_mm) / 2
    if np.any(high_mm - low_mm > 2 * half_mm):
        size, room = (" × ".join(f"{edge:.0f}" for edge in own) for own in (high_mm - low_mm, 2 * half_mm))
        raise ValueError(f"{size} mm, and the grid holds {room} mm")
    counts = [mask_XYZ.sum(axis=tuple(other for other in range(3) if other != axis)) for axis in range(3)]
    total = counts[0].sum()
    voxel = np.array([count @ np.arange(len(count)) / total for count in counts])
    centre_mm = (affine @ [*voxel, 1.0])[:3]
    return np.clip(centre_mm, high_mm - half_mm, low_mm + half_mm)


def _extent_mm(mask_XYZ: Bool, affine: Double) -> tuple[Double, Double]:
    """Lowest and highest world coordinates of the mask's voxels, to the outer edges of voxels."""
    # The outermost voxels of an oblique mask are on its surface: enough to look at the first and last of every column.
    columns = np.argwhere(mask_XYZ.any(axis=2))
    filled = mask_XYZ[columns[:, 0], columns[:, 1]]
    first, last = filled.argmax(axis=1), filled.shape[1] - 1 - filled[:, ::-1].argmax(axis=1)
    ends = np.vstack([np.column_stack([columns, first]), np.column_stack([columns, last])])
    world = ends @ affine[:3, :3].T + affine[:3, 3]
    half = np.abs(affine[:3, :3]).sum(axis=1) / 2
    return world.min(axis=0) - half, world.max(axis=0) + half


def normalise(t1_XYZ: Float, mask_XYZ: Bool, how: Normalisation = "zscore") -> Float:
    """0 outside the mask; inside it, free of the scale the scan was stored with.

    "zscore": mean 0 and deviation 1 over the brain. "mean": divided by the brain's mean, as SFCN expects.
    "percentile": the 0.5th to the 99.5th percentile become 0 to 1, and what is beyond is cut.

    >>> brain = np.array([1.0, 3.0, 100.0], "f4"), np.array([True, True, False])
    >>> normalise(*brain).tolist(), normalise(*brain, "mean").tolist()
    ([-1.0, 1.0, 0.0], [0.5, 1.5, 0.0])
    """
    inside = t1_XYZ[mask_XYZ].astype(np.float64)
    if inside.size == 0 or inside.min() == inside.max():
        raise ValueError("shows one and the same intensity all over the brain")
    if how == "zscore":
        inside = (inside - inside.mean()) / inside.std()
    elif how == "mean":
        if inside.mean() <= 0:
            raise ValueError("has a mean intensity of 0 or less inside the brain")
        inside = inside / inside.mean()
    else:
        low, high = np.percentile(inside, _PERCENTILES)
        if low == high:
            raise ValueError("shows one and the same intensity in nearly all of the brain")
        inside = np.clip((inside - low) / (high - low), 0, 1)
    normal = np.zeros(t1_XYZ.shape, np.float32)
    normal[mask_XYZ] = inside
    return normal


def _tissue_maps(scan: Scan, t1: Image, grid: Grid) -> Float:
    """How much of every voxel each tissue fills, in [0, 1], (3, X, Y, Z).

    Codes are never interpolated: each becomes a map of 0 and 1 first, and a share is what linear interpolation makes
    of that.
    """
    return np.stack([np.clip(_sampled(image, grid), 0, 1) for image in tissue_images(scan, t1)])


def tissue_images(scan: Scan, t1: Image) -> list[Image]:
    """One image a tissue, with values in [0, 1]; `ScanError` if the maps of a scan cannot be used."""
    assert scan.tissue is not None
    if isinstance(scan.tissue, Segmentation):
        return _from_segmentation(scan.tissue, scan, t1)
    return _from_probabilities(scan.tissue, scan, t1)


def _sampled(image: Image, grid: Grid) -> Float:
    present = image.data_XYZ > 0
    return sample(cropped(image, present), grid, order=1) if present.any() else np.zeros(grid.shape, "f4")


def _from_segmentation(source: Segmentation, scan: Scan, t1: Image) -> list[Image]:
    labels = read_image(source.path, scan.key, is_label=True)
    if source.same_grid:
        labels = Image(on_grid_of(t1, labels, scan.key), t1.affine, labels.path)
    codes_XYZ = np.rint(labels.data_XYZ).astype(np.int32)
    if np.abs(labels.data_XYZ - codes_XYZ).max() > 1e-3:
        what = "holds values that are not whole numbers where labels are expected"
        raise scan.unusable(what, "resample labels with nearest neighbours", source.path)
    maps = [np.isin(codes_XYZ, source.codes[tissue]).astype(np.float32) for tissue in TISSUES]
    missing = [tissue for tissue, present in zip(TISSUES, maps, strict=True) if not present.any()]
    if missing:
        numbers = ", ".join(f"{tissue} {list(source.codes[tissue])[:4]}" for tissue in missing)
        what = f"has no voxel of {numbers}, which its table of labels promises"
        raise scan.unusable(what, "check dseg.tsv", source.path)
    return [Image(present, labels.affine, labels.path) for present in maps]


def _from_probabilities(source: ProbabilityMaps, scan: Scan, t1: Image) -> list[Image]:
    maps = []
    for tissue in TISSUES:
        image = read_image(source.paths[tissue], scan.key, is_label=True)
        if image.data_XYZ.min() < -0.01 or image.data_XYZ.max() > 1.01:
            what = f"has values from {image.data_XYZ.min():g} to {image.data_XYZ.max():g} where shares are expected"
            raise scan.unusable(what, "scale it to [0, 1]", image.path)
        maps.append(Image(on_grid_of(t1, image, scan.key), t1.affine, image.path))
    return maps


def isolate(volume: Volume, region: Tissue) -> Float:
    """T1 × tissue mask (share > ½), normalised to mean 0 and deviation 1 inside it, 0 elsewhere, (X, Y, Z).

    A person without a voxel of the region gets zeros.
    """
    if volume.tissue_3XYZ is None:
        raise UserError(
            f"isolating {region} needs tissue maps: prepare the volume with_tissue, from a scan that has them"
        )
    inside = (volume.tissue_3XYZ[TISSUES.index(region)] > 0.5) & volume.mask_XYZ
    return normalise(volume.t1_XYZ, inside) if inside.sum() > 1 else np.zeros_like(volume.t1_XYZ)


def looks_like_t1(t1_XYZ: Float, mask_XYZ: Bool, spacing_mm: ArrayLike) -> bool:
    """False if the brain is not clearly brighter inside than at its surface; also newborns' T1 are not."""
    return not depth_contrast(t1_XYZ, mask_XYZ, spacing_mm) < _LEAST_CONTRAST


def depth_contrast(t1_XYZ: Float, mask_XYZ: Bool, spacing_mm: ArrayLike) -> float:
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
