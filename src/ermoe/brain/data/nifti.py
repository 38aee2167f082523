"""Reading images so that how they are stored cannot matter: one array, axes towards right, anterior and superior.

An affine should be a rotation with voxel sizes, and masks and labels should lie on the voxels of their T1. Anything
else is said, for it makes nonsense of a brain.

Letters: X, Y, Z voxels of the image, in that order of axes.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ermoe.brain.data.scans import Problem, ScanError
from ermoe.errors import UserError


@dataclass(frozen=True, slots=True)
class Image:
    """An image in RAS order. ``affine`` leads from voxels to the world in mm."""

    data_XYZ: NDArray[np.float32]
    affine: NDArray[np.float64]
    path: Path

    @property
    def spacing_mm(self) -> NDArray[np.float64]:
        """Edges of a voxel."""
        return np.linalg.norm(self.affine[:3, :3], axis=0)


def read_image(path: Path, subject: str, *, is_label: bool = False) -> Image:
    """The image, or `ScanError` with the first thing that is wrong with it. Only labels may be constant."""
    image, problems = inspect_image(path, subject, is_label=is_label)
    errors = [problem for problem in problems if problem.severity == "error"]
    if errors or image is None:
        raise ScanError(errors[0])
    return image


def inspect_image(path: Path, subject: str, *, is_label: bool = False) -> tuple[Image | None, list[Problem]]:
    """The image if it can be read at all, and everything that is wrong with it."""
    try:
        return _inspect(path, subject, is_label)
    except ScanError as unreadable:
        return None, [unreadable.problem]


def _inspect(path: Path, subject: str, is_label: bool) -> tuple[Image | None, list[Problem]]:
    stored = _open(path, subject)
    problems = [*_shape_problems(stored, path, subject), *_geometry_problems(stored, path, subject)]
    if any(problem.severity == "error" for problem in problems):
        return None, problems
    image = _read(stored, path, subject)
    problems += _value_problems(image.data_XYZ, path, subject, is_label)
    return image, problems


def _library() -> Any:
    try:
        import nibabel
    except ImportError:
        raise UserError("reading scans needs nibabel: pip install 'ermoe[brain]'") from None
    return nibabel


def _open(path: Path, subject: str) -> Any:
    nibabel = _library()
    if not path.exists():
        raise ScanError(Problem("error", subject, path, "does not exist", "restore the file or delete its row"))
    if path.is_file() and path.stat().st_size == 0:
        raise ScanError(Problem("error", subject, path, "is empty", "copy it again from where it came"))
    try:
        return nibabel.load(path)
    except (nibabel.filebasedimages.ImageFileError, nibabel.spatialimages.HeaderDataError, *_BROKEN) as problem:
        what = f"cannot be read as an image ({_short(problem)})"
        raise ScanError(Problem("error", subject, path, what, "copy it again from where it came")) from problem


_BROKEN = (EOFError, OSError, zlib.error, ValueError)


def _read(stored: Any, path: Path, subject: str) -> Image:
    """The voxels in RAS order. Taking a volume of four axes and turning axes read voxels too, so both may fail here."""
    try:
        canonical = _library().as_closest_canonical(_three_axes(stored))
        data_XYZ = np.ascontiguousarray(canonical.get_fdata(dtype=np.float32, caching="unchanged"))
        return Image(data_XYZ, canonical.affine.astype(np.float64), path)
    except _BROKEN as problem:
        what = f"ends before its voxels do ({_short(problem)})"
        remedy = "it is truncated or damaged; copy it again from where it came"
        raise ScanError(Problem("error", subject, path, what, remedy)) from problem


def _short(problem: BaseException) -> str:
    return str(problem).splitlines()[0][:120] if str(problem) else type(problem).__name__


def _three_axes(image: Any) -> Any:
    """Without trailing axes of length 1."""
    return image if len(image.shape) == 3 else image.slicer[(slice(None),) * 3 + (0,) * (len(image.shape) - 3)]


def _shape_problems(image: Any, path: Path, subject: str) -> Iterator[Problem]:
    shape = tuple(int(size) for size in image.shape)
    if len(shape) < 3 or any(size != 1 for size in shape[3:]):
        size = " × ".join(map(str, shape))
        what = f"has {len(shape)} axes ({size}) where a volume has three"
        yield Problem("error", subject, path, what, "choose one volume of it")
    elif min(shape[:3]) < 2:
        yield Problem("error", subject, path, f"is a single slice ({' × '.join(map(str, shape[:3]))})", "use a volume")
    kind = np.dtype(image.get_data_dtype()).kind
    if kind not in "iufb":
        yield Problem("error", subject, path, "holds colours or complex numbers", "store it as real numbers")


def _value_problems(data_XYZ: NDArray[np.float32], path: Path, subject: str, is_label: bool) -> Iterator[Problem]:
    wrong = data_XYZ.size - int(np.count_nonzero(np.isfinite(data_XYZ)))
    if wrong:
        what = f"has {wrong:,} voxels that are NaN or infinite"
        yield Problem("error", subject, path, what, "replace them, by 0 if they are outside the head")
    elif not is_label and data_XYZ.min() == data_XYZ.max():
        yield Problem("error", subject, path, f"is {data_XYZ.min():g} everywhere", "use a scan that shows something")


Affine = NDArray[np.float64]

_SHEAR_DEGREES = 1.0
_TURN_DEGREES = 2.0
_STRETCH = 0.02
_APART_MM = 1.0
_VOXEL_MM = (0.1, 8.0)


def _geometry_problems(image: Any, path: Path, subject: str) -> Iterator[Problem]:
    """Everything that is wrong with the place of an image in the world."""
    affine = np.asarray(image.affine, np.float64)
    if not np.isfinite(affine).all() or abs(np.linalg.det(affine[:3, :3])) < 1e-9:
        what = "has an affine that flattens the volume or is not finite"
        yield Problem("error", subject, path, what, "export the scan again")
        return
    spacing = np.linalg.norm(affine[:3, :3], axis=0)
    if spacing.min() < _VOXEL_MM[0] or spacing.max() > _VOXEL_MM[1]:
        size = " × ".join(f"{edge:.3g}" for edge in spacing)
        yield Problem("error", subject, path, f"has voxels of {size} mm", "the unit of the header may be wrong")
    sheared = _shear_degrees(affine)
    if sheared > _SHEAR_DEGREES:
        what = f"has a sheared affine (axes {sheared:.1f}° off the right angle)"
        yield Problem("error", subject, path, what, "resample it onto a grid with right angles")
    yield from _form_problems(image, path, subject)


def _shear_degrees(affine: Affine) -> float:
    """How far the axes of voxels are from right angles.

    >>> _shear_degrees(np.diag([2.0, 2.0, 1.0, 1.0]))
    0.0
    """
    axes = affine[:3, :3] / np.linalg.norm(affine[:3, :3], axis=0)
    cosines = [abs(float(axes[:, i] @ axes[:, j])) for i, j in ((0, 1), (0, 2), (1, 2))]
    return float(np.degrees(np.arcsin(min(1.0, max(cosines)))))


def _form_problems(image: Any, path: Path, subject: str) -> Iterator[Problem]:
    """NIfTI has room for two affines; which of them holds is convention, so they should not contradict each other."""
    if not hasattr(image, "get_qform"):
        if _is_analyze(image):
            what = "is an Analyze file, which cannot say how the head lies in it"
            yield Problem("error", subject, path, what, "convert it to NIfTI, from DICOM if you can, and look at it")
        return
    header = image.header
    sform_code, qform_code = int(header["sform_code"]), int(header["qform_code"])
    if not sform_code and not qform_code:
        what = "says nothing about its orientation (sform and qform codes are 0)"
        yield Problem("error", subject, path, what, "set one of them, or convert the scan again from DICOM")
    elif sform_code and qform_code:
        sform, qform = np.asarray(image.get_sform()), _qform(image)
        if qform is None:
            what = "has a qform whose quaternion is longer than one, which is no rotation"
            yield Problem("warning", subject, path, what, "the sform is used")
        elif _contradict(sform, qform):
            what = "has an sform and a qform that put its axes in different places"
            yield Problem("error", subject, path, what, "find out which one is right and copy it over the other")
        elif (apart := _apart_mm(sform, qform, image.shape[:3])) > _APART_MM:
            what = f"has an sform and a qform that are up to {apart:.0f} mm apart"
            yield Problem("warning", subject, path, what, "the sform is used")


def _is_analyze(image: Any) -> bool:
    from nibabel.analyze import AnalyzeImage

    return isinstance(image, AnalyzeImage)


def _qform(image: Any) -> Affine | None:
    try:
        return np.asarray(image.get_qform(), np.float64)
    except ValueError:
        return None


def _contradict(sform: Affine, qform: Affine) -> bool:
    """Whether axes are turned, mirrored or stretched against each other; a shift would not change a brain."""
    spacing_s, spacing_q = (np.linalg.norm(form[:3, :3], axis=0) for form in (sform, qform))
    if min(spacing_s.min(), spacing_q.min()) <= 0 or np.any(np.abs(spacing_s / spacing_q - 1) > _STRETCH):
        return True
    cosine = np.sum((sform[:3, :3] / spacing_s) * (qform[:3, :3] / spacing_q), axis=0)
    return bool(np.any(np.degrees(np.arccos(np.clip(cosine, -1, 1))) > _TURN_DEGREES))


def _apart_mm(a: Affine, b: Affine, shape: tuple[int, ...]) -> float:
    corners = np.array([(*corner, 1) for corner in itertools.product(*((0, size - 1) for size in shape))], float)
    return float(np.linalg.norm((corners @ (a - b).T)[:, :3], axis=1).max())


def _lattice_shift(image: Affine, other: Affine, tolerance_voxels: float = 0.02) -> NDArray[np.int64] | None:
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


def on_grid_of(t1: Image, other: Image, subject: str) -> NDArray[np.float32]:
    """The voxels of ``other`` at the voxels of ``t1``; 0 where it does not reach.

    Empty slices around one of the two, or another order of axes, leave the voxels in the same places. Anything else
    is another grid, and might be another space: it is refused, not resampled.
    """
    shift = _lattice_shift(other.affine, t1.affine)
    if shift is None:
        raise ScanError(Problem("error", subject, other.path, _difference(t1, other), _REMEDY))
    if not shift.any() and other.data_XYZ.shape == t1.data_XYZ.shape:
        return other.data_XYZ
    placed = np.zeros(t1.data_XYZ.shape, np.float32)
    # Along each axis: voxels [start, stop) of the T1 are voxels [start − shift, stop − shift) of the other.
    start = np.maximum(shift, 0)
    stop = np.minimum(np.array(placed.shape), shift + other.data_XYZ.shape)
    if np.all(stop > start):
        there = tuple(slice(a, b) for a, b in zip(start, stop, strict=True))
        here = tuple(slice(a - s, b - s) for a, b, s in zip(start, stop, shift, strict=True))
        placed[there] = other.data_XYZ[here]
    return placed


_REMEDY = "resample it onto the T1 with nearest neighbours, after making sure that both are in the same space"


def _difference(t1: Image, other: Image) -> str:
    own, its = (
        f"{' × '.join(map(str, image.data_XYZ.shape))} at {' × '.join(f'{edge:.2f}' for edge in image.spacing_mm)} mm"
        for image in (t1, other)
    )
    apart = "" if own != its else ", shifted or turned"
    return f"lies on another grid ({its}{apart}) than its T1 {t1.path} ({own})"


def bounding_box(mask_XYZ: NDArray[np.bool_]) -> tuple[slice, slice, slice]:
    """The smallest box that holds the mask, which must not be empty."""
    sides = []
    for axis in range(3):
        filled = np.flatnonzero(mask_XYZ.any(axis=tuple(other for other in range(3) if other != axis)))
        sides.append(slice(int(filled[0]), int(filled[-1]) + 1))
    return sides[0], sides[1], sides[2]


def cropped(image: Image, box: tuple[slice, slice, slice]) -> Image:
    """The part of an image within a box of voxels and a margin around it, in the same place of the world."""
    wide = tuple(
        slice(max(0, side.start - _MARGIN), min(size, side.stop + _MARGIN))
        for side, size in zip(box, image.data_XYZ.shape, strict=True)
    )
    affine = image.affine.copy()
    affine[:3, 3] = (image.affine @ [*(side.start for side in wide), 1.0])[:3]
    return Image(np.ascontiguousarray(image.data_XYZ[wide]), affine, image.path)


_MARGIN = 16  # voxels; beyond them neither the blur nor the spline filter of `sample` reaches
