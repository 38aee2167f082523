"""Reading images so that how they are stored cannot matter: one array, axes towards right, anterior and superior.

Letters: X, Y, Z voxels of the image, in that order of axes.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ermoe.brain.data.affines import geometry_problems
from ermoe.brain.data.problems import Problem, ScanError
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
    problems = [*_shape_problems(stored, path, subject), *geometry_problems(stored, path, subject)]
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
