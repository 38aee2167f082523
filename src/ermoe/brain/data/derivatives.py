"""Which mask and which tissue maps belong to a T1 in a BIDS tree."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from ermoe.brain.data.bids import Name, derived, lookup_table, pipelines, session_folder
from ermoe.brain.data.codes import Codes, aseg_codes, codes_from_table
from ermoe.brain.data.problems import Problem
from ermoe.brain.data.scans import TISSUES, ProbabilityMaps, Segmentation, Tissue, TissueSource
from ermoe.errors import UserError

_OF_A_PART = {"desc", "atlas", "seg", "label"}
"""Entities of segmentations that may show lesions or one structure instead of the whole brain."""
_FREESURFER = {"aseg", "aparcaseg", "aparcaDKTaseg", "wmparc"}


@dataclass(slots=True)
class Found:
    """What the derivatives of one T1 offer."""

    mask: Path | None = None
    labels: Path | None = None
    tissue: TissueSource | None = None
    problems: list[Problem] = field(default_factory=list)


def find_derivatives(
    root: Path, participant_id: str, session_id: str | None, t1: Path, *, tissue_from: str | None
) -> Found:
    """Mask, segmentation and tissue maps of a T1; of several pipelines, the first by name that has the thing."""
    key = "_".join(part for part in (participant_id, session_id) if part)
    places = [(pipeline, session_folder(pipeline, participant_id, session_id)) for pipeline in pipelines(root)]
    found = _collect(places, t1, tissue_from, subject=key)
    if tissue_from == "aseg" and found.tissue is None:
        found.tissue = _own_folder_of_freesurfer(root, key)
    if tissue_from in ("probseg", "dseg", "aseg") and found.tissue is None and not found.problems:
        what = f"has no {tissue_from} among its derivatives"
        found.problems.append(Problem("warning", key, t1, what, "it goes without tissue maps"))
    return found


def _own_folder_of_freesurfer(root: Path, key: str) -> Segmentation | None:
    for pipeline in pipelines(root):
        path = pipeline / key / "mri" / "aseg.mgz"
        if path.is_file():
            return Segmentation(path, aseg_codes(), same_grid=False)
    return None


def find_siblings(t1: Path, *, tissue_from: str | None, subject: str) -> Found:
    """The same for a T1 that was named on its own: only what lies in its folder is taken."""
    return _collect([(t1.parent, t1.parent)], t1, tissue_from, subject=subject)


def _collect(places: list[tuple[Path, Path]], t1: Path, tissue_from: str | None, *, subject: str) -> Found:
    found = Found()
    for pipeline, folder in places:
        if not folder.is_dir():
            continue
        segmentations = [path for path in derived(folder, "dseg", t1) if _shows_tissues(path, pipeline)]
        found.mask = found.mask or next((path for path in derived(folder, "mask", t1) if _desc(path) == "brain"), None)
        found.labels = found.labels or next(iter(segmentations), None)
        if found.tissue is None:
            found.tissue = _tissue(pipeline, folder, t1, tissue_from, segmentations, found.problems, subject)
    return found


def _tissue(
    pipeline: Path,
    folder: Path,
    t1: Path,
    tissue_from: str | None,
    segmentations: list[Path],
    problems: list[Problem],
    subject: str,
) -> TissueSource | None:
    if tissue_from == "none":
        return None
    if tissue_from == "aseg":
        freesurfer = [path for path in derived(folder, "dseg", t1) if _is_freesurfer(path)]
        return Segmentation(freesurfer[0], aseg_codes(), same_grid=False) if freesurfer else None
    if tissue_from in (None, "probseg"):
        maps = _probability_maps(folder, t1)
        if maps is not None or tissue_from == "probseg":
            return maps
    return _segmentation(pipeline, segmentations, problems, subject)


def _probability_maps(folder: Path, t1: Path) -> ProbabilityMaps | None:
    by_label: dict[str, Path] = {}
    for path in derived(folder, "probseg", t1):
        by_label.setdefault(Name.of(path).entities.get("label", "").casefold(), path)
    paths: dict[Tissue, Path] = {tissue: by_label[tissue] for tissue in TISSUES if tissue in by_label}
    return ProbabilityMaps(paths) if len(paths) == len(TISSUES) else None


def _segmentation(
    pipeline: Path, segmentations: list[Path], problems: list[Problem], subject: str
) -> Segmentation | None:
    if not segmentations:
        return None
    path = segmentations[0]
    table = lookup_table(path, pipeline)
    if table is None:
        problems.append(
            Problem(
                "error",
                subject,
                path,
                "has no dseg.tsv that says which number is which tissue, and numbers differ between tools",
                f"write {pipeline / 'dseg.tsv'} with the columns index and name, or go without tissue: "
                "--tissue-from none",
            )
        )
        return None
    try:
        return Segmentation(path, known_codes(table))
    except UserError as problem:
        problems.append(Problem("error", subject, path, f"cannot be read as tissue ({problem})"))
        return None


@lru_cache
def _codes_at(table: Path, modified_ns: int) -> Codes:
    return codes_from_table(table)


def known_codes(table: Path) -> Codes:
    """`codes_from_table`, read once for all the people of a pipeline."""
    return _codes_at(table, table.stat().st_mtime_ns)


def _shows_tissues(path: Path, pipeline: Path) -> bool:
    """Whether a dseg shows the whole brain: it has a plain name, or a table that names the three tissues."""
    if _is_freesurfer(path):
        return False
    if not _OF_A_PART & Name.of(path).entities.keys():
        return True
    table = lookup_table(path, pipeline)
    try:
        return table is not None and bool(known_codes(table))
    except UserError:
        return False


def _is_freesurfer(path: Path) -> bool:
    return _desc(path) in _FREESURFER


def _desc(path: Path) -> str | None:
    return Name.of(path).entities.get("desc")
