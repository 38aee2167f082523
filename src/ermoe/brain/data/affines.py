"""What an affine should be: a rotation with voxel sizes. Anything else is said, for it makes nonsense of a brain."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ermoe.brain.data.problems import Problem

Affine = NDArray[np.float64]

_SHEAR_DEGREES = 1.0
_TURN_DEGREES = 2.0
_STRETCH = 0.02
_APART_MM = 1.0
_VOXEL_MM = (0.1, 8.0)


def geometry_problems(image: Any, path: Path, subject: str) -> Iterator[Problem]:
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
    sheared = shear_degrees(affine)
    if sheared > _SHEAR_DEGREES:
        what = f"has a sheared affine (axes {sheared:.1f}° off the right angle)"
        yield Problem("error", subject, path, what, "resample it onto a grid with right angles")
    yield from _form_problems(image, path, subject)


def shear_degrees(affine: Affine) -> float:
    """How far the axes of voxels are from right angles.

    >>> shear_degrees(np.diag([2.0, 2.0, 1.0, 1.0]))
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


def lattice_shift(image: Affine, other: Affine, tolerance_voxels: float = 0.02) -> NDArray[np.int64] | None:
    """By how many voxels two grids are shifted, or None if their voxels do not coincide.

    Voxel v of ``image`` is voxel v + shift of ``other``. Comparing floats of headers for equality would call most
    pairs different; a fiftieth of a voxel over the length of a head is the same grid.

    >>> padded = np.array([[1.0, 0, 0, -3], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]])
    >>> lattice_shift(np.eye(4), padded).tolist()
    [3, 0, 0]
    """
    step = np.linalg.inv(other) @ image
    shift = np.round(step[:3, 3])
    turned = np.abs(step[:3, :3] - np.eye(3)).max() * 200  # over 200 voxels, the length of a head
    return shift.astype(np.int64) if turned < 0.5 and np.abs(step[:3, 3] - shift).max() < tolerance_voxels else None
