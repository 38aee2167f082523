"""The cohort of a flat table: one row a scan, with a column of paths."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from ermoe.brain.data.bids import aseg_codes, known_codes, lookup_table
from ermoe.brain.data.people import AgeText, People, describe, same_person_twice
from ermoe.brain.data.scans import TISSUES, ProbabilityMaps, Problem, Scan, Segmentation, TissueSource
from ermoe.brain.data.settings import CohortOptions
from ermoe.brain.data.tables import SexReader, age_unit_problems, declared_sexes, given, read_table
from ermoe.errors import UserError

_PATHS = ("t1", "t1w", "path", "file", "filename", "scan", "image")
_OTHER_PATHS = ("mask", "dseg", "aseg", *TISSUES)


def flat_cohort(path: Path, options: CohortOptions) -> tuple[list[Scan], list[str], list[Problem]]:
    """(scans, notes, problems) of a TSV or CSV with the columns participant_id, t1 and, to train, age.

    Further columns it knows: session_id, sex, site, mask, dseg, aseg, wm, gm, csf. Paths count from the table's folder.
    """
    table = read_table(path)
    column = next((name for name in _PATHS if table.has(name)), None)
    if column is None or not table.has("participant_id"):
        raise UserError(f"{path} needs the columns participant_id and t1 (and age, to train); it has {table.columns}")
    people = People.listed_in(table)
    problems = [*people.problems, *same_person_twice(filter(options.wants, people.participant_ids), path)]
    problems += age_unit_problems(path.with_suffix(".json"))
    reader = SexReader(declared_sexes(path.with_suffix(".json")) | dict(options.sex_coding))
    scans: list[Scan] = []
    for (participant_id, session_id), row in people.rows.items():
        if not options.wants(participant_id):
            continue
        key = "_".join(part for part in (participant_id, session_id) if part)
        t1 = _path(path, row, column)
        if t1 is None:
            problems.append(Problem("error", key, path, "names no T1 scan", "delete the row or fill the cell"))
            continue
        said, doubts = describe(row, key, path, reader, age=AgeText(given(row.get("age")), path))
        further = {name: text for name, text in said.columns.items() if name not in {column, *_OTHER_PATHS}}
        scans.append(
            Scan(
                participant_id,
                session_id,
                t1,
                age=said.age,
                sex=said.sex,
                site=said.site,
                columns=further,
                mask=_path(path, row, "mask"),
                labels=_path(path, row, "dseg"),
                tissue=_tissue(path, row, key, options, problems),
            )
        )
        problems += doubts
    if not scans:
        raise UserError(f"{path} lists no scan" + (" of the people asked for" if options.participants else ""))
    problems += _one_scan_twice(scans, path)
    return scans, [], list(filter(options.concerns, problems))


def _path(table: Path, row: dict[str, str], column: str) -> Path | None:
    text = given(row.get(column))
    return None if text is None else table.parent / Path(text).expanduser()


def _tissue(
    table: Path, row: dict[str, str], key: str, options: CohortOptions, problems: list[Problem]
) -> TissueSource | None:
    if options.tissue_from == "none":
        return None
    aseg, dseg = _path(table, row, "aseg"), _path(table, row, "dseg")
    if options.tissue_from == "aseg":
        return None if aseg is None else Segmentation(aseg, aseg_codes(), same_grid=False)
    maps = {tissue: path for tissue in TISSUES if (path := _path(table, row, tissue)) is not None}
    if len(maps) == len(TISSUES) and options.tissue_from != "dseg":
        return ProbabilityMaps(maps)
    if dseg is None or options.tissue_from == "probseg":
        return None
    beside = (folder / "dseg.tsv" for folder in (dseg.parent, table.parent))
    explained = (
        lookup_table(dseg, dseg.parent)
        or lookup_table(table.parent / dseg.name, table.parent)
        or next((path for path in beside if path.is_file()), None)
    )
    if explained is None:
        what = "has no dseg.tsv beside it that says which number is which tissue, and numbers differ between tools"
        problems.append(Problem("error", key, dseg, what, "write one, or go without tissue: --tissue-from none"))
        return None
    try:
        return Segmentation(dseg, known_codes(explained))
    except UserError as problem:
        problems.append(Problem("error", key, dseg, f"cannot be read as tissue ({problem})"))
        return None


def _one_scan_twice(scans: list[Scan], path: Path) -> list[Problem]:
    """Two people who share a file are one person in two rows."""
    owners: dict[Path, set[str]] = defaultdict(set)
    for scan in scans:
        owners[scan.t1.resolve()].add(scan.participant_id)
    return [
        Problem("error", min(people), path, f"gives {t1} to several people, {', '.join(sorted(people))}")
        for t1, people in owners.items()
        if len(people) > 1
    ]
