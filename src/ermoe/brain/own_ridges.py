"""A ridge for every scanner that has people enough, believed as far as its own people say.

Scanners, sites and batches differ in what a measure means and in how old the people are whom they scan. A ridge over
all of them reads the scanner along with the age; inside one scanner it may then be further off than one fitted there,
which has fewer people to learn from. So a person of a known group gets

    age = ridge + worth · (own ridge − ridge),

and how much the group's own ridge is worth is asked of its training people, each judged by ridges that were fitted
without them, as it is asked of a network. People of an unknown scanner get the ridge over all, unchanged.

Letters: N scans, F measures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ermoe.brain.data.scans import Scan
from ermoe.brain.measures import Double
from ermoe.brain.ridge import Ridge, left_out, worth_of
from ermoe.errors import UserError

_OF_SCANNERS = frozenset(
    (
        "batch",
        "device",
        "magneticfieldstrength",
        "manufacturer",
        "manufacturersmodelname",
        "protocol",
        "scanner",
        "site",
    )
)
"""Columns that say where a scan comes from, without underscores. A diagnosis, say, is not to be corrected for."""
_FEWEST_PEOPLE = 8
"""Of a group, below which its own ridge would be mostly chance."""


@dataclass(frozen=True, slots=True)
class _People:
    """What ridges learn from: measures, ages and who it is."""

    measure_NF: Double
    age_N: Double
    people: list[str]

    @classmethod
    def of(cls, measure_NF: Double, scans: Sequence[Scan]) -> _People:
        ages = [np.nan if scan.age is None else scan.age for scan in scans]
        return cls(measure_NF, np.array(ages), [scan.participant_id for scan in scans])

    def among(self, rows_N: NDArray[np.bool_]) -> _People:
        people = [who for who, is_one in zip(self.people, rows_N, strict=True) if is_one]
        return _People(self.measure_NF[rows_N], self.age_N[rows_N], people)

    def left_out(self, strength: float) -> Double:
        return left_out(self.measure_NF, self.age_N, self.people, strength)


@dataclass(frozen=True, slots=True)
class OwnRidge:
    """The ridge of one group, and the share of it that is believed, 0 to 1."""

    ridge: Ridge
    worth: float


@dataclass(frozen=True, slots=True)
class OwnRidges:
    """Those of a fold.

    Args:
        columns: that name the group of a scan together.
        groups: whose people the fold learnt from.
        own: of the groups whose own ridge is worth something.
    """

    columns: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    own: Mapping[str, OwnRidge] = field(default_factory=dict)

    @classmethod
    def fit(cls, ridge: Ridge, measure_NF: Double, scans: Sequence[Scan], columns: tuple[str, ...]) -> OwnRidges:
        """From the scans that ``ridge`` was fitted on; none where all are of one group."""
        people = _People.of(measure_NF, scans)
        group_N = np.array([group_of(scan, columns) or "" for scan in scans])
        groups = tuple(sorted({*group_N.tolist()} - {""}))
        if len({*group_N.tolist()}) < 2:
            return cls(columns, groups)
        error_N = people.age_N - people.left_out(ridge.strength)
        found = {}
        for group in groups:
            rows_N = group_N == group
            own = people.among(rows_N)
            if len(set(own.people)) >= _FEWEST_PEOPLE:
                fitted = Ridge.fit(own.measure_NF, own.age_N, own.people)
                added_N = own.left_out(fitted.strength) - own.age_N + error_N[rows_N]
                found[group] = OwnRidge(fitted, worth_of(added_N, error_N[rows_N]))
        return cls(columns, groups, {group: one for group, one in found.items() if one.worth})

    def left_out(self, ridge: Ridge, measure_NF: Double, scans: Sequence[Scan]) -> Double:
        """Ages of the scans that all were fitted on, by ridges that were fitted without them, (N,)."""
        people = _People.of(measure_NF, scans)
        said_N = people.left_out(ridge.strength)
        for group, one in self.own.items():
            rows_N = np.array([group_of(scan, self.columns) == group for scan in scans])
            own_N = people.among(rows_N).left_out(one.ridge.strength)
            said_N[rows_N] += one.worth * (own_N - said_N[rows_N])
        return said_N

    def added(self, ridge: Ridge, measure_NF: Double, scans: Sequence[Scan]) -> Double:
        """Years that own ridges add to the ridge over all, (N,); 0 for people of other groups."""
        found_N = np.zeros(len(scans))
        for group, one in self.own.items():
            rows = np.array([group_of(scan, self.columns) == group for scan in scans], dtype=bool)
            found_N[rows] = one.worth * (one.ridge.ages(measure_NF[rows]) - ridge.ages(measure_NF[rows]))
        return found_N

    def knows(self, scan: Scan) -> bool:
        """Whether people of the scan's group were learnt from."""
        return group_of(scan, self.columns) in self.groups


def group_of(scan: Scan, columns: Sequence[str]) -> str | None:
    """The values of a scan in some columns, as one name; None where all are missing.

    >>> from pathlib import Path
    >>> group_of(Scan("sub-1", None, Path(), site="North", columns={"batch": "2"}), ("site", "batch"))
    'North, 2'
    """
    values = [scan.value(column) for column in columns]
    return ", ".join(value or "n/a" for value in values) if any(values) else None


def scanner_columns(scans: Sequence[Scan], asked: str) -> tuple[str, ...]:
    """The columns that name a scan's group: "auto", those that say where it comes from; "none"; or the one asked for.

    >>> from pathlib import Path
    >>> scans = [Scan("sub-1", None, Path(), columns={"batch": "A", "group": "control"})]
    >>> scanner_columns(scans, "auto"), scanner_columns(scans, "none"), scanner_columns(scans, "group")
    (('batch',), (), ('group',))
    """
    known = [
        *(["site"] if any(scan.site for scan in scans) else []),
        *dict.fromkeys(c for s in scans for c in s.columns),
    ]
    if asked == "none":
        return ()
    if asked == "auto":
        return tuple(column for column in known if column.casefold().replace("_", "") in _OF_SCANNERS)
    if asked not in known:
        raise UserError(f"--own-ridges {asked}: there is no such column; use auto, none, or one of {', '.join(known)}")
    return (asked,)
