"""Joining scans with the rows of their tables: by id, never by order, and only where an age is certain."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

from ermoe.brain.data.scans import Problem, Scan, Severity, Sex, canonical_id, look_alikes, prefixed
from ermoe.brain.data.tables import AgeError, Table, given, read_age, read_sex
from ermoe.errors import UserError

_Key = tuple[str, str | None]
_Listed = Mapping[str | None, Mapping[str, str]]
"""Rows of a person's sessions file, by session."""
_SITE = ("site", "site_id", "center", "centre")
_SECONDS_A_YEAR = 365.25 * 86400
_LONGEST_ID = 100  # ids become names of files
_NO_AGE = "gives no age"
_KNOWN = {"participant_id", "session_id", "age", "sex", *_SITE}


@dataclass(slots=True)
class People:
    """The rows of a table by (participant, session); session None where the table has no sessions."""

    path: Path
    rows: dict[_Key, dict[str, str]] = field(default_factory=dict)
    columns: tuple[str, ...] = ()
    problems: list[Problem] = field(default_factory=list)

    @classmethod
    def listed_in(cls, table: Table) -> People:
        """Rows that come twice are reported, whether or not they say the same."""
        if not table.has("participant_id"):
            raise UserError(
                f"{table.path} has no column participant_id, by which rows are joined with scans; it has "
                f"{', '.join(table.columns[:9])}: rename the one with the ids"
            )
        people = cls(table.path, columns=table.columns)
        for row in table.rows:
            participant_id = given(row.get("participant_id"))
            if participant_id is None:
                people.problems.append(Problem("error", None, table.path, "has a row without a participant_id"))
                continue
            session = given(row.get("session_id"))
            if len(participant_id) + len(session or "") > _LONGEST_ID:
                raise UserError(f"{table.path} has the participant_id {participant_id[:40]}…, longer than an id may be")
            key = prefixed(participant_id), None if session is None else prefixed(session, "ses-")
            if key in people.rows:
                subject = "_".join(part for part in key if part)
                remedy = "delete all but one, or tell them apart with a column session_id"
                people.problems.append(Problem("error", subject, table.path, "has more than one row for it", remedy))
            people.rows.setdefault(key, row)
        return people

    def row(self, participant_id: str, session_id: str | None) -> dict[str, str] | None:
        """The row of a session, else the row of the person."""
        return self.rows.get((participant_id, session_id)) or self.rows.get((participant_id, None))

    @property
    def participant_ids(self) -> list[str]:
        return list(dict.fromkeys(person for person, _ in self.rows))


def without_ages(people: People, scans: Sequence[Scan], problems: list[Problem]) -> list[Problem]:
    """The problems, with one in place of everybody's missing age where a table has no column of ages at all."""
    if not people.rows or "age" in people.columns or any(scan.age is not None for scan in scans):
        return problems
    what = f"has no column age; it has {', '.join(people.columns[:12])}"
    remedy = "rename the one with the age in years at the scan to age"
    one = Problem("error", None, people.path, what, remedy)
    return [*(problem for problem in problems if problem.what != _NO_AGE), one]


def same_person_twice(ids: Iterable[str], path: Path) -> list[Problem]:
    """An error for every group of ids that may be one person."""
    what = "spells what may be one person in several ways, {}"
    remedy = "give one person one id, or the person could be trained on and tested"
    groups = look_alikes(ids)
    return [Problem("error", group[0], path, what.format(", ".join(map(repr, group))), remedy) for group in groups]


def mismatches(people: People, scanned: Sequence[str]) -> list[Problem]:
    """People with a row and no scan, or with a scan and no row; an id that is nearly there is an error."""
    with_row, with_scan = set(people.participant_ids), set(scanned)
    nearly = {canonical_id(participant_id): participant_id for participant_id in with_scan}
    found = []
    for participant_id in sorted(with_row - with_scan):
        other = nearly.get(canonical_id(participant_id))
        if other is None:
            what = "has a row for it and there is no T1w scan"
            found.append(Problem("warning", participant_id, people.path, what, "it is left out"))
        else:
            what = f"spells {other!r} as {participant_id!r}"
            found.append(Problem("error", other, people.path, what, "use the id of the folder in the table"))
    close = {canonical_id(participant_id) for participant_id in with_row}
    for participant_id in sorted(with_scan - with_row):
        if canonical_id(participant_id) not in close:
            found.append(Problem("warning", participant_id, people.path, "has no row for it", "its age is unknown"))
    return found


def described(
    scan: Scan, row: Mapping[str, str], path: Path, sexes: Mapping[str, Sex], *, age: AgeText
) -> tuple[Scan, list[Problem]]:
    """The scan with what its row says; ``sexes`` are codes that were declared, ``age`` holds for this scan."""
    problems: list[Problem] = []
    site = next((given(row[name]) for name in _SITE if name in row and given(row[name])), None)
    further = {name: text for name, text in row.items() if name not in _KNOWN and given(text) is not None}
    years, sex = _age(age, scan.key, problems), _sex(row, scan.key, path, sexes, problems)
    return replace(scan, age=years, sex=sex, site=site, columns=further), problems


def _age(age: AgeText, key: str, problems: list[Problem]) -> float | None:
    if age.text is None:
        problems.append(Problem("warning", key, age.path, _NO_AGE, "the scan is left out of training"))
        return None
    try:
        return read_age(age.text)
    except AgeError as wrong:
        severity: Severity = "warning" if wrong.is_limit else "error"
        problems.append(Problem(severity, key, age.path, str(wrong), wrong.remedy))
        return None


def _sex(
    row: Mapping[str, str], key: str, path: Path, declared: Mapping[str, Sex], problems: list[Problem]
) -> Sex | None:
    text = given(row.get("sex") or row.get("gender"))
    sex = None if text is None else read_sex(text, declared)
    if text is not None and sex is None:
        what = f"gives the sex {text!r}, whose meaning is not declared"
        remedy = "declare it, for example with --sex-coding 1=M 2=F or with Levels in participants.json"
        problems.append(Problem("error", key, path, what, remedy))
    return sex


@dataclass(frozen=True, slots=True)
class AgeText:
    """An age as a file spells it; None where there is none."""

    text: str | None
    path: Path


def session_ages(
    participant_id: str,
    sessions: Sequence[str | None],
    people: People,
    session_table: Table | None,
    *,
    visits: Sequence[str] = (),
    of_scans: Mapping[str | None, AgeText] | None = None,
    age_is_baseline: bool,
) -> tuple[dict[str | None, AgeText], list[Problem]]:
    """The age at each of ``sessions`` of one person; ``visits`` are further ones, of which no T1 is used, and
    ``of_scans`` ages that scans.tsv gives.

    A person's one age holds for a single visit. For several, each session needs its own; with ``age_is_baseline`` the
    one age is that of the first, and later ones get theirs from ``acq_time`` if the sessions file has it.
    """
    rows = () if session_table is None else session_table.rows
    listed: _Listed = {prefixed(row["session_id"], "ses-"): row for row in rows if given(row.get("session_id"))}
    found = {session: AgeText(None, people.path) for session in sessions} | dict(of_scans or {})
    for session in sessions:
        row = {} if session is None else people.rows.get((participant_id, session), {})
        if text := given(row.get("age")):
            found[session] = AgeText(text, people.path)
        elif session_table is not None and (text := given(listed.get(session, {}).get("age"))):
            found[session] = AgeText(text, session_table.path)
    general = given(people.rows.get((participant_id, None), {}).get("age"))
    everyone = list(dict.fromkeys([*sessions, *visits, *listed]))
    if general is None or all(age.text for age in found.values()):
        return found, []
    if len(everyone) == 1:
        return {session: AgeText(general, people.path) for session in sessions}, []
    named = ", ".join(map(str, everyone))
    remedy = f"write the age at each session into {participant_id}_sessions.tsv"
    if not age_is_baseline:
        what = f"gives one age for {len(everyone)} sessions, {named}"
        return found, [Problem("error", participant_id, people.path, what, f"{remedy}, or use --age-is-baseline")]
    first = _first_visit(everyone, listed)
    if first is None:
        what = f"gives the age at the first of the sessions {named}, and neither times nor numbers say which that is"
        return found, [Problem("error", participant_id, people.path, what, f"{remedy}, or the time as acq_time")]
    missing = [session for session, age in found.items() if age.text is None]
    aged = {session: _aged(general, first, session, listed) for session in missing}
    return found | {session: AgeText(age, people.path) for session, age in aged.items()}, []


def _first_visit(sessions: Sequence[str | None], listed: _Listed) -> str | None:
    """The earliest session by its time, else by its number; None if neither is known of all."""
    times = {session: _time(listed.get(session, {})) for session in sessions}
    if all(times.values()):
        return min(sessions, key=lambda session: times[session] or datetime.max)
    parts = [re.fullmatch(r"ses-(\D*)(\d{1,18})", session or "") for session in sessions]
    if not all(parts) or len({part[1].casefold() for part in parts if part}) > 1:
        return None
    return min((part for part in parts if part), key=lambda part: int(part[2]))[0]


def _aged(baseline: str, first: str, session: str | None, listed: _Listed) -> str | None:
    """The age at a session by the time since the first visit; None unless both times are known."""
    start, now = (_time(listed.get(visit, {})) for visit in (first, session))
    if session == first:
        return baseline
    if start is None or now is None:
        return None
    try:
        return f"{read_age(baseline) + (now - start).total_seconds() / _SECONDS_A_YEAR:.6g}"
    except AgeError:
        return baseline  # whoever reads it says what is wrong with it


def _time(row: Mapping[str, str]) -> datetime | None:
    text = given(row.get("acq_time"))
    try:
        return None if text is None else datetime.fromisoformat(text).replace(tzinfo=None)
    except ValueError:
        return None
