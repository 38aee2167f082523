"""What a BIDS tree holds: T1 scans, the masks and tissue maps that belong to them, and the codes of segmentations.

Files are told apart by the entities in their names. Which number of a segmentation stands for which tissue is only ever
what a table says: 1 is CSF to one tool, grey matter to the next, and a left ventricle to a third.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from functools import lru_cache
from importlib import resources
from pathlib import Path

from ermoe.brain.data.scans import TISSUES, ProbabilityMaps, Problem, Scan, Segmentation, Tissue, TissueSource
from ermoe.brain.data.tables import read_table
from ermoe.errors import UserError

_OF_DERIVATIVES = {"desc", "label", "space", "res", "den", "atlas", "seg", "hemi"}
_NATIVE_SPACES = {None, "T1w", "orig", "scanner"}
_SUFFIXES = (".nii.gz", ".nii")
_NOT_SKIPPED = {"T1w", "mask", "dseg", "probseg"}


@dataclass(frozen=True, slots=True)
class Name:
    """A BIDS file name taken apart.

    >>> Name.parsed(Path("sub-01_ses-2_run-1_T1w.nii.gz"))
    Name(entities={'sub': '01', 'ses': '2', 'run': '1'}, suffix='T1w')
    """

    entities: dict[str, str]
    suffix: str

    @classmethod
    def parsed(cls, path: Path) -> Name:
        *parts, suffix = stem(path).split("_")
        pairs = (part.partition("-") for part in parts)
        return cls({key: value for key, dash, value in pairs if dash}, suffix)


def stem(path: Path) -> str:
    """The file name without .nii, .nii.gz, .tsv, …

    >>> stem(Path("a/sub-01_T1w.nii.gz")), stem(Path("head 3.5 mm.nii.gz"))
    ('sub-01_T1w', 'head 3.5 mm')
    """
    return Path(path.stem).stem if path.suffix.casefold() == ".gz" else path.stem


@dataclass(slots=True)
class Choice:
    """The T1 of one session, and what was passed over for it."""

    participant_id: str
    session_id: str | None
    t1: Path | None
    passed_over: list[Path] = field(default_factory=list)
    with_contrast: list[Path] = field(default_factory=list)
    elsewhere: list[Path] = field(default_factory=list)
    """T1s in another space than their own, for example MNI."""
    others: list[Path] = field(default_factory=list)
    """Images that are no T1w, for example T2w."""
    num_hidden: int = 0
    """Files that macOS leaves, whose names begin with "._"."""


def is_bids_root(folder: Path) -> bool:
    """Whether there are subject folders that hold images, or the file every BIDS set has."""
    return (folder / "dataset_description.json").is_file() or any(_session_folders(folder))


def choose_t1s(root: Path, rule: str) -> list[Choice]:
    """One T1 for every session that has any.

    ``rule``: "first" takes the one with the fewest entities, then the lowest run, then the first name; "last" the
    highest run instead; anything else is a pattern for file names, and "first" decides among those that match.
    """
    return [
        _choose(participant_id, session_id, folder, rule)
        for participant_id, session_id, folder in _session_folders(root)
    ]


def _session_folders(root: Path) -> Iterator[tuple[str, str | None, Path]]:
    """(participant, session or None, folder with an anat folder)."""
    for subject in sorted(path for path in root.glob("sub-*") if path.is_dir()):
        if (subject / "anat").is_dir():
            yield subject.name, None, subject
        for session in sorted(path for path in subject.glob("ses-*") if (path / "anat").is_dir()):
            yield subject.name, session.name, session


def _choose(participant_id: str, session_id: str | None, folder: Path, rule: str) -> Choice:
    anat = folder / "anat"
    choice = Choice(participant_id, session_id, None, num_hidden=len(list(anat.glob("._*"))))
    choice.others = [path for path in _images(anat, "*") if Name.parsed(path).suffix not in _NOT_SKIPPED]
    candidates = []
    for path in _images(anat, "T1w"):
        entities = Name.parsed(path).entities
        if "ce" in entities:
            choice.with_contrast.append(path)
        elif entities.get("space") not in _NATIVE_SPACES:
            choice.elsewhere.append(path)
        elif rule in ("first", "last") or fnmatch(path.name, rule):
            candidates.append(path)
        else:
            choice.passed_over.append(path)
    if candidates:
        choice.t1, *rest = sorted(candidates, key=lambda path: _rank(path, last_run=rule == "last"))
        choice.passed_over += rest
    return choice


def _rank(path: Path, *, last_run: bool) -> tuple[int, int, str]:
    entities = dict(Name.parsed(path).entities)
    run = entities.pop("run", "0")
    number = int(run) if run.isdecimal() else 0
    return len(entities), -number if last_run else number, path.name


def _images(folder: Path, suffix: str) -> list[Path]:
    """NIfTI files of a folder with a BIDS suffix; of twins packed and unpacked, the packed one."""
    found: dict[str, Path] = {}
    for extension in _SUFFIXES:
        for path in sorted(folder.glob(f"[!.]*_{suffix}{extension}")):  # macOS leaves "._" twins beside files
            found.setdefault(stem(path), path)
    return [found[name] for name in sorted(found)]


def _pipelines(root: Path) -> list[Path]:
    """The folders of derivatives of a data set, and the set itself, which may be one."""
    derivatives = root / "derivatives"
    inside = sorted(path for path in derivatives.iterdir() if path.is_dir()) if derivatives.is_dir() else []
    loose = [derivatives] if any(derivatives.glob("sub-*")) else []
    return [*inside, *loose, root]


def _derived(folder: Path, suffix: str, t1: Path) -> list[Path]:
    """Images with a suffix in a folder that belong to a T1, in its own space, plainest name first."""
    own = Name.parsed(t1).entities
    fitting = [path for path in _images(folder, suffix) if _belongs(Name.parsed(path).entities, own)]
    return sorted(fitting, key=lambda path: (len(Name.parsed(path).entities), path.name))


def _belongs(entities: dict[str, str], own: dict[str, str]) -> bool:
    """A derivative may leave entities of its T1 out, as pipelines that average runs do, but not contradict them."""
    if entities.get("space") not in _NATIVE_SPACES:
        return False
    said = {key: value for key, value in entities.items() if key not in _OF_DERIVATIVES}
    return all(own.get(key) == value for key, value in said.items())


def lookup_table(image: Path, stop_at: Path) -> Path | None:
    """The TSV that explains a dseg, by BIDS's principle of inheritance: nearest folder first, plainest name last."""
    name = Name.parsed(image)
    for folder in image.parents:
        seen = (path for path in folder.glob(f"*{name.suffix}.tsv") if not path.name.startswith("."))
        parsed = ((Name.parsed(path), path) for path in seen)
        tables = [
            (len(general.entities), path.name, path)
            for general, path in parsed
            if general.suffix == name.suffix and general.entities.items() <= name.entities.items()
        ]
        if tables:
            return max(tables)[-1]
        if folder == stop_at:
            break
    return None


Codes = dict[Tissue, tuple[int, ...]]

_NAMES: dict[str, Tissue] = {
    "wm": "wm", "whitematter": "wm", "cerebralwhitematter": "wm",
    "gm": "gm", "graymatter": "gm", "greymatter": "gm",
    "cgm": "gm", "corticalgraymatter": "gm", "corticalgreymatter": "gm",
    "sgm": "gm", "subcorticalgraymatter": "gm", "subcorticalgreymatter": "gm",
    "csf": "csf", "cerebrospinalfluid": "csf",
}  # fmt: skip


def _codes_from_table(path: Path) -> Codes:
    """The codes of a BIDS ``dseg.tsv``, by its columns ``abbreviation`` or ``name``; read once for all people.

    A name must be the whole tissue. "Left-Cerebral-White-Matter" is one part of FreeSurfer's segmentation, which is
    read as tissue only when it is asked for.
    """
    return _codes_at(path, path.stat().st_mtime_ns)


@lru_cache
def _codes_at(path: Path, modified_ns: int) -> Codes:
    table = read_table(path)
    if not table.has("index") or not (table.has("name") or table.has("abbreviation")):
        raise UserError(f"{path} needs the columns index and name to say which number is which tissue")
    codes: dict[Tissue, list[int]] = {tissue: [] for tissue in TISSUES}
    for row in table.rows:
        tissue = _tissue_named(row.get("abbreviation", "")) or _tissue_named(row.get("name", ""))
        if tissue is not None:
            codes[tissue].append(_number(path, row["index"]))
    if unnamed := [tissue for tissue in TISSUES if not codes[tissue]]:
        raise UserError(
            f"{path} has no row for {', '.join(unnamed)}: name white matter, grey matter and cerebrospinal fluid in "
            "it; for FreeSurfer's labels use --tissue-from aseg"
        )
    return {tissue: tuple(numbers) for tissue, numbers in codes.items()}


def aseg_codes() -> Codes:
    """The labels of FreeSurfer's aseg and aparc+aseg, by tissue, from the table that is shipped.

    >>> aseg_codes()["wm"][:2]
    (2, 7)
    """
    with resources.as_file(resources.files("ermoe.brain.data") / "aseg.tsv") as path:
        table = read_table(path)
    codes: dict[Tissue, list[int]] = {tissue: [] for tissue in TISSUES}
    for row in table.rows:
        first, _, last = row["index"].partition("-")
        codes[_NAMES[row["tissue"]]] += range(int(first), int(last or first) + 1)
    return {tissue: tuple(numbers) for tissue, numbers in codes.items()}


def _tissue_named(text: str) -> Tissue | None:
    return _NAMES.get(re.sub(r"[\s_-]+", "", text.casefold()))


def _number(path: Path, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UserError(f"{path} has the index {text!r}, which is not a whole number") from None


_OF_A_PART = {"desc", "atlas", "seg", "label"}
"""Entities of segmentations that may show lesions or one structure instead of the whole brain."""
_FREESURFER = {"aseg", "aparcaseg", "aparcaDKTaseg", "wmparc"}


def with_derivatives(scan: Scan, root: Path, tissue_from: str | None) -> tuple[Scan, list[Problem]]:
    """The scan with mask, segmentation and tissue maps; of several pipelines, the first by name that has the thing."""
    folder = Path(scan.participant_id, scan.session_id or ".", "anat")
    scan, problems = _collected(scan, [(pipeline, pipeline / folder) for pipeline in _pipelines(root)], tissue_from)
    if tissue_from == "aseg" and scan.tissue is None:
        scan = replace(scan, tissue=_own_folder_of_freesurfer(root, scan.key))
    if tissue_from in ("probseg", "dseg", "aseg") and scan.tissue is None and not problems:
        what = f"has no {tissue_from} among its derivatives"
        problems.append(Problem("warning", scan.key, scan.t1, what, "it goes without tissue maps"))
    return scan, problems


def _own_folder_of_freesurfer(root: Path, key: str) -> Segmentation | None:
    paths = (pipeline / key / "mri" / "aseg.mgz" for pipeline in _pipelines(root))
    found = next((path for path in paths if path.is_file()), None)
    return None if found is None else Segmentation(found, aseg_codes(), same_grid=False)


def with_siblings(scan: Scan, tissue_from: str | None) -> tuple[Scan, list[Problem]]:
    """The same for a T1 that was named on its own: only what lies in its folder is taken."""
    return _collected(scan, [(scan.t1.parent, scan.t1.parent)], tissue_from)


def _collected(scan: Scan, places: list[tuple[Path, Path]], tissue_from: str | None) -> tuple[Scan, list[Problem]]:
    problems: list[Problem] = []
    for pipeline, folder in places:
        if not folder.is_dir():
            continue
        masks = (path for path in _derived(folder, "mask", scan.t1) if _desc(path) == "brain")
        segmentations = [path for path in _derived(folder, "dseg", scan.t1) if _shows_tissues(path, pipeline)]
        scan = replace(
            scan,
            mask=scan.mask or next(masks, None),
            labels=scan.labels or next(iter(segmentations), None),
            tissue=scan.tissue or _tissue(scan, pipeline, folder, tissue_from, segmentations, problems),
        )
    return scan, problems


def _tissue(
    scan: Scan,
    pipeline: Path,
    folder: Path,
    tissue_from: str | None,
    segmentations: list[Path],
    problems: list[Problem],
) -> TissueSource | None:
    if tissue_from == "none":
        return None
    if tissue_from == "aseg":
        freesurfer = [path for path in _derived(folder, "dseg", scan.t1) if _is_freesurfer(path)]
        return Segmentation(freesurfer[0], aseg_codes(), same_grid=False) if freesurfer else None
    if tissue_from in (None, "probseg"):
        maps = _probability_maps(folder, scan.t1)
        if maps is not None or tissue_from == "probseg":
            return maps
    if not segmentations:
        return None
    return segmentation(segmentations[0], lookup_table(segmentations[0], pipeline), pipeline, scan.key, problems)


def _probability_maps(folder: Path, t1: Path) -> ProbabilityMaps | None:
    by_label: dict[str, Path] = {}
    for path in _derived(folder, "probseg", t1):
        by_label.setdefault(Name.parsed(path).entities.get("label", "").casefold(), path)
    paths: dict[Tissue, Path] = {tissue: by_label[tissue] for tissue in TISSUES if tissue in by_label}
    return ProbabilityMaps(paths) if len(paths) == len(TISSUES) else None


def segmentation(
    path: Path, table: Path | None, home: Path, subject: str, problems: list[Problem]
) -> Segmentation | None:
    """A segmentation with the codes of its table; without one, or one that will do, None and a problem."""
    if table is None:
        what = "has no dseg.tsv that says which number is which tissue, and numbers differ between tools"
        remedy = f"write {home / 'dseg.tsv'} with the columns index and name, or go without tissue: --tissue-from none"
        problems.append(Problem("error", subject, path, what, remedy))
        return None
    try:
        return Segmentation(path, _codes_from_table(table))
    except UserError as problem:
        problems.append(Problem("error", subject, path, f"cannot be read as tissue ({problem})"))
        return None


def _shows_tissues(path: Path, pipeline: Path) -> bool:
    """Whether a dseg shows the whole brain: it has a plain name, or a table that names the three tissues."""
    if _is_freesurfer(path):
        return False
    if not _OF_A_PART & Name.parsed(path).entities.keys():
        return True
    table = lookup_table(path, pipeline)
    try:
        return table is not None and bool(_codes_from_table(table))
    except UserError:
        return False


def _is_freesurfer(path: Path) -> bool:
    return _desc(path) in _FREESURFER


def _desc(path: Path) -> str | None:
    return Name.parsed(path).entities.get("desc")
