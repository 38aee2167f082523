"""Who is trained on, who is validated on and who is tested: by person, never by scan."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from ermoe.brain.data.scans import Scan, canonical_id, look_alikes
from ermoe.brain.data.tables import given, read_table, write_tsv
from ermoe.errors import UserError
from ermoe.files import is_plain_name

Part = Literal["train", "validation", "test"]
_Kind = Literal["holdout", "k-fold", "leave-site-out"]
_OWN: dict[bool, Part] = {True: "test", False: "train"}
"""The part of a person in the fold of their own group, and in the others."""


@dataclass(frozen=True, slots=True)
class Splits:
    """For every fold and every person, one part. As a TSV: one row a person, one column a fold."""

    kind: _Kind
    parts: Mapping[str, tuple[Part, ...]]
    """participant_id → part in fold 0, 1, …"""
    fold_names: tuple[str, ...]
    """"fold-0", …; for leave-site-out "site-" and the site that is tested."""

    def __post_init__(self) -> None:
        if odd := [name for name in self.fold_names if not is_plain_name(name)]:
            raise UserError(f"the fold {odd[0][:40]!r} cannot be the name of a folder: use letters, digits, - and _")

    @property
    def num_folds(self) -> int:
        return len(self.fold_names)

    def part_of(self, participant_id: str, fold: int) -> Part:
        """The part of a person in a fold."""
        if participant_id not in self.parts:
            raise UserError(f"{participant_id} is in no part of the split: make the split again with all people")
        return self.parts[participant_id][fold]

    def select(self, scans: Sequence[Scan], fold: int, part: Part) -> list[Scan]:
        """The scans of one part of one fold, in their order."""
        return [scan for scan in scans if self.part_of(scan.participant_id, fold) == part]

    def check(self, scans: Sequence[Scan]) -> None:
        """Raises `UserError`, with the ids, if a person of ``scans`` is in two parts of a fold or in none.

        Spellings that differ in case, padding or spaces are taken for one person, wherever they occur.
        """
        missing = sorted({scan.participant_id for scan in scans} - set(self.parts))
        close = {canonical_id(participant_id): participant_id for participant_id in self.parts}
        for participant_id in missing:
            if canonical_id(participant_id) in close:
                twin = close[canonical_id(participant_id)]
                raise UserError(f"the split knows {twin!r} and the data {participant_id!r}: give one person one id")
        if missing:
            raise UserError(f"no part of the split has {_listed(missing)}: make the split again with all people")
        _refuse_look_alikes([*self.parts, *(scan.participant_id for scan in scans)], "person", "id")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the TSV."""
        rows = ((person, *parts) for person, parts in sorted(self.parts.items()))
        write_tsv(path, ("participant_id", *self.fold_names), rows)

    @classmethod
    def load(cls, path: str | os.PathLike[str], scans: Sequence[Scan]) -> Splits:
        """Reads a TSV and checks it against the scans. Rows of sessions are welcome if they agree."""
        table = read_table(Path(path))
        folds = tuple(name for name in table.columns if name not in ("participant_id", "session_id"))
        if not table.has("participant_id") or not folds:
            raise UserError(f"{path} needs a column participant_id and one column a fold")
        rows: dict[str, set[tuple[Part, ...]]] = defaultdict(set)
        for row in table.rows:
            rows[given(row["participant_id"]) or ""].add(tuple(_part(path, row, fold) for fold in folds))
        split = sorted(person for person, parts in rows.items() if len(parts) > 1)
        if split:
            raise UserError(f"{path} puts {_listed(split)} in two parts of a fold: sessions of a person stay together")
        splits = cls(_kind(folds), {person: parts.pop() for person, parts in rows.items()}, folds)
        splits.check(scans)
        return splits


def holdout(scans: Sequence[Scan], seed: int) -> Splits:
    """Eight tenths of the people to train, one to validate, one to test.

    >>> from pathlib import Path
    >>> people = [Scan(f"sub-{i:02}", None, Path(f"{i}.nii"), age=40.0 + i, sex="F") for i in range(20)]
    >>> [len(holdout(people, seed=0).select(people, 0, part)) for part in ("train", "validation", "test")]
    [16, 2, 2]
    """
    tenth = _groups(scans, 10, seed)
    parts: dict[int, Part] = {0: "test", 1: "validation"}
    return Splits("holdout", {person: (parts.get(group, "train"),) for person, group in tenth.items()}, ("fold-0",))


def k_folds(scans: Sequence[Scan], k: int = 5, seed: int = 0) -> Splits:
    """Everybody is tested once, and trained on in all other folds.

    >>> from pathlib import Path
    >>> people = [Scan(f"sub-{i:02}", None, Path(f"{i}.nii"), age=40.0 + i, sex="F") for i in range(10)]
    >>> folds = k_folds(people, k=5)
    >>> [len(folds.select(people, fold, "test")) for fold in range(5)]
    [2, 2, 2, 2, 2]
    """
    if k < 2:
        raise UserError(f"k={k} folds: need at least 2 folds, one of them to train")
    group_of = _groups(scans, k, seed)
    parts = {person: tuple(_OWN[group == fold] for fold in range(k)) for person, group in group_of.items()}
    return Splits("k-fold", parts, tuple(f"fold-{fold}" for fold in range(k)))


def leave_site_out(scans: Sequence[Scan]) -> Splits:
    """One fold a site, which is tested while the others train."""
    without = sorted({scan.participant_id for scan in scans if scan.site is None})
    if without:
        raise UserError(f"leaving sites out needs the site of everybody, which is missing for {_listed(without)}")
    at: dict[str, set[str]] = defaultdict(set)
    for scan in scans:
        at[scan.participant_id].add(str(scan.site))
    sites = sorted(set().union(*at.values()))
    _refuse_look_alikes(sites, "site", "name")
    if len(sites) < 2:
        raise UserError(f"leaving sites out needs two sites or more, and there is only {', '.join(sites)}: use k folds")
    roaming = sorted(person for person, places in at.items() if len(places) > 1)
    if roaming:
        raise UserError(
            f"leaving sites out needs one site a person, and there are several for {_listed(roaming)}: use k folds"
        )
    parts = {person: tuple(_OWN[site in places] for site in sites) for person, places in at.items()}
    return Splits("leave-site-out", parts, tuple(f"site-{site}".casefold() for site in sites))


def _groups(scans: Sequence[Scan], num_groups: int, seed: int) -> dict[str, int]:
    """A group for every person, so that all groups are alike in sex and age.

    People are lined up by sex, then age. Of each ``num_groups`` neighbours, every group gets one, by lot.
    """
    _refuse_look_alikes([scan.participant_id for scan in scans], "person", "id")
    ages: dict[str, list[float]] = defaultdict(list)
    sexes: dict[str, str] = {}
    for scan in scans:
        ages[scan.participant_id].append(float("inf") if scan.age is None else scan.age)
        sexes[scan.participant_id] = str(scan.sex)
    if len(ages) < num_groups:
        raise UserError(f"{len(ages)} people cannot be shared out to {num_groups} groups: use fewer folds")
    line = sorted(ages, key=lambda person: (sexes[person], min(ages[person]), person))
    rng = np.random.default_rng(seed)
    group_of: dict[str, int] = {}
    for start in range(0, len(line), num_groups):
        for person, group in zip(line[start : start + num_groups], rng.permutation(num_groups), strict=False):
            group_of[person] = int(group)
    return group_of


def _refuse_look_alikes(spellings: Sequence[str], thing: str, name: str) -> None:
    if twice := look_alikes(spellings):
        groups = "; ".join(" = ".join(map(repr, group)) for group in twice[:10])
        raise UserError(f"what may be one {thing} has several {name}s ({groups}): give one {thing} one {name}")


def _part(path: object, row: Mapping[str, str], fold: str) -> Part:
    text = row[fold].casefold()
    if text not in get_args(Part):
        raise UserError(f"{path} says {row[fold]!r} for {row['participant_id']}: use train, validation or test")
    return text  # type: ignore[return-value]


def _kind(folds: Sequence[str]) -> _Kind:
    if all(name.startswith("site-") for name in folds):
        return "leave-site-out"
    return "holdout" if len(folds) == 1 else "k-fold"


def _listed(people: Sequence[str]) -> str:
    rest = f" and {len(people) - 10} more" if len(people) > 10 else ""
    return ", ".join(people[:10]) + rest
