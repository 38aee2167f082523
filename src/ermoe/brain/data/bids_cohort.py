"""The cohort of a BIDS root."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from ermoe.brain.data.bids import Choice, choose_t1s, find_derivatives
from ermoe.brain.data.people import People, describe, mismatches, same_person_twice, session_ages
from ermoe.brain.data.scans import Problem, Scan
from ermoe.brain.data.settings import CohortOptions
from ermoe.brain.data.tables import SexReader, Table, age_unit_problems, declared_sexes, read_table
from ermoe.errors import UserError


def bids_cohort(root: Path, options: CohortOptions) -> tuple[list[Scan], list[str], list[Problem]]:
    """(scans, notes, problems) of a BIDS root."""
    choices = [choice for choice in choose_t1s(root, options.t1_rule) if options.wants(choice.participant_id)]
    taken = [choice for choice in choices if choice.t1 is not None]
    if not taken:
        raise UserError(_nothing_in(root, options))
    table = root / "participants.tsv"
    people = People.listed_in(read_table(table)) if table.is_file() else People(table)
    problems = [*people.problems, *_units(root), *same_person_twice([c.participant_id for c in taken], root)]
    if people.rows:
        problems += same_person_twice(filter(options.wants, people.participant_ids), table)
        problems += mismatches(people, [choice.participant_id for choice in choices])
    else:
        problems.append(Problem("error", None, table, "is not there or has no rows", "ages come from it"))
    reader = SexReader(declared_sexes(root / "participants.json") | dict(options.sex_coding))
    scans = []
    for participant_id, used in _by_person(taken).items():
        scans += _scans_of(root, participant_id, used, people, reader, options, problems)
    return scans, _notes(choices, options), list(filter(options.concerns, problems))


def _scans_of(
    root: Path,
    participant_id: str,
    choices: list[Choice],
    people: People,
    reader: SexReader,
    options: CohortOptions,
    problems: list[Problem],
) -> list[Scan]:
    session_table = _session_table(root, participant_id)
    sessions = [choice.session_id for choice in choices]
    visits = sorted(path.name for path in (root / participant_id).glob("ses-*") if path.is_dir())
    ages, unclear = session_ages(
        participant_id, sessions, people, session_table, visits=visits, age_is_baseline=options.age_is_baseline
    )
    problems += [*unclear, *age_unit_problems(_session_path(root, participant_id).with_suffix(".json"))]
    scans = []
    for choice in choices:
        assert choice.t1 is not None
        key = Scan(participant_id, choice.session_id, choice.t1).key
        row = people.row(participant_id, choice.session_id)
        said, doubts = describe(row or {}, key, people.path, reader, age=ages[choice.session_id])
        # A missing row or an age that several sessions share has been reported already.
        problems += [doubt for doubt in doubts if row is not None and not (unclear and doubt.severity == "warning")]
        found = find_derivatives(root, participant_id, choice.session_id, choice.t1, tissue_from=options.tissue_from)
        problems += found.problems
        scans.append(
            Scan(
                participant_id,
                choice.session_id,
                choice.t1,
                age=said.age,
                sex=said.sex,
                site=said.site,
                columns=said.columns,
                mask=found.mask,
                labels=found.labels,
                tissue=found.tissue,
            )
        )
    return scans


def _session_table(root: Path, participant_id: str) -> Table | None:
    path = _session_path(root, participant_id)
    return read_table(path) if path.is_file() else None


def _session_path(root: Path, participant_id: str) -> Path:
    return root / participant_id / f"{participant_id}_sessions.tsv"


def _by_person(choices: list[Choice]) -> dict[str, list[Choice]]:
    people: dict[str, list[Choice]] = defaultdict(list)
    for choice in choices:
        people[choice.participant_id].append(choice)
    return people


def _units(root: Path) -> list[Problem]:
    return [problem for name in ("participants", "sessions") for problem in age_unit_problems(root / f"{name}.json")]


def _notes(choices: list[Choice], options: CohortOptions) -> list[str]:
    notes = []
    several = [choice for choice in choices if choice.passed_over and choice.t1]
    if several:
        example = several[0]
        assert example.t1 is not None
        notes.append(
            f"{len(several)} sessions have several T1w scans; the rule is {options.t1_rule!r} (fewest entities, then "
            f"{'highest' if options.t1_rule == 'last' else 'lowest'} run): for example {example.t1.name} and not "
            f"{example.passed_over[0].name}; another rule: --t1-rule last, or --t1-rule with a pattern for file names"
        )
    with_contrast = sum(len(choice.with_contrast) for choice in choices)
    if with_contrast:
        notes.append(f"{with_contrast} T1w scans with contrast agent (ce-) are left out")
    elsewhere = sum(len(choice.elsewhere) for choice in choices)
    if elsewhere:
        notes.append(f"{elsewhere} T1w scans in another space than their own (space-) are left out")
    without = [choice.participant_id for choice in choices if choice.t1 is None]
    if without:
        notes.append(f"{len(without)} sessions have an anat folder and no usable T1w scan: {', '.join(without[:5])}")
    return notes


def _nothing_in(root: Path, options: CohortOptions) -> str:
    if options.participants:
        return f"{root} has no T1w scan of {', '.join(options.participants)}: check the labels"
    pattern = "" if options.t1_rule in ("first", "last") else f" that matches {options.t1_rule!r}"
    return f"{root} has no sub-*/[ses-*/]anat/*_T1w.nii[.gz]{pattern}: name a BIDS root or a table"
