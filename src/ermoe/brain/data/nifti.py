"""Images, read so that how they are stored cannot matter: one array, axes towards right, anterior and superior.

An affine should be a rotation with voxel sizes, and masks and labels should lie on the voxels of their T1. Anything
else is said, for it makes nonsense of a brain.

Letters: X, Y, Z voxels of the image, in that order of axes.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from ermoe.brain.data.mistaken import remedy_for
from ermoe.brain.data.scans import MOST_VOXELS, Problem, ScanError, Severity
from ermoe.errors import UserError
from ermoe.files import file_size

Double = NDArray[np.float64]
Float = NDArray[np.float32]
Bool = NDArray[np.bool_]
_Finding = tuple[Severity, str, str]
"""How bad it is, what is wrong, and what to do about it."""

_SHEAR_DEGREES = 1.0
_TURN_DEGREES = 2.0
_STRETCH = 0.02
_APART_MM = 1.0
_VOXEL_MM = (0.1, 8.0)
_MARGIN = 16  # voxels; beyond them neither the blur nor the spline filter of `sample` reaches


@dataclass(frozen=True, slots=True)
class Image:
    """An image in RAS order. ``affine`` leads from voxels to the world in mm."""

    data_XYZ: Float
    affine: Double
    path: Path

    @property
    def spacing_mm(self) -> Double:
        """Edges of a voxel."""
        return _edges(self.affine)


def read_image(path: Path, subject: str, *, is_label: bool = False) -> Image:
    """The image, or `ScanError` with the first thing that is wrong with it. Only labels may be constant."""
    image, problems = inspect_image(path, subject, is_label=is_label)
    errors = [problem for problem in problems if problem.severity == "error"]
    if errors or image is None:
        raise ScanError(errors[0])
    return image


def inspect_image(path: Path, subject: str, *, is_label: bool = False) -> tuple[Image | None, list[Problem]]:
    """The image if it can be read at all, and everything that is wrong with it."""

    def problems(findings: Iterator[_Finding]) -> list[Problem]:
        return [Problem(severity, subject, path, what, remedy) for severity, what, remedy in findings]

    try:
        stored = _open(path, subject)
        found = problems(itertools.chain(_about_shape(stored), _about_place(stored)))
        if any(problem.severity == "error" for problem in found):
            return None, found
        image = _read(stored, path, subject)
    except ScanError as unreadable:
        return None, [unreadable.problem]
    return image, found + problems(_about_values(image.data_XYZ, is_label))


@cache
def _library() -> Any:
    try:
        import nibabel
    except ImportError:
        raise UserError("reading scans needs nibabel: pip install 'ermoe[brain]'") from None
    nibabel.imageglobals.logger.setLevel(logging.CRITICAL)  # what is odd in a header is found and said here
    return nibabel


def _open(path: Path, subject: str) -> Any:
    nibabel = _library()
    if not os.path.exists(path):  # of a name that is too long, Path asks the system, which is an error
        known = remedy_for(path) or ("does not exist", "restore the file or delete its row")
        raise ScanError(Problem("error", subject, path, *known))
    try:
        if file_size(path) == 0:
            raise ScanError(Problem("error", subject, path, "is empty", "copy it again from where it came"))
        return nibabel.load(path)
    except ScanError:
        raise
    except Exception as problem:  # what readers of damaged headers raise is anybody's guess
        unknown = f"cannot be read as an image ({_short(problem)})", "copy it again from where it came"
        raise ScanError(Problem("error", subject, path, *(remedy_for(path) or unknown))) from problem


def _read(stored: Any, path: Path, subject: str) -> Image:
    """The voxels in RAS order. Taking a volume of four axes and turning axes read voxels too, so both may fail here."""
    nibabel = _library()
    try:
        canonical = nibabel.as_closest_canonical(nibabel.squeeze_image(stored))
        data_XYZ = np.ascontiguousarray(canonical.get_fdata(dtype=np.float32, caching="unchanged"))
        return Image(data_XYZ, canonical.affine.astype(np.float64), path)
    except Exception as problem:
        what = f"ends before its voxels do ({_short(problem)})"
        remedy = "it is truncated or damaged; copy it again from where it came"
        raise ScanError(Problem("error", subject, path, what, remedy)) from problem


def _short(problem: BaseException) -> str:
    return str(problem).splitlines()[0][:120] if str(problem) else type(problem).__name__


def _about_shape(image: Any) -> Iterator[_Finding]:
    shape = tuple(int(size) for size in image.shape)
    if len(shape) < 3 or any(size != 1 for size in shape[3:]):
        size = " × ".join(map(str, shape))
        yield "error", f"has {len(shape)} axes ({size}) where a volume has three", "choose one volume of it"
    elif math.prod(shape) > MOST_VOXELS:
        yield "error", f"has {math.prod(shape):,} voxels, more than {MOST_VOXELS:,}", "resample it, or export it again"
    elif min(shape[:3]) < 2:
        yield "error", f"is a single slice ({' × '.join(map(str, shape[:3]))})", "use a volume"
    if np.dtype(image.get_data_dtype()).kind not in "iufb":
        yield "error", "holds colours or complex numbers", "store it as real numbers"


def _about_values(data_XYZ: Float, is_label: bool) -> Iterator[_Finding]:
    wrong = data_XYZ.size - int(np.count_nonzero(np.isfinite(data_XYZ)))
    if wrong:
        remedy = "replace them, by 0 if they are outside the head"
        yield "error", f"has {wrong:,} voxels that are NaN or infinite", remedy
    elif not is_label and data_XYZ.min() == data_XYZ.max():
        yield "error", f"is {data_XYZ.min():g} everywhere", "use a scan that shows something"


def _about_place(image: Any) -> Iterator[_Finding]:
    """Everything that is wrong with the place of an image in the world."""
    affine = np.asarray(image.affine, np.float64)
    if not np.isfinite(affine).all() or abs(np.linalg.det(affine[:3, :3])) < 1e-9:
        yield "error", "has an affine that flattens the volume or is not finite", "export the scan again"
        return
    spacing = _edges(affine)
    if spacing.min() < _VOXEL_MM[0] or spacing.max() > _VOXEL_MM[1]:
        size = " × ".join(f"{edge:.3g}" for edge in spacing)
        yield "error", f"has voxels of {size} mm", "the unit of the header may be wrong"
    sheared = _shear_degrees(affine)
    if sheared > _SHEAR_DEGREES:
        what = f"has a sheared affine (axes {sheared:.1f}° off the right angle)"
        yield "error", what, "resample it onto a grid with right angles"
    yield from _about_forms(image)


def _edges(affine: Double) -> Double:
    """Of a voxel, in mm."""
    return np.linalg.norm(affine[:3, :3], axis=0)


def _shear_degrees(affine: Double) -> float:
    """How far the axes of voxels are from right angles.

    >>> _shear_degrees(np.diag([2.0, 2.0, 1.0, 1.0]))
    0.0
    """
    axes = affine[:3, :3] / _edges(affine)
    cosines = [abs(float(axes[:, i] @ axes[:, j])) for i, j in ((0, 1), (0, 2), (1, 2))]
    return float(np.degrees(np.arcsin(min(1.0, max(cosines)))))


def _about_forms(image: Any) -> Iterator[_Finding]:
    """NIfTI has room for two affines; which of them holds is convention, so they should not contradict each other."""
    if not hasattr(image, "get_qform"):
        if isinstance(image, _library().analyze.AnalyzeImage):
            what = "is an Analyze file, which cannot say how the head lies in it"
            yield "error", what, "convert it to NIfTI, from DICOM if you can, and look at it"
        return
    sform_code, qform_code = int(image.header["sform_code"]), int(image.header["qform_code"])
    if not sform_code and not qform_code:
        what = "says nothing about its orientation (sform and qform codes are 0)"
        yield "error", what, "set one of them, or convert the scan again from DICOM"
    elif sform_code and qform_code:
        sform, qform = np.asarray(image.get_sform()), _qform(image)
        if qform is None:
            what = "has a qform whose quaternion is longer than one, which is no rotation"
            yield "warning", what, "the sform is used"
        elif _contradict(sform, qform):
            what = "has an sform and a qform that put its axes in different places"
            yield "error", what, "find out which one is right and copy it over the other"
        elif (apart := _apart_mm(sform, qform, image.shape[:3])) > _APART_MM:
            yield "warning", f"has an sform and a qform that are up to {apart:.0f} mm apart", "the sform is used"


def _qform(image: Any) -> Double | None:
    try:
        return np.asarray(image.get_qform(), np.float64)
    except ValueError:
        return None


def _contradict(sform: Double, qform: Double) -> bool:
    """Whether axes are turned, mirrored or stretched against each other; a shift would not change a brain."""
    spacing_s, spacing_q = _edges(sform), _edges(qform)
    if min(spacing_s.min(), spacing_q.min()) <= 0 or np.any(np.abs(spacing_s / spacing_q - 1) > _STRETCH):
        return True
    cosine = np.sum((sform[:3, :3] / spacing_s) * (qform[:3, :3] / spacing_q), axis=0)
    return bool(np.any(np.degrees(np.arccos(np.clip(cosine, -1, 1))) > _TURN_DEGREES))


def _apart_mm(a: Double, b: Double, shape: tuple[int, ...]) -> float:
    corners = np.array([(*corner, 1) for corner in itertools.product(*((0, size - 1) for size in shape))], float)
    return float(np.linalg.norm((corners @ (a - b).T)[:, :3], axis=1).max())


def _lattice_shift(image: Double, other: Double, tolerance_voxels: float = 0.02) -> NDArray[np.int64] | None:
    """By how many voxels two grids are shifted, or None if their voxels do not coincide.

    Voxel v of ``image`` is voxel v + shift of ``other``. Comparing floats of headers for equality would call most
    pairs different; a fiftieth of a voxel over the length of a head is the same grid.

    >>> padded = np.array([[1.0, 0, 0, -3], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]])
    >>> _lattice_shift(np.eye(4), padded).tolist()
    [3, 0, 0]
    """
    step = np.linalg.inv(other) @ image
    shift = np.round(step[:3, 3])
    turned = np.abs(step[:3, :3] - np.eye(3)).max() * 200  # over 200 voxels, the length of a head
    return shift.astype(np.int64) if turned < 0.5 and np.abs(step[:3, 3] - shift).max() < tolerance_voxels else None


def on_grid_of(t1: Image, other: Image, subject: str) -> Float:
    """The voxels of ``other`` at the voxels of ``t1``; 0 where it does not reach.

    Empty slices around one of the two, or another order of axes, leave the voxels in the same places. Anything else
    is another grid, and might be another space: it is refused, not resampled.
    """
    shift = _lattice_shift(other.affine, t1.affine)
    if shift is None:
        remedy = "resample it onto the T1 with nearest neighbours, after making sure that both are in the same space"
        raise ScanError(Problem("error", subject, other.path, _difference(t1, other), remedy))
    if not shift.any() and other.data_XYZ.shape == t1.data_XYZ.shape:
        return other.data_XYZ
    # Voxel v of the T1 is voxel v − shift of the other: whole numbers, so nothing is interpolated.
    return ndimage.affine_transform(other.data_XYZ, np.ones(3), -shift, output_shape=t1.data_XYZ.shape, order=0)


def _difference(t1: Image, other: Image) -> str:
    own, its = (
        f"{' × '.join(map(str, image.data_XYZ.shape))} at {' × '.join(f'{edge:.2f}' for edge in image.spacing_mm)} mm"
        for image in (t1, other)
    )
    apart = "" if own != its else ", shifted or turned"
    return f"lies on another grid ({its}{apart}) than its T1 {t1.path} ({own})"


def bounding_box(mask_XYZ: Bool) -> tuple[slice, slice, slice]:
    """The smallest box that holds the mask, which must not be empty."""
    (box,) = ndimage.find_objects(mask_XYZ.astype(np.int8))
    return box


def cropped(image: Image, mask_XYZ: Bool) -> Image:
    """The part of an image that holds a mask, and a margin around it, in the same place of the world."""
    wide = tuple(
        slice(max(0, side.start - _MARGIN), min(size, side.stop + _MARGIN))
        for side, size in zip(bounding_box(mask_XYZ), image.data_XYZ.shape, strict=True)
    )
    affine = image.affine.copy()
    affine[:3, 3] = (image.affine @ [*(side.start for side in wide), 1.0])[:3]
    return Image(np.ascontiguousarray(image.data_XYZ[wide]), affine, image.path)


@dataclass(frozen=True, slots=True)
class Grid:
    """A box of isotropic voxels. ``affine`` leads from its voxels to the world of the image, in mm."""

    shape: tuple[int, int, int]
    affine: Double

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
    data = _blurred(image, float(_edges(grid.affine).mean()))
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
