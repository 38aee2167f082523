"""Joining scans with the rows of their tables: by id, never by order, and only where an age is certain."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from ermoe.data.brain.demographics import AgeError, SexError, SexReader, read_age
from ermoe.data.brain.identity import canonical_id, look_alikes, prefixed
from ermoe.data.brain.problems import Problem, Severity
from ermoe.data.brain.scans import Sex
from ermoe.data.brain.table import Table, given
from ermoe.errors import UserError

Key = tuple[str, str | None]
_SITE = ("site", "site_id", "center", "centre")
_SECONDS_A_YEAR = 365.25 * 86400
_KNOWN = {"participant_id", "session_id", "age", "sex", *_SITE}


@dataclass(slots=True)
class People:
    """The rows of a table by (participant, session); session None where the table has no sessions."""

    path: Path
    rows: dict[Key, dict[str, str]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    @classmethod
    def of(cls, table: Table) -> People:
        """Rows that come twice are reported, whether or not they say the same."""
        if not table.has("participant_id"):
            raise UserError(f"{table.path} has no column participant_id: rows are joined with scans by it")
        people = cls(table.path)
        for row in table.rows:
            participant_id = given(row.get("participant_id"))
            if participant_id is None:
                people.problems.append(Problem("error", None, table.path, "has a row without a participant_id"))
                continue
            session = given(row.get("session_id"))
            key = prefixed(participant_id), None if session is None else prefixed(session, "ses-")
            if key in people.rows:
                people.problems.append(
                    Problem(
                        "error",
                        "_".join(part for part in key if part),
                        table.path,
                        "has more than one row for it",
                        "delete all but one, or tell them apart with a column session_id",
                    )
                )
            people.rows.setdefault(key, row)
        return people

    def row(self, participant_id: str, session_id: str | None) -> dict[str, str] | None:
        """The row of a session, else the row of the person."""
        return self.rows.get((participant_id, session_id)) or self.rows.get((participant_id, None))

    def has_sessions(self, participant_id: str) -> bool:
        return any(person == participant_id and session is not None for person, session in self.rows)

    @property
    def participant_ids(self) -> list[str]:
        return list(dict.fromkeys(person for person, _ in self.rows))


def same_person_twice(ids: Iterable[str], path: Path) -> list[Problem]:
    """An error for every group of ids that may be one person."""
    return [
        Problem(
            "error",
            group[0],
            path,
            f"spells what may be one person in several ways, {', '.join(map(repr, group))}",
            "give one person one id, or the person could be trained on and tested",
        )
        for group in look_alikes(ids)
    ]


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


@dataclass(frozen=True, slots=True)
class Described:
    """What a table says of one scan."""

    age: float | None
    sex: Sex | None
    site: str | None
    columns: Mapping[str, str]


def describe(
    row: Mapping[str, str], key: str, path: Path, reader: SexReader, *, age: str | None
) -> tuple[Described, list[Problem]]:
    """Reads a row; ``age`` is the text of the age that holds for this scan."""
    problems: list[Problem] = []
    site = next((given(row[name]) for name in _SITE if name in row and given(row[name])), None)
    further = {name: text for name, text in row.items() if name not in _KNOWN and given(text) is not None}
    return Described(_age(age, key, path, problems), _sex(row, key, path, reader, problems), site, further), problems


def _age(text: str | None, key: str, path: Path, problems: list[Problem]) -> float | None:
    if text is None:
        problems.append(Problem("warning", key, path, "gives no age", "the scan is left out of training"))
        return None
    try:
        return read_age(text)
    except AgeError as wrong:
        severity: Severity = "warning" if wrong.is_limit else "error"
        problems.append(Problem(severity, key, path, str(wrong), wrong.remedy))
        return None


def _sex(row: Mapping[str, str], key: str, path: Path, reader: SexReader, problems: list[Problem]) -> Sex | None:
    text = given(row.get("sex") or row.get("gender"))
    if text is None:
        return None
    try:
        return reader(text)
    except SexError as wrong:
        remedy = "declare it, for example with --sex-coding 1=M 2=F or with Levels in participants.json"
        problems.append(Problem("error", key, path, str(wrong), remedy))
        return None


def session_ages(
    participant_id: str,
    sessions: Sequence[str | None],
    people: People,
    session_table: Table | None,
    *,
    age_is_baseline: bool,
) -> tuple[dict[str | None, str | None], list[Problem]]:
    """The text of the age at each session of one person.

    A person's one age holds for a single session. For several, each session needs its own; with ``age_is_baseline``
    the one age is that of the first, and later ones get theirs from ``acq_time`` if the sessions file has it.
    """
    own = {session: given((people.rows.get((participant_id, session)) or {}).get("age")) for session in sessions}
    listed = _sessions_listed(session_table)
    for session in sessions:
        own[session] = own[session] or given(listed.get(session, {}).get("age"))
    general = given((people.rows.get((participant_id, None)) or {}).get("age"))
    lacking = [session for session in sessions if own[session] is None]
    if general is None or not lacking:
        return own, []
    if len(sessions) == 1:
        return {sessions[0]: general}, []
    if not age_is_baseline:
        what = f"gives one age for {len(sessions)} sessions, {', '.join(map(str, sessions))}"
        remedy = f"write the age at each session into {participant_id}_sessions.tsv, or use --age-is-baseline"
        return own, [Problem("error", participant_id, people.path, what, remedy)]
    own[sessions[0]] = own[sessions[0]] or general
    return _aged_since_baseline(sessions, own, listed), []


def _aged_since_baseline(
    sessions: Sequence[str | None],
    own: dict[str | None, str | None],
    listed: Mapping[str | None, Mapping[str, str]],
) -> dict[str | None, str | None]:
    """Ages of later sessions by the time since the first, where both are known."""
    try:
        baseline = read_age(own[sessions[0]] or "")
    except AgeError:
        return own
    start = _time(listed.get(sessions[0], {}))
    for session in sessions[1:]:
        now = _time(listed.get(session, {}))
        if own[session] is None and start and now:
            own[session] = f"{baseline + (now - start).total_seconds() / _SECONDS_A_YEAR:.6g}"
    return own


def _sessions_listed(table: Table | None) -> dict[str | None, dict[str, str]]:
    if table is None:
        return {}
    return {prefixed(row["session_id"], "ses-"): row for row in table.rows if given(row.get("session_id"))}


def _time(row: Mapping[str, str]) -> datetime | None:
    text = given(row.get("acq_time"))
    try:
        return None if text is None else datetime.fromisoformat(text).replace(tzinfo=None)
    except ValueError:
        return None
