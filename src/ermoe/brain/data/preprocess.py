"""From a scan in any orientation, spacing and intensity scale to a normalised volume on the model's grid.

An image is looked up at every voxel of the grid through its affine. So it is the same wherever its array begins and
however its axes run, and it is blurred by interpolation once and not twice.

Letters: X, Y, Z voxels of the grid, towards right, anterior and superior; the 3 of tissues is wm, gm, csf.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from ermoe.brain.data.mask import brain_mask
from ermoe.brain.data.nifti import Image, bounding_box, cropped, on_grid_of, read_image
from ermoe.brain.data.scans import TISSUES, ProbabilityMaps, Problem, Scan, ScanError, Segmentation, Tissue
from ermoe.brain.data.settings import Normalisation, Preprocessing
from ermoe.errors import UserError

__all__ = [
    "Grid",
    "Preprocessing",
    "Volume",
    "centre_of_mask",
    "check_tissue",
    "extent_mm",
    "isolate",
    "normalise",
    "prepare",
    "sample",
]

Double = NDArray[np.float64]
Float = NDArray[np.float32]
Bool = NDArray[np.bool_]

_ORDER = {"linear": 1, "cubic": 3}
# Not exactly ½: a grid that falls halfway between voxels would leave the surface of the brain to rounding.
_INSIDE = 0.4999
_LOW, _HIGH = 0.5, 99.5


@dataclass(frozen=True, slots=True)
class Volume:
    """A scan on the model's grid."""

    t1_XYZ: Float
    """Normalised inside the mask, 0 outside."""
    mask_XYZ: Bool
    tissue_3XYZ: Float | None
    """Share of each tissue in every voxel, in the order wm, gm, csf."""
    mask_source: str
    """One of `ermoe.brain.data.mask.MASK_SOURCES`."""
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
    box = bounding_box(mask_XYZ)
    brain = Image(mask_XYZ.astype(np.float32), t1.affine, t1.path)
    inside = sample(cropped(brain, box), grid, order=1) > _INSIDE
    t1_XYZ = sample(cropped(t1, box), grid, order=_ORDER[preprocessing.interpolation])
    try:
        normal = normalise(t1_XYZ, inside, preprocessing.normalisation)
    except ValueError as problem:
        raise ScanError(Problem("error", scan.key, scan.t1, str(problem), "look at the scan and its mask")) from problem
    tissue_3XYZ = _tissue_maps(scan, t1, grid) * inside if with_tissue and scan.tissue is not None else None
    return Volume(normal, inside, tissue_3XYZ, source, place)


def _grid(scan: Scan, t1: Image, mask_XYZ: Bool, preprocessing: Preprocessing) -> tuple[Grid, Double]:
    """The grid in the world of the scan, and the affine of the same grid in the space the model knows."""
    if preprocessing.register == "affine":
        from ermoe.brain.data.register import mni_grid, mni_to_scan

        standard = mni_grid(preprocessing.spacing_mm, preprocessing.shape)
        return Grid(standard.shape, mni_to_scan(t1, mask_XYZ) @ standard.affine), standard.affine
    room_mm = preprocessing.spacing_mm * np.array(preprocessing.shape)
    try:
        centre_mm = centre_of_mask(mask_XYZ, t1.affine, room_mm)
    except ValueError:
        low_mm, high_mm = extent_mm(mask_XYZ, t1.affine)
        size, room = (" × ".join(f"{edge:.0f}" for edge in edges) for edges in (high_mm - low_mm, room_mm))
        what = f"has a brain mask of {size} mm, and the grid holds {room} mm"
        remedy = "look at the mask; if it is right, use a larger --shape"
        raise ScanError(Problem("error", scan.key, scan.mask or scan.t1, what, remedy)) from None
    grid = Grid.around(centre_mm, preprocessing.spacing_mm, preprocessing.shape)
    return grid, grid.affine


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
        low, high = np.percentile(inside, [_LOW, _HIGH])
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
    return np.stack([np.clip(_sampled(image, grid), 0, 1) for image in _maps(scan, t1)])


def check_tissue(scan: Scan, t1: Image) -> None:
    """Raises `ScanError` if the tissue maps of a scan cannot be used."""
    _maps(scan, t1)


def _maps(scan: Scan, t1: Image) -> list[Image]:
    """One image a tissue, with values in [0, 1]."""
    assert scan.tissue is not None
    if isinstance(scan.tissue, Segmentation):
        return _from_segmentation(scan.tissue, scan, t1)
    return _from_probabilities(scan.tissue, scan, t1)


def _sampled(image: Image, grid: Grid) -> Float:
    present = image.data_XYZ > 0
    return sample(cropped(image, bounding_box(present)), grid, order=1) if present.any() else np.zeros(grid.shape, "f4")


def _from_segmentation(source: Segmentation, scan: Scan, t1: Image) -> list[Image]:
    labels = read_image(source.path, scan.key, is_label=True)
    if source.same_grid:
        labels = Image(on_grid_of(t1, labels, scan.key), t1.affine, labels.path)
    codes_XYZ = np.rint(labels.data_XYZ).astype(np.int32)
    if np.abs(labels.data_XYZ - codes_XYZ).max() > 1e-3:
        what = "holds values that are not whole numbers where labels are expected"
        raise ScanError(Problem("error", scan.key, source.path, what, "resample labels with nearest neighbours"))
    maps = [np.isin(codes_XYZ, source.codes[tissue]).astype(np.float32) for tissue in TISSUES]
    missing = [tissue for tissue, present in zip(TISSUES, maps, strict=True) if not present.any()]
    if missing:
        numbers = ", ".join(f"{tissue} {list(source.codes[tissue])[:4]}" for tissue in missing)
        what = f"has no voxel of {numbers}, which its table of labels promises"
        raise ScanError(Problem("error", scan.key, source.path, what, "check dseg.tsv"))
    return [Image(present, labels.affine, labels.path) for present in maps]


def _from_probabilities(source: ProbabilityMaps, scan: Scan, t1: Image) -> list[Image]:
    maps = []
    for tissue in TISSUES:
        image = read_image(source.paths[tissue], scan.key, is_label=True)
        if image.data_XYZ.min() < -0.01 or image.data_XYZ.max() > 1.01:
            what = f"has values from {image.data_XYZ.min():g} to {image.data_XYZ.max():g} where shares are expected"
            raise ScanError(Problem("error", scan.key, image.path, what, "scale it to [0, 1]"))
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
