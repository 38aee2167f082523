"""A cohort: the scans of a BIDS root or of a flat table, with everything worth saying about how they were found."""

from __future__ import annotations

import hashlib
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ermoe.brain.data import bids
from ermoe.brain.data.mistaken import dicom_below
from ermoe.brain.data.people import (
    AgeText,
    People,
    described,
    mismatches,
    same_person_twice,
    session_ages,
    without_ages,
)
from ermoe.brain.data.scans import (
    TISSUES,
    CohortOptions,
    ProbabilityMaps,
    Problem,
    Scan,
    Segmentation,
    Sex,
    TissueSource,
)
from ermoe.brain.data.tables import Table, age_unit_problems, declared_sexes, given, read_table
from ermoe.errors import UserError
from ermoe.files import is_hidden, naming_what_cannot_be_read

TABLES = {".tsv", ".csv", ".txt"}
_IMAGES = (".nii", ".nii.gz")
_NOT_A_T1 = {"mask", "dseg", "probseg", "bold", "dwi", "T2w", "FLAIR"}
_PATHS = ("t1", "t1w", "path", "file", "filename", "scan", "image")
_NO_TABLE = "is not there or has no rows"
_OTHER_PATHS = ("mask", "dseg", "aseg", *TISSUES)
_MANY = 100
"""Scans, of which it is no accident if none is there."""


@dataclass(frozen=True, slots=True)
class Cohort:
    """What `open_cohort` and `open_scans` found."""

    scans: tuple[Scan, ...]
    """Sorted by participant and session; scans without an age are among them (``age is None``)."""
    notes: tuple[str, ...] = ()
    """What a person should read: rules applied, files passed over, counts."""
    problems: tuple[Problem, ...] = ()
    """Errors and warnings of the tables; `ermoe.brain.data.quality` finds those of the images."""

    @classmethod
    def of(cls, scans: Iterable[Scan], notes: Iterable[str] = (), problems: Iterable[Problem] = ()) -> Cohort:
        """With the scans in their order."""
        ordered = sorted(scans, key=lambda scan: (scan.participant_id, scan.session_id or ""))
        return cls(tuple(ordered), tuple(notes), tuple(problems))

    @property
    def with_age(self) -> tuple[Scan, ...]:
        """The scans one can train on."""
        return tuple(scan for scan in self.scans if scan.age is not None)


def state_of(scans: Sequence[Scan]) -> str:
    """Which people, ages and images these are, wherever they lie: what two runs must share to be one.

    >>> state_of([Scan("sub-01", None, Path("gone.nii"), age=50.0)])
    '1 scans, 26070856'
    """
    lines = sorted(
        f"{scan.key} {scan.age} {scan.t1.stat().st_size if os.path.exists(scan.t1) else 0}" for scan in scans
    )
    return f"{len(scans)} scans, {hashlib.sha256(chr(10).join(lines).encode()).hexdigest()[:8]}"


def open_cohort(path: str | os.PathLike[str], options: CohortOptions | None = None, **changes: Any) -> Cohort:
    """The scans of a BIDS root or of a flat TSV/CSV; ``changes`` are fields of `CohortOptions`, given one by one."""
    options = (options or CohortOptions()).changed(changes)
    with naming_what_cannot_be_read():
        return _only_where(_cohort_at(Path(path), options), options)


def _only_where(cohort: Cohort, options: CohortOptions) -> Cohort:
    """The scans for which ``--where`` holds; how many are left is a note."""
    if not options.where:
        return cohort
    kept = tuple(scan for scan in cohort.scans if options.holds_for(scan))
    asked = " ".join(options.where)
    if not kept:
        columns = sorted({"sex", "site"} | {name for scan in cohort.scans for name in scan.columns})
        known = {pair.partition("=")[0].strip() for pair in options.where} & set(columns)
        values = []
        for column in sorted(known):
            found = {str(scan.sex if column == "sex" else scan.value(column) or "n/a") for scan in cohort.scans}
            values.append(f"{column} is {', '.join(sorted(found)[:6])}")
        said = "; ".join(values) or f"the columns are {', '.join(columns[:12])}"
        raise UserError(f"--where {asked} holds for no scan: {said}")
    note = f"{len(kept)} of {len(cohort.scans)} scans are used, those with {asked}"
    return replace(cohort, scans=kept, notes=(*cohort.notes, note))


def _cohort_at(path: Path, options: CohortOptions) -> Cohort:
    if path.is_dir():
        return _in_bids(path, options)
    if path.is_file() and path.suffix.casefold() in TABLES:
        return _in_table(path, options)
    if not path.exists():
        raise UserError(f"{path} does not exist: name a BIDS root, or a table with the columns participant_id, t1, age")
    raise UserError(f"{path} is no BIDS root and no table: name a folder with sub-* folders, or a TSV or CSV")


def open_scans(paths: Sequence[str | os.PathLike[str]], options: CohortOptions | None = None, **changes: Any) -> Cohort:
    """Scans to look at or to predict: NIfTI files, folders with NIfTI files, BIDS roots, or tables; no age is needed.

    A BIDS root brings its derivatives with it, and so does a file inside one. A file from elsewhere brings only a mask
    or a segmentation that lies beside it under a BIDS name.
    """
    options = (options or CohortOptions()).changed(changes)
    with naming_what_cannot_be_read():
        found = [_scans_at(Path(path), options) for path in paths]
    if not any(part.scans for part in found):
        for folder in map(Path, paths):
            if folder.is_dir() and (dicom := dicom_below(folder)) is not None:
                raise UserError(f"{folder} {_holds_dicom(dicom)}")
        raise UserError(
            f"no scan found in {', '.join(map(str, paths)) or 'nothing'}: name NIfTI files, folders or BIDS roots"
        )
    return Cohort.of(
        (scan for part in found for scan in part.scans),
        (note for part in found for note in part.notes),
        (replace(problem, severity="warning") for part in found for problem in part.problems),
    )


def _scans_at(path: Path, options: CohortOptions) -> Cohort:
    if path.is_dir() and bids.is_bids_root(path):
        return _in_bids(path, options)
    if path.is_dir():
        scans, notes = _scans_below(path, options)
        return Cohort.of((scan for scan in scans if options.wants(scan.participant_id)), notes)
    if path.suffix.casefold() in TABLES:
        return _in_table(path, options)
    if not path.exists() and not path.name.casefold().endswith(_IMAGES):
        raise UserError(f"{path} does not exist: name NIfTI files, folders, BIDS roots or tables")
    return Cohort.of([_lone_scan(path, options)])


def _scans_below(folder: Path, options: CohortOptions) -> tuple[list[Scan], list[str]]:
    """The scans of a folder, and what was skipped in words.

    Where the same file name occurs in several of its folders, these tell people apart.
    """
    # A link that leads nowhere is one of git-annex, mostly, and worth a sentence.
    named = (path for path in folder.rglob("*") if path.name.casefold().endswith(_IMAGES))
    images = [path for path in named if path.is_file() or path.is_symlink()]
    seen = [path for path in images if not is_hidden(path, below=folder)]
    others = Counter(suffix for path in seen if (suffix := bids.Name.parsed(path).suffix) in _NOT_A_T1)
    files = sorted(path for path in seen if bids.Name.parsed(path).suffix not in _NOT_A_T1)
    scans = [_lone_scan(file, options) for file in files]
    occurs = Counter(scan.key for scan in scans)
    told_apart = [
        scan
        if occurs[scan.key] == 1 or "sub" in bids.Name.parsed(scan.t1).entities
        else replace(scan, participant_id=(scan.t1.relative_to(folder).parent / scan.participant_id).as_posix())
        for scan in scans
    ]
    return told_apart, _skipped(others, sum(path.name.startswith("._") for path in images))


def _lone_scan(path: Path, options: CohortOptions) -> Scan:
    """A file on its own; who it is, is read from a BIDS name, else the file name is the id."""
    entities = bids.Name.parsed(path).entities
    if "sub" not in entities:
        return Scan(bids.stem(path), None, path)
    scan = Scan(f"sub-{entities['sub']}", f"ses-{entities['ses']}" if "ses" in entities else None, path)
    # ROOT/sub-X/[ses-Y/]anat/FILE, also where FILE is a link to somewhere else.
    root = next((parent for parent in Path(os.path.abspath(path)).parents[2:4] if bids.is_bids_root(parent)), None)
    if root is None:
        return bids.with_siblings(scan, options.tissue_from)[0]
    return bids.with_derivatives(scan, root, options.tissue_from)[0]


def _in_bids(root: Path, options: CohortOptions) -> Cohort:
    """The cohort of a BIDS root."""
    choices = [choice for choice in bids.choose_t1s(root, options.t1_rule) if options.wants(choice.participant_id)]
    taken: dict[str, list[bids.Choice]] = defaultdict(list)
    for choice in choices:
        if choice.t1 is not None:
            taken[choice.participant_id].append(choice)
    if not taken:
        raise UserError(_nothing_in(root, options))
    table = root / "participants.tsv"
    people = People.listed_in(read_table(table)) if table.is_file() else People(table)
    problems = [*people.problems, *same_person_twice(taken, root)]
    for name in ("participants", "sessions"):
        problems += age_unit_problems(root / f"{name}.json")
    if people.rows:
        problems += same_person_twice(filter(options.wants, people.participant_ids), table)
        problems += mismatches(people, [choice.participant_id for choice in choices])
    else:
        problems.append(Problem("error", None, table, _NO_TABLE, "ages come from it"))
    sexes = declared_sexes(root / "participants.json") | dict(options.sex_coding)
    scans: list[Scan] = []
    for used in taken.values():
        scans += _scans_of_person(root, used, people, sexes, options, problems)
    problems = without_ages(people, scans, problems)
    if all(scan.age is not None for scan in scans):  # sessions.tsv or scans.tsv have them
        problems = [problem for problem in problems if problem.what != _NO_TABLE]
    return Cohort.of(scans, _notes(choices, options), filter(options.concerns, problems))


def _scans_of_person(
    root: Path,
    choices: Sequence[bids.Choice],
    people: People,
    sexes: Mapping[str, Sex],
    options: CohortOptions,
    problems: list[Problem],
) -> list[Scan]:
    person = choices[0].participant_id
    path = root / person / f"{person}_sessions.tsv"
    visits = sorted(folder.name for folder in (root / person).glob("ses-*") if folder.is_dir())
    ages, unclear = session_ages(
        person,
        [choice.session_id for choice in choices],
        people,
        read_table(path) if path.is_file() else None,
        visits=visits,
        of_scans=dict(filter(None, (_age_of_scan(root, choice) for choice in choices))),
        age_is_baseline=options.age_is_baseline,
    )
    problems += [*unclear, *age_unit_problems(path.with_suffix(".json"))]
    scans = []
    for choice in choices:
        assert choice.t1 is not None
        row = people.row(person, choice.session_id)
        bare = Scan(person, choice.session_id, choice.t1)
        scan, doubts = described(bare, row or {}, people.path, sexes, age=ages[choice.session_id])
        # A missing row or an age that several sessions share has been reported already.
        problems += [doubt for doubt in doubts if row is not None and not (unclear and doubt.severity == "warning")]
        scan, faults = bids.with_derivatives(scan, root, options.tissue_from)
        problems += faults
        scans.append(scan)
    return scans


def _age_of_scan(root: Path, choice: bids.Choice) -> tuple[str | None, AgeText] | None:
    """The age that scans.tsv gives for a T1, with its session; None if it gives none."""
    assert choice.t1 is not None
    folder = root / choice.participant_id / (choice.session_id or ".")
    path = folder / f"{'_'.join(filter(None, (choice.participant_id, choice.session_id)))}_scans.tsv"
    rows = read_table(path).rows if path.is_file() else ()
    name = choice.t1.relative_to(folder).as_posix()
    age = next((given(row.get("age")) for row in rows if row.get("filename") == name), None)
    return None if age is None else (choice.session_id, AgeText(age, path))


def _notes(choices: Sequence[bids.Choice], options: CohortOptions) -> list[str]:
    notes = []
    several = [(choice.t1, choice.passed_over[0]) for choice in choices if choice.passed_over and choice.t1]
    if several:
        used, left = several[0]
        notes.append(
            f"{len(several)} sessions have several T1w scans; the rule is {options.t1_rule!r} (fewest entities, then "
            f"{'highest' if options.t1_rule == 'last' else 'lowest'} run): for example {used.name} and not "
            f"{left.name}; another rule: --t1-rule last, or --t1-rule with a pattern for file names"
        )
    if with_contrast := sum(len(choice.with_contrast) for choice in choices):
        notes.append(f"{with_contrast} T1w scans with contrast agent (ce-) are left out")
    if elsewhere := sum(len(choice.elsewhere) for choice in choices):
        notes.append(f"{elsewhere} T1w scans in another space than their own (space-) are left out")
    if without := [choice.participant_id for choice in choices if choice.t1 is None]:
        notes.append(f"{len(without)} sessions have an anat folder and no usable T1w scan: {', '.join(without[:5])}")
    others = Counter(bids.Name.parsed(path).suffix for choice in choices for path in choice.others)
    if short := others.pop("T1", 0):
        notes.append(f"{short} images end in _T1 and are left out: rename them to _T1w if they are T1-weighted")
    return notes + _skipped(others, sum(choice.num_hidden for choice in choices))


def _skipped(others: Mapping[str, int], num_hidden: int) -> list[str]:
    """How many files were not looked at, in words."""
    notes = []
    if others:
        kinds = ", ".join(f"{suffix} {number}" for suffix, number in sorted(others.items()))
        notes.append(f"{sum(others.values())} other images are skipped: {kinds}")
    if num_hidden:
        notes.append(f"{num_hidden} files that macOS leaves (._…) are ignored")
    return notes


def _nothing_in(root: Path, options: CohortOptions) -> str:
    if options.participants:
        return f"{root} has no T1w scan of {', '.join(options.participants)}: check the labels"
    if short := next(iter([*root.glob("sub-*/anat/*_T1.nii*"), *root.glob("sub-*/ses-*/anat/*_T1.nii*")]), None):
        return f"{root} has no *_T1w.nii[.gz] but {short.name}: rename _T1 to _T1w, as BIDS calls T1-weighted scans"
    if (dicom := dicom_below(root)) is not None:
        return f"{root} {_holds_dicom(dicom)}"
    pattern = "" if options.t1_rule in ("first", "last") else f" that matches {options.t1_rule!r}"
    return f"{root} has no sub-*/[ses-*/]anat/*_T1w.nii[.gz]{pattern}: name a BIDS root or a table"


def _holds_dicom(path: Path) -> str:
    return (
        f"holds DICOM files, {path.name} for one: convert them with `dcm2niix -z y {path.parent}` and name the .nii.gz"
    )


def _in_table(path: Path, options: CohortOptions) -> Cohort:
    """The cohort of a TSV or CSV with one row a scan and the columns participant_id, t1 and, to train, age.

    Further columns it knows: session_id, sex, site, mask, dseg, aseg, wm, gm, csf. Paths count from the table's folder.
    """
    table = read_table(path)
    column = next((name for name in _PATHS if table.has(name)), None)
    if column is None or not table.has("participant_id"):
        raise UserError(
            f"{path} needs the columns participant_id and t1 (and age, to train); it has {', '.join(table.columns[:9])}"
        )
    _stop_if_none_exists(table, column)
    people = People.listed_in(table)
    problems = [*people.problems, *same_person_twice(filter(options.wants, people.participant_ids), path)]
    problems += age_unit_problems(path.with_suffix(".json"))
    sexes = declared_sexes(path.with_suffix(".json")) | dict(options.sex_coding)
    columns = [column, *filter(table.has, _OTHER_PATHS)]
    scans: list[Scan] = []
    for (participant_id, session_id), row in people.rows.items():
        if not options.wants(participant_id):
            continue
        named = dict.fromkeys(_OTHER_PATHS) | {name: _path(path, row, name) for name in columns}
        bare = Scan(participant_id, session_id, named[column] or path, mask=named["mask"], labels=named["dseg"])
        if named[column] is None:
            problems.append(Problem("error", bare.key, path, "names no T1 scan", "delete the row or fill the cell"))
            continue
        scan, doubts = described(bare, row, path, sexes, age=AgeText(given(row.get("age")), path))
        further = {name: text for name, text in scan.columns.items() if name not in named}
        tissue = _tissue_in_row(named, path.parent, scan.key, options, problems)
        scans.append(replace(scan, columns=further, tissue=tissue))
        problems += doubts
    if not scans:
        raise UserError(f"{path} lists no scan" + (" of the people asked for" if options.participants else ""))
    problems = without_ages(people, scans, problems) + _one_scan_twice(scans, path)
    return Cohort.of(scans, problems=filter(options.concerns, problems))


def _stop_if_none_exists(table: Table, column: str) -> None:
    """A long table of which no scan is there was written for another folder: one sentence instead of one a row."""
    named = [text for row in table.rows if (text := given(row[column])) is not None]
    found = (os.path.exists(os.path.join(table.path.parent, os.path.expanduser(text))) for text in named)
    if len(named) > _MANY and not any(found):
        raise UserError(
            f"{table.path} names {len(named):,} scans, and none of them exists, {named[0]} for one: paths count from "
            "the folder of the table; move it there, or write whole paths"
        )


def _path(table: Path, row: dict[str, str], column: str) -> Path | None:
    text = given(row.get(column))
    return None if text is None else table.parent / os.path.expanduser(text)


def _tissue_in_row(
    named: dict[str, Path | None], folder: Path, subject: str, options: CohortOptions, problems: list[Problem]
) -> TissueSource | None:
    if options.tissue_from == "none":
        return None
    if options.tissue_from == "aseg":
        return None if named["aseg"] is None else Segmentation(named["aseg"], bids.aseg_codes(), same_grid=False)
    maps = {tissue: path for tissue in TISSUES if (path := named[tissue]) is not None}
    if len(maps) == len(TISSUES) and options.tissue_from != "dseg":
        return ProbabilityMaps(maps)
    dseg = named["dseg"]
    if dseg is None or options.tissue_from == "probseg":
        return None
    beside = (place / "dseg.tsv" for place in (dseg.parent, folder))
    table = (
        bids.lookup_table(dseg, dseg.parent)
        or bids.lookup_table(folder / dseg.name, folder)
        or next((path for path in beside if path.is_file()), None)
    )
    return bids.segmentation(dseg, table, dseg.parent, subject, problems)


def _one_scan_twice(scans: list[Scan], path: Path) -> list[Problem]:
    """Two people who share a file are one person in two rows."""
    owners: dict[str, set[str]] = defaultdict(set)
    for scan in scans:
        owners[os.path.realpath(scan.t1)].add(scan.participant_id)
    return [
        Problem("error", min(people), path, f"gives {t1} to several people, {', '.join(sorted(people))}")
        for t1, people in owners.items()
        if len(people) > 1
    ]
