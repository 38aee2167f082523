"""Ages and sexes as tables spell them, read strictly: what is not certain is reported and not guessed."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ermoe.brain.data.problems import Problem
from ermoe.brain.data.scans import Sex
from ermoe.errors import UserError

OLDEST = 120.0
_WORDS: dict[str, Sex] = {
    "m": "M", "male": "M", "man": "M", "boy": "M",
    "f": "F", "female": "F", "woman": "F", "girl": "F", "w": "F",
    "o": "other", "other": "other", "intersex": "other", "x": "other", "nonbinary": "other", "non-binary": "other",
}  # fmt: skip
_LIMIT = re.compile(r"^(?:[<>≥≤]=?\s*\d|\d+(?:\.\d+)?\s*(?:\+|or (?:older|more)|and (?:older|over)))", re.IGNORECASE)


class AgeError(ValueError):
    """An age that is text, a limit, or no number of years. Its message is the rest of a sentence about the person."""

    def __init__(self, what: str, remedy: str, *, is_limit: bool = False) -> None:
        super().__init__(what)
        self.remedy, self.is_limit = remedy, is_limit


def read_age(text: str) -> float:
    """Years, or `AgeError`.

    >>> read_age("38.78")
    38.78
    >>> read_age("89+")
    Traceback (most recent call last):
    ermoe.brain.data.demographics.AgeError: gives the age '89+', which is a limit and not an age
    """
    if _LIMIT.match(text):
        raise AgeError(
            f"gives the age {text!r}, which is a limit and not an age", "the scan is left out", is_limit=True
        )
    try:
        age = float(text)
    except ValueError:
        raise AgeError(f"gives the age {text!r}, which is not a number", "write years, as in 61.5, or n/a") from None
    if not 0 < age <= OLDEST:
        raise AgeError(f"gives the age {text}, which is not between 0 and {OLDEST:.0f} years", _other_unit(age))
    return age


def _other_unit(age: float) -> str:
    if 0 < age / 12 <= OLDEST:
        return f"if these are months, divide by 12 ({age / 12:.1f} years)"
    if 0 < age / 365.25 <= OLDEST:
        return f"if these are days, divide by 365.25 ({age / 365.25:.1f} years)"
    return "write the age in years"


class SexError(ValueError):
    """A sex whose code was not declared."""


@dataclass(frozen=True, slots=True)
class SexReader:
    """Reads sexes; numbers only if their meaning was declared, because 1 and 2 mean different things to different labs.

    >>> reader = SexReader({"1": "F"})
    >>> reader("male"), reader("1.0"), reader("O")
    ('M', 'F', 'other')
    """

    declared: Mapping[str, Sex] = field(default_factory=dict)

    def __call__(self, text: str) -> Sex:
        code = _plain(text)
        if code in self.declared:
            return self.declared[code]
        if code in _WORDS:
            return _WORDS[code]
        raise SexError(f"gives the sex {text!r}, whose meaning is not declared")


def sex_coding_from(pairs: Sequence[str]) -> dict[str, Sex]:
    """What ``--sex-coding`` says.

    >>> sex_coding_from(["1=M", "2=F"])
    {'1': 'M', '2': 'F'}
    """
    coding: dict[str, Sex] = {}
    for pair in pairs:
        code, _, word = pair.partition("=")
        if _plain(word) not in _WORDS or not code.strip():
            raise UserError(f"--sex-coding {pair!r}: write which code means what, as in 1=M 2=F")
        coding[_plain(code)] = _WORDS[_plain(word)]
    return coding


def declared_sexes(sidecar: Path) -> dict[str, Sex]:
    """The sexes among the ``Levels`` of a participants.json; empty without one."""
    levels = _column(_sidecar(sidecar), "sex").get("Levels", {})
    found = {_plain(code): _described(text) for code, text in levels.items()} if isinstance(levels, dict) else {}
    return {code: sex for code, sex in found.items() if sex is not None}


def age_unit_problems(sidecar: Path) -> list[Problem]:
    """An error if the sidecar of a table says that its ages are not in years."""
    unit = str(_column(_sidecar(sidecar), "age").get("Units", "")).strip()
    if not unit or unit.casefold() in {"y", "yr", "yrs", "year", "years", "a"}:
        return []
    return [Problem("error", None, sidecar, f"says that ages are in {unit}", "write them in years")]


def _sidecar(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, OSError) as problem:
        raise UserError(f"{path} is not JSON ({problem}): mend or delete it") from problem
    return content if isinstance(content, dict) else {}


def _column(sidecar: dict[str, Any], name: str) -> dict[str, Any]:
    for column, described in sidecar.items():
        if column.casefold() == name and isinstance(described, dict):
            return described
    return {}


def _described(level: Any) -> Sex | None:
    """The sex that the text of a level speaks of; a level may be a text or an object with a description."""
    text = " ".join(map(str, level.values())) if isinstance(level, dict) else str(level)
    words = set(re.findall(r"[a-z-]+", text.casefold()))
    sexes = {_WORDS[word] for word in words if word in _WORDS and len(word) > 1} or {
        _WORDS[word] for word in words if word in _WORDS
    }
    return sexes.pop() if len(sexes) == 1 else None


def _plain(code: str) -> str:
    code = code.strip().casefold()
    return code[:-2] if re.fullmatch(r"\d+\.0", code) else code
