"""`doctor`: looks at every scan of a cohort before a training run does."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from ermoe.brain.data.cohort import Cohort
from ermoe.brain.data.confounds import Confound, Fingerprint, confounds, fingerprint
from ermoe.brain.data.mask import brain_mask, has_deepbet, looks_like_t1, stripped_mask, volume_ml
from ermoe.brain.data.nifti import Image, bounding_box, inspect_image
from ermoe.brain.data.preprocess import Preprocessing, check_tissue, extent_mm
from ermoe.brain.data.scans import Problem, Scan, ScanError, Severity

_COARSE_MM = 3.0
_BRAIN_ML = (700.0, 2200.0)
_SUSPECT_NAMES = {
    "intensity_scale": "intensity scale",
    "voxel_mm": "voxel size",
    "field_of_view_mm": "field of view",
    "noise": "noise",
}


@dataclass(frozen=True, slots=True)
class Checkup:
    """What was seen of one scan."""

    scan: Scan
    mask_source: str | None
    """None if there is no mask to be had; "deepbet" means that deepbet will be run, not that it was."""
    fingerprint: Fingerprint | None
    problems: tuple[Problem, ...]
    digest: str | None
    """Of the voxels, in world order."""


@dataclass(frozen=True, slots=True)
class Examination:
    """What `examine` found: problems of tables and images, and whether something else than the brain predicts age."""

    checkups: tuple[Checkup, ...]
    problems: tuple[Problem, ...]
    confounds: tuple[Confound, ...]

    @property
    def errors(self) -> list[Problem]:
        return [problem for problem in self.problems if problem.severity == "error"]

    @property
    def warnings(self) -> list[Problem]:
        return [problem for problem in self.problems if problem.severity == "warning"]

    @property
    def confounded_by(self) -> list[str]:
        """Names of what alone predicts age."""
        return [confound.name for confound in self.confounds if confound.predicts_age]


def examine(
    cohort: Cohort,
    preprocessing: Preprocessing | None = None,
    *,
    on_scan: Callable[[int, int], None] = lambda done, total: None,
) -> Examination:
    """Checks every scan, for the usual ``preprocessing`` or another; `stop_at_errors(….problems)` before training."""
    usual = preprocessing or Preprocessing()
    checkups = []
    for done, scan in enumerate(cohort.scans, start=1):
        checkups.append(_check_scan(scan, usual))
        on_scan(done, len(cohort.scans))
    problems = [*cohort.problems, *_same_images(checkups)]
    problems += [problem for checkup in checkups for problem in checkup.problems]
    found = tuple(_suspects(checkups))
    return Examination(tuple(checkups), tuple(problems), found)


def _check_scan(scan: Scan, preprocessing: Preprocessing) -> Checkup:
    """Everything that can be told from one scan and its derivatives."""
    t1, problems = inspect_image(scan.t1, scan.key)
    if t1 is None or any(problem.severity == "error" for problem in problems):
        return Checkup(scan, None, None, tuple(problems), None)
    problems += _resolution(t1, scan)
    source, mask_XYZ = None, None
    try:
        source, mask_XYZ = _mask(scan, t1)
        if scan.tissue is not None:
            check_tissue(scan, t1)
    except ScanError as wrong:
        problems.append(wrong.problem)
    if mask_XYZ is not None and source != "deepbet":
        problems += _brain(scan, t1, mask_XYZ, preprocessing)
    marked = mask_XYZ if mask_XYZ is not None else t1.data_XYZ > t1.data_XYZ.mean()
    digest = hashlib.blake2b(_trimmed(t1.data_XYZ).tobytes(), digest_size=16).hexdigest()
    return Checkup(scan, source, fingerprint(t1, marked), tuple(problems), digest)


def _mask(scan: Scan, t1: Image) -> tuple[str, NDArray[np.bool_] | None]:
    """deepbet takes seconds a scan and runs when the scan is prepared; here the head has to do for the brain."""
    if scan.mask is None and scan.labels is None and has_deepbet():
        return "deepbet", stripped_mask(t1)
    mask_XYZ, source = brain_mask(scan, t1)
    return source, mask_XYZ


def _resolution(t1: Image, scan: Scan) -> list[Problem]:
    spacing = t1.spacing_mm
    if spacing.max() <= _COARSE_MM:
        return []
    size = " × ".join(f"{edge:.2g}" for edge in spacing)
    what = f"has voxels of {size} mm, too coarse to show the cortex"
    return [Problem("warning", scan.key, scan.t1, what, "expect a poor prediction")]


def _brain(scan: Scan, t1: Image, mask_XYZ: NDArray[np.bool_], preprocessing: Preprocessing) -> list[Problem]:
    problems = []
    path = scan.mask or scan.labels or scan.t1
    size_ml = volume_ml(mask_XYZ, t1)
    if not _BRAIN_ML[0] <= size_ml <= _BRAIN_ML[1]:
        what = f"marks {size_ml:.0f} mL as brain, where {_BRAIN_ML[0]:.0f} to {_BRAIN_ML[1]:.0f} would be usual"
        problems.append(Problem("warning", scan.key, path, what, "look at the mask"))
    low_mm, high_mm = extent_mm(mask_XYZ, t1.affine)
    room_mm = preprocessing.spacing_mm * np.array(preprocessing.shape)
    if preprocessing.register == "none" and np.any(high_mm - low_mm > room_mm):
        size, room = (" × ".join(f"{edge:.0f}" for edge in edges) for edges in (high_mm - low_mm, room_mm))
        what = f"marks a brain of {size} mm, and the grid holds {room} mm"
        remedy = "look at the mask; if it is right, use a larger --shape"
        problems.append(Problem("error", scan.key, path, what, remedy))
    if not looks_like_t1(t1.data_XYZ, mask_XYZ, t1.spacing_mm):
        what = "shows a brain that is hardly brighter inside than at its surface, as in no T1 of an adult"
        problems.append(Problem("warning", scan.key, scan.t1, what, "is it T1-weighted, and the mask its own?"))
    cut = [
        side
        for axis, (low, high) in enumerate((("left", "right"), ("back", "front"), ("", "top")))
        for side in _touched(mask_XYZ, axis, low, high)
    ]
    if cut:
        what = f"shows a brain that is cut off at the {' and the '.join(cut)}"
        problems.append(
            Problem("warning", scan.key, scan.t1, what, "the field of view is too small, or the mask wrong")
        )
    return problems


def _touched(mask_XYZ: NDArray[np.bool_], axis: int, low: str, high: str) -> list[str]:
    """Sides where the mask meets the end of the volume; the brain stem may leave at the bottom, which has no name."""
    side = bounding_box(mask_XYZ)[axis]
    at_low, at_high = side.start == 0, side.stop == mask_XYZ.shape[axis]
    return [name for name, touched in ((low, at_low), (high, at_high)) if touched and name]


def _trimmed(data_XYZ: NDArray[np.float32]) -> NDArray[np.float32]:
    """Without empty slices at the ends, so that padding does not hide a copy."""
    shown = data_XYZ != 0
    return np.ascontiguousarray(data_XYZ[bounding_box(shown)]) if shown.any() else data_XYZ


def _same_images(checkups: Sequence[Checkup]) -> list[Problem]:
    """Equal voxels under two names are one person in two places."""
    seen: dict[str, Checkup] = {}
    problems = []
    for checkup in checkups:
        if checkup.digest is None:
            continue
        twin = seen.setdefault(checkup.digest, checkup).scan
        if twin is not checkup.scan:
            what = f"has the same voxels as {twin.t1} of {twin.key}"
            severity: Severity = "warning" if twin.participant_id == checkup.scan.participant_id else "error"
            problems.append(Problem(severity, checkup.scan.key, checkup.scan.t1, what, "delete one of them"))
    return problems


def _suspects(checkups: Sequence[Checkup]) -> list[Confound]:
    """The confound table, over scans that have an age and could be read."""
    known = [checkup for checkup in checkups if checkup.fingerprint is not None and checkup.scan.age is not None]
    numbers = {
        _SUSPECT_NAMES[field.name]: [getattr(checkup.fingerprint, field.name) for checkup in known]
        for field in fields(Fingerprint)
    }
    labels: dict[str, list[str | None]] = {"site": [checkup.scan.site for checkup in known]}
    labels["mask source"] = [checkup.mask_source for checkup in known]
    for column in _label_columns([checkup.scan for checkup in known]):
        labels[column] = [checkup.scan.columns.get(column) for checkup in known]
    return confounds(np.array([checkup.scan.age for checkup in known], float), numbers, labels)


def _label_columns(scans: Sequence[Scan]) -> list[str]:
    """Columns that sort people into a few groups: batch, scanner, protocol, … but no columns made from the age."""
    columns = sorted({column for scan in scans for column in scan.columns if not column.startswith("age")})
    few = max(2, len(scans) // 5)
    return [column for column in columns if 2 <= len(Counter(scan.columns.get(column, "n/a") for scan in scans)) <= few]
