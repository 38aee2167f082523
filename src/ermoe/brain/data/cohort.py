"""A cohort: the scans of a BIDS root or of a flat table, with everything worth saying about how they were found."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ermoe.brain.data.bids import Name, find_derivatives, find_siblings, is_bids_root, stem
from ermoe.brain.data.bids_cohort import bids_cohort
from ermoe.brain.data.flat_cohort import flat_cohort
from ermoe.brain.data.scans import Problem, Scan
from ermoe.brain.data.settings import CohortOptions
from ermoe.errors import UserError
from ermoe.files import is_hidden

TABLES = {".tsv", ".csv", ".txt"}
_IMAGES = (".nii", ".nii.gz")
_NOT_A_T1 = {"mask", "dseg", "probseg", "bold", "dwi", "T2w", "FLAIR"}


@dataclass(frozen=True, slots=True)
class Cohort:
    """What `open_cohort` and `open_scans` found."""

    scans: tuple[Scan, ...]
    """Sorted by participant and session; scans without an age are among them (``age is None``)."""
    notes: tuple[str, ...]
    """What a person should read: rules applied, files passed over, counts."""
    problems: tuple[Problem, ...]
    """Errors and warnings of the tables; `ermoe.brain.data.quality` finds those of the images."""

    @property
    def with_age(self) -> tuple[Scan, ...]:
        """The scans one can train on."""
        return tuple(scan for scan in self.scans if scan.age is not None)


def state_of(scans: Sequence[Scan]) -> str:
    """Which people, ages and images these are, wherever they lie: what two runs must share to be one.

    >>> state_of([Scan("sub-01", None, Path("gone.nii"), age=50.0)])
    '1 scans, 26070856'
    """
    lines = sorted(f"{scan.key} {scan.age} {scan.t1.stat().st_size if scan.t1.exists() else 0}" for scan in scans)
    return f"{len(scans)} scans, {hashlib.sha256(chr(10).join(lines).encode()).hexdigest()[:8]}"


def open_cohort(path: str | os.PathLike[str], options: CohortOptions | None = None, **changes: Any) -> Cohort:
    """The scans of a BIDS root or of a flat TSV/CSV; ``changes`` are fields of `CohortOptions`, given one by one."""
    options = (options or CohortOptions()).changed(changes)
    place = Path(path)
    if place.is_dir():
        return _cohort(*bids_cohort(place, options))
    if place.is_file() and place.suffix.casefold() in TABLES:
        return _cohort(*flat_cohort(place, options))
    if not place.exists():
        raise UserError(
            f"{place} does not exist: name a BIDS root, or a table with the columns participant_id, t1, age"
        )
    raise UserError(f"{place} is no BIDS root and no table: name a folder with sub-* folders, or a TSV or CSV")


def open_scans(paths: Sequence[str | os.PathLike[str]], options: CohortOptions | None = None, **changes: Any) -> Cohort:
    """Scans to look at or to predict: NIfTI files, folders with NIfTI files, BIDS roots, or tables; no age is needed.

    A BIDS root brings its derivatives with it, and so does a file inside one. A file from elsewhere brings only a mask
    or a segmentation that lies beside it under a BIDS name.
    """
    options = (options or CohortOptions()).changed(changes)
    scans: list[Scan] = []
    notes: list[str] = []
    problems: list[Problem] = []
    for path in map(Path, paths):
        found, said, wrong = _scans_at(path, options)
        scans, notes, problems = scans + found, notes + said, problems + wrong
    if not scans:
        raise UserError(
            f"no scan found in {', '.join(map(str, paths)) or 'nothing'}: name NIfTI files, folders or BIDS roots"
        )
    return _cohort(scans, notes, [replace(problem, severity="warning") for problem in problems])


def _cohort(scans: list[Scan], notes: list[str], problems: list[Problem]) -> Cohort:
    ordered = sorted(scans, key=lambda scan: (scan.participant_id, scan.session_id or ""))
    return Cohort(tuple(ordered), tuple(notes), tuple(problems))


def _scans_at(path: Path, options: CohortOptions) -> tuple[list[Scan], list[str], list[Problem]]:
    if path.is_dir() and is_bids_root(path):
        return bids_cohort(path, options)
    if path.is_dir():
        return [scan for scan in _scans_below(path, options) if options.wants(scan.participant_id)], [], []
    if path.suffix.casefold() in TABLES:
        return flat_cohort(path, options)
    if not path.exists() and not path.name.casefold().endswith(_IMAGES):
        raise UserError(f"{path} does not exist: name NIfTI files, folders, BIDS roots or tables")
    return [_lone_scan(path, options)], [], []


def _scans_below(folder: Path, options: CohortOptions) -> list[Scan]:
    """The scans of a folder; where the same file name occurs in several of its folders, these tell people apart."""
    seen = (file for file in folder.rglob("*") if _is_nifti(file) and not is_hidden(file, below=folder))
    files = sorted(file for file in seen if Name.parsed(file).suffix not in _NOT_A_T1)
    scans = [_lone_scan(file, options) for file in files]
    occurs = Counter(scan.key for scan in scans)
    return [
        scan
        if occurs[scan.key] == 1 or "sub" in Name.parsed(scan.t1).entities
        else replace(scan, participant_id=(scan.t1.relative_to(folder).parent / scan.participant_id).as_posix())
        for scan in scans
    ]


def _lone_scan(path: Path, options: CohortOptions) -> Scan:
    """A file on its own; who it is, is read from a BIDS name, else the file name is the id."""
    entities = Name.parsed(path).entities
    if "sub" not in entities:
        return Scan(stem(path), None, path)
    participant_id, session_id = f"sub-{entities['sub']}", f"ses-{entities['ses']}" if "ses" in entities else None
    root = _enclosing_root(path)
    if root is None:
        found = find_siblings(path, tissue_from=options.tissue_from, subject=participant_id)
    else:
        found = find_derivatives(root, participant_id, session_id, path, tissue_from=options.tissue_from)
    return Scan(participant_id, session_id, path, mask=found.mask, labels=found.labels, tissue=found.tissue)


def _enclosing_root(path: Path) -> Path | None:
    """The BIDS root that holds ROOT/sub-X/[ses-Y/]anat/FILE, also where FILE is a link to somewhere else."""
    return next((parent for parent in Path(os.path.abspath(path)).parents[2:4] if is_bids_root(parent)), None)


def _is_nifti(path: Path) -> bool:
    return path.is_file() and path.name.casefold().endswith(_IMAGES)
