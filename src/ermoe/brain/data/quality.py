"""`ermoe brain check`: looks at every scan before a training run does, and for what else than the brain predicts age.

That is what a scan tells of its scanner and its file: each suspect alone, and everybody predicted from all others.

Letters: N scans, P permutations, F columns of a design, X, Y, Z voxels of the T1.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from rich.table import Table
from scipy import ndimage

from ermoe.brain.data.cohort import Cohort
from ermoe.brain.data.nifti import Bool, Double, Float, Image, bounding_box, inspect_image
from ermoe.brain.data.preprocess import (
    brain_mask,
    grid_centre,
    has_deepbet,
    looks_like_t1,
    stripped_mask,
    tissue_images,
    volume_ml,
)
from ermoe.brain.data.scans import Preprocessing, Problem, Scan, ScanError, Severity, grouped
from ermoe.brain.likeness import agreement_with_template

_COARSE_MM = 3.0
_USUAL_ML = (700.0, 2200.0)
_UPSIDE_DOWN = -0.1
"""By how much less a brain agrees with the template than when it is turned: brains that are made up may be level."""
_PERMUTATIONS = 999
_LARGEST_P = 0.01
_SMALLEST_GAIN = 0.05
_FEWEST_SCANS = 10
_SIX_NEIGHBOURS = ndimage.generate_binary_structure(3, 1).astype(np.float32)
_SIX_NEIGHBOURS[1, 1, 1] = 0


@dataclass(frozen=True, slots=True)
class Confound:
    """How well one thing alone predicts age."""

    name: str
    mae: float | None
    """Mean absolute error in years, leaving one out; None if the thing is the same for everybody."""
    mae_of_mean: float
    """Of predicting the mean of all others."""
    p_value: float
    """Share of shuffled ages for which it does as well."""

    @property
    def predicts_age(self) -> bool:
        """Better than the mean by a twentieth, and not by chance."""
        return self.mae is not None and self.mae < (1 - _SMALLEST_GAIN) * self.mae_of_mean and self.p_value < _LARGEST_P


def confounds(
    age_N: Double, numbers: Mapping[str, Sequence[float]], labels: Mapping[str, Sequence[str | None]], *, seed: int = 0
) -> list[Confound]:
    """One row for every suspect; none if there are too few scans to tell."""
    if len(age_N) < _FEWEST_SCANS:
        return []
    designs = {name: _line(np.asarray(values, float)) for name, values in numbers.items()}
    designs |= {name: _groups(values) for name, values in labels.items()}
    rng = np.random.default_rng(seed)
    shuffled_NP = np.stack([rng.permutation(age_N) for _ in range(_PERMUTATIONS)], axis=1)
    mean = float(np.abs(left_out_errors(np.ones((len(age_N), 1)), age_N[:, None])).mean())
    return [_row(name, design_NF, age_N, shuffled_NP, mean) for name, design_NF in designs.items()]


def _row(name: str, design_NF: Double | None, age_N: Double, shuffled_NP: Double, mean: float) -> Confound:
    if design_NF is None:
        return Confound(name, None, mean, 1.0)
    mae = float(np.abs(left_out_errors(design_NF, age_N[:, None])).mean())
    chance_P = np.abs(left_out_errors(design_NF, shuffled_NP)).mean(axis=0)
    return Confound(name, mae, mean, float((1 + (chance_P <= mae).sum()) / (1 + len(chance_P))))


def left_out_errors(design_NF: Double, age_NP: Double) -> Double:
    """Errors of least squares when each row is predicted from all others, without fitting N times.

    With the hat matrix H, leaving row i out changes its residual from e_i to e_i / (1 − H_ii). Where H_ii = 1, as for
    the only member of a group, the others say nothing about it: their mean is the prediction.
    """
    number = len(design_NF)
    basis_NF, _ = np.linalg.qr(design_NF)
    leverage_N = (basis_NF**2).sum(axis=1)
    residual_NP = age_NP - basis_NF @ (basis_NF.T @ age_NP)
    alone_N = leverage_N > 1 - 1e-9
    errors_NP = residual_NP / np.where(alone_N, 1.0, 1 - leverage_N)[:, None]
    errors_NP[alone_N] = (age_NP - age_NP.mean(axis=0))[alone_N] * number / (number - 1)
    return errors_NP


def _line(values_N: Double) -> Double | None:
    """Columns 1 and the standardised values; None if they hardly differ."""
    spread = values_N.std()
    if not np.isfinite(spread) or spread <= 1e-6 * max(1.0, float(np.abs(values_N).mean())):
        return None
    return np.column_stack([np.ones(len(values_N)), (values_N - values_N.mean()) / spread])


def _groups(labels: Sequence[str | None]) -> Double | None:
    """One column a group; None if there is one group, or hardly two people in any."""
    known = sorted({str(label) for label in labels})
    if len(known) < 2 or len(known) > len(labels) // 2:
        return None
    return np.array([[str(label) == group for group in known] for label in labels], float)


@dataclass(frozen=True, slots=True)
class Checkup:
    """What was seen of one scan."""

    scan: Scan
    mask_source: str | None
    """None if there is no mask to be had; "deepbet" means that deepbet will be run, or was, see ``has_mask``."""
    fingerprint: Mapping[str, float]
    """Numbers that should not know an age, by name; none if the scan cannot be read."""
    problems: tuple[Problem, ...]
    digest: str | None
    """Of the voxels, in world order."""
    has_mask: bool = False
    """Whether the brain was looked at."""


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
    make_masks: bool = False,
    on_scan: Callable[[int, int], None] = lambda done, total: None,
) -> Examination:
    """Checks every scan, for the usual ``preprocessing`` or another; `stop_at_errors(….problems)` before training.

    ``make_masks`` runs deepbet for heads without a mask, which takes seconds each; else their brains are not looked at.
    """
    usual = preprocessing or Preprocessing()
    checkups = []
    for done, scan in enumerate(cohort.scans, start=1):
        checkups.append(_check_scan(scan, usual, make_masks))
        on_scan(done, len(cohort.scans))
    problems = [*cohort.problems, *_same_images(checkups)]
    problems += [problem for checkup in checkups for problem in checkup.problems]
    return Examination(tuple(checkups), tuple(problems), tuple(_suspects(checkups)))


def _check_scan(scan: Scan, preprocessing: Preprocessing, make_masks: bool) -> Checkup:
    """Everything that can be told from one scan and its derivatives."""
    t1, problems = inspect_image(scan.t1, scan.key)
    if t1 is None or any(problem.severity == "error" for problem in problems):
        return Checkup(scan, None, {}, tuple(problems), None)
    if t1.spacing_mm.max() > _COARSE_MM:
        size = " × ".join(f"{edge:.2g}" for edge in t1.spacing_mm)
        what = f"has voxels of {size} mm, too coarse to show the cortex"
        problems.append(Problem("warning", scan.key, scan.t1, what, "expect a poor prediction"))
    source, mask_XYZ = None, None
    try:
        source, mask_XYZ = _mask(scan, t1, make_masks)
        if scan.tissue is not None:
            tissue_images(scan, t1)
    except ScanError as wrong:
        problems.append(wrong.problem)
    if mask_XYZ is not None:
        problems += _brain(scan, t1, mask_XYZ, preprocessing)
    marked = mask_XYZ if mask_XYZ is not None else t1.data_XYZ > t1.data_XYZ.mean()
    digest = hashlib.blake2b(_trimmed(t1.data_XYZ).tobytes(), digest_size=16).hexdigest()
    return Checkup(scan, source, _fingerprint(t1, marked), tuple(problems), digest, mask_XYZ is not None)


def _mask(scan: Scan, t1: Image, make_it: bool) -> tuple[str, Bool | None]:
    """deepbet takes seconds a scan and runs when the scan is prepared; here the head has to do unless asked."""
    if not make_it and scan.mask is None and scan.labels is None and has_deepbet() and stripped_mask(t1) is None:
        return "deepbet", None
    mask_XYZ, source = brain_mask(scan, t1)
    return source, mask_XYZ


def _brain(scan: Scan, t1: Image, mask_XYZ: Bool, preprocessing: Preprocessing) -> list[Problem]:
    problems = []
    path = scan.mask or scan.labels or scan.t1
    size_ml = volume_ml(mask_XYZ, t1)
    if not _USUAL_ML[0] <= size_ml <= _USUAL_ML[1]:
        what = f"marks {size_ml:.0f} mL as brain, where {_USUAL_ML[0]:.0f} to {_USUAL_ML[1]:.0f} would be usual"
        problems.append(Problem("warning", scan.key, path, what, "look at the mask"))
    try:
        if preprocessing.register == "none":
            grid_centre(scan, t1, mask_XYZ, preprocessing)
    except ScanError as too_large:
        problems.append(too_large.problem)
    if not looks_like_t1(t1.data_XYZ, mask_XYZ, t1.spacing_mm):
        what = "shows a brain that is hardly brighter inside than at its surface, as in no T1 of an adult"
        problems.append(Problem("warning", scan.key, scan.t1, what, "is it T1-weighted, and the mask its own?"))
    x, y, z = box = bounding_box(mask_XYZ)
    if agreement_with_template(t1.data_XYZ[box], mask_XYZ[box])[2] < _UPSIDE_DOWN:
        what = "shows a brain that lies upside down or back to front, by the axes of its header"
        remedy = "look at it; convert it again from DICOM with dcm2niix, or correct its sform"
        problems.append(Problem("warning", scan.key, scan.t1, what, remedy))
    right, front, top = mask_XYZ.shape  # the brain stem may leave at the bottom
    touched = {"left": x.start == 0, "right": x.stop == right, "back": y.start == 0, "front": y.stop == front}
    touched["top"] = z.stop == top
    if any(touched.values()):
        cut = " and the ".join(side for side, is_touched in touched.items() if is_touched)
        remedy = "the field of view is too small, or the mask wrong"
        problems.append(Problem("warning", scan.key, scan.t1, f"shows a brain that is cut off at the {cut}", remedy))
    return problems


def _trimmed(data_XYZ: Float) -> Float:
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
    known = [checkup for checkup in checkups if checkup.fingerprint and checkup.scan.age is not None]
    numbers = {name: [checkup.fingerprint[name] for checkup in known] for name in known[0].fingerprint} if known else {}
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


def _fingerprint(t1: Image, mask_XYZ: Bool) -> dict[str, float]:
    """Of a T1 and its brain: scales are geometric means over the axes, noise is relative to the median intensity."""
    level = max(float(np.median(np.abs(t1.data_XYZ[mask_XYZ]))), 1e-12)
    return {
        "intensity scale": float(np.log10(level)),
        "voxel size": float(np.exp(np.log(t1.spacing_mm).mean())),
        "field of view": float(np.exp(np.log(t1.spacing_mm * t1.data_XYZ.shape).mean())),
        "noise": _noise(t1.data_XYZ, mask_XYZ) / level,
    }


def _noise(data_XYZ: Float, mask_XYZ: Bool) -> float:
    """Deviation of a voxel from the mean of its six neighbours, in the brightest third: white matter, far from edges.

    For independent noise of deviation σ that difference has σ √(1 + 1/6); a median is not moved by the edges left.
    """
    bright = mask_XYZ & (data_XYZ > np.percentile(data_XYZ[mask_XYZ], 66))
    inside = ndimage.binary_erosion(bright)
    inside = inside if inside.any() else bright
    neighbours = ndimage.convolve(data_XYZ, _SIX_NEIGHBOURS / 6)
    difference = (data_XYZ - neighbours)[inside]
    return float(1.4826 * np.median(np.abs(difference)) / np.sqrt(7 / 6)) if difference.size else 0.0


def in_words(cohort: Cohort, examination: Examination) -> Iterator[str | Table]:
    """The cohort in a few lines, problems one a line, the confound table, and how much there is."""
    people = {scan.participant_id for scan in cohort.scans}
    ages = [scan.age for scan in cohort.scans if scan.age is not None]
    years = f", {min(ages):.1f} to {max(ages):.1f} years" if ages else ""
    yield f"{_count(len(cohort.scans), 'scan')} of {_count(len(people), 'person', 'people')}{years}"
    groups: dict[str, Counter[str]] = {
        "sex": Counter(scan.sex or "n/a" for scan in cohort.scans),
        "site": Counter(scan.site or "n/a" for scan in cohort.scans),
        "brain mask": Counter(checkup.mask_source or "none" for checkup in examination.checkups),
        "tissue maps": Counter("yes" if scan.tissue else "no" for scan in cohort.scans),
    }
    for name, found in groups.items():
        yield f"{name}: " + ", ".join(f"{key} {number}" for key, number in sorted(found.items()))
    yield from cohort.notes
    if unseen := [own.scan.key for own in examination.checkups if own.mask_source == "deepbet" and not own.has_mask]:
        yield (
            f"{_count(len(unseen), 'mask')} not made, so these brains were not looked at: {', '.join(unseen[:5])}"
            f"{', …' * (len(unseen) > 5)}; deepbet makes them in training, and here with --mask"
        )
    yield from (f"error: {line}" for line in grouped(examination.errors))
    yield from (f"warning: {line}" for line in grouped(examination.warnings))
    yield from _confounds_in_words(examination.confounds)
    numbers = (len(found) for found in (examination.errors, examination.warnings, examination.confounded_by))
    yield ", ".join(map(_count, numbers, ("error", "warning", "confound")))


def _confounds_in_words(found: Sequence[Confound]) -> Iterator[str | Table]:
    if not found:
        return
    mean = found[0].mae_of_mean
    table = Table("this alone", "MAE of age", "gain", "p", title="What predicts age without a look at the brain")
    table.add_row("nothing (the mean age)", f"{mean:.2f}", "", "")
    for confound in found:
        if confound.mae is None:
            table.add_row(confound.name, "the same for all", "", "")
        else:
            gain = f"{1 - confound.mae / mean:+.0%}"
            table.add_row(confound.name, f"{confound.mae:.2f}", gain, f"{confound.p_value:.3f}")
    yield table
    for confound in found:
        if confound.predicts_age:
            yield (
                f"warning: {confound.name} alone predicts age ({confound.mae:.1f} years instead of {mean:.1f}): a "
                "model can learn it instead of the brain; judge among people who share it and quote this row with it"
            )


def _count(number: int, thing: str, things: str | None = None) -> str:
    return f"{number:,} {thing if number == 1 else things or thing + 's'}"
