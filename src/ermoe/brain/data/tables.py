"""Tables as labs keep them: TSV or CSV, "n/a" for what is missing; ages and sexes are read strictly, never guessed."""

from __future__ import annotations

import csv
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ermoe.brain.data.scans import SEX_WORDS, Problem, Sex, plain_code
from ermoe.errors import UserError
from ermoe.files import LARGEST_JSON, read_text, replacing

_MISSING = {"", "n/a", "na", "nan", "none", "null", "."}


@dataclass(frozen=True, slots=True)
class Table:
    """The rows of a file. Column names are in lower case, because "Age" and "age" mean the same."""

    path: Path
    columns: tuple[str, ...]
    rows: tuple[dict[str, str], ...]

    def has(self, column: str) -> bool:
        return column in self.columns


def given(cell: str | None) -> str | None:
    """The text of a cell, or None if it stands for a missing value.

    >>> given(" 38.8 "), given("n/a"), given(None)
    ('38.8', None, None)
    """
    text = (cell or "").strip()
    return None if text.casefold() in _MISSING else text


def read_table(path: Path) -> Table:
    """Reads a TSV or CSV (comma, semicolon or tab) with a header line."""
    lines = [line for line in read_text(path).splitlines() if line.strip()]
    if not lines:
        raise UserError(f"{path} is empty: it needs a header line and one row a person")
    if (
        path.suffix.casefold() == ".tsv"
        and "\t" not in lines[0]
        and (between := max(";,", key=lines[0].count)) in lines[0]
    ):
        raise UserError(
            f"{path} has {between!r} between its columns, where a .tsv has tabs: save it again separated by tabs"
        )
    delimiter = "\t" if path.suffix.casefold() == ".tsv" else max("\t;,", key=lines[0].count)
    try:
        header, *body = csv.reader(lines, delimiter=delimiter)
    except csv.Error as problem:
        raise UserError(f"{path} cannot be read as a table: {problem}; mend it") from problem
    columns = tuple(name.strip().casefold() for name in header)
    if twice := [name for name, number in Counter(columns).items() if number > 1]:
        raise UserError(f"{path} has the column {min(twice)!r} twice: rename or delete one")
    return Table(path, columns, tuple(_row(path, columns, number, cells) for number, cells in enumerate(body, start=2)))


def write_tsv(path: str | os.PathLike[str], columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Writes a TSV."""
    write_text(path, "".join("\t".join(row) + "\n" for row in (columns, *rows)))


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """UTF-8, in one step."""
    with replacing(path) as draft:
        draft.write_text(text, encoding="utf-8")


def _row(path: Path, columns: tuple[str, ...], number: int, cells: list[str]) -> dict[str, str]:
    if len(cells) != len(columns):
        raise UserError(
            f"{path} has {len(cells)} cells in line {number} and {len(columns)} columns in its header: "
            "every row needs a cell for every column, n/a where nothing is known"
        )
    return dict(zip(columns, (cell.strip() for cell in cells), strict=True))


_OLDEST = 120.0
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
    ermoe.brain.data.tables.AgeError: gives the age '89+', which is a limit and not an age
    """
    if _LIMIT.match(text):
        raise AgeError(
            f"gives the age {text!r}, which is a limit and not an age", "the scan is left out", is_limit=True
        )
    try:
        age = float(text)
    except ValueError:
        raise AgeError(f"gives the age {text!r}, which is not a number", "write years, as in 61.5, or n/a") from None
    if not 0 < age <= _OLDEST:
        raise AgeError(f"gives the age {text}, which is not between 0 and {_OLDEST:.0f} years", _other_unit(age))
    return age


def _other_unit(age: float) -> str:
    if 0 < age / 12 <= _OLDEST:
        return f"if these are months, divide by 12 ({age / 12:.1f} years)"
    if 0 < age / 365.25 <= _OLDEST:
        return f"if these are days, divide by 365.25 ({age / 365.25:.1f} years)"
    return "write the age in years"


def read_sex(text: str, declared: Mapping[str, Sex]) -> Sex | None:
    """A sex; of a number only if it was declared, because 1 and 2 mean different things to different labs.

    >>> read_sex("male", {}), read_sex("1.0", {"1": "F"}), read_sex("O", {}), read_sex("2", {"1": "F"})
    ('M', 'F', 'other', None)
    """
    code = plain_code(text)
    return declared.get(code) or SEX_WORDS.get(code)


def declared_sexes(sidecar: Path) -> dict[str, Sex]:
    """The sexes among the ``Levels`` of a participants.json; empty without one."""
    levels = _column(sidecar, "sex").get("Levels", {})
    found = {plain_code(code): _described(text) for code, text in levels.items()} if isinstance(levels, dict) else {}
    return {code: sex for code, sex in found.items() if sex is not None}


def age_unit_problems(sidecar: Path) -> list[Problem]:
    """An error if the sidecar of a table says that its ages are not in years."""
    unit = str(_column(sidecar, "age").get("Units", "")).strip()
    if not unit or unit.casefold() in {"y", "yr", "yrs", "year", "years", "a"}:
        return []
    return [Problem("error", None, sidecar, f"says that ages are in {unit}", "write them in years")]


def _column(sidecar: Path, name: str) -> dict[str, Any]:
    """What a sidecar says of a column; nothing without one."""
    if not sidecar.is_file():
        return {}
    text = read_text(sidecar, "mend or delete it", limit=LARGEST_JSON)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise UserError(f"{sidecar} is not JSON ({problem}): mend or delete it") from problem
    columns = content.items() if isinstance(content, dict) else ()
    return next((said for column, said in columns if column.casefold() == name and isinstance(said, dict)), {})


def _described(level: Any) -> Sex | None:
    """The sex that the text of a level speaks of; a level may be a text or an object with a description."""
    text = " ".join(map(str, level.values())) if isinstance(level, dict) else str(level)
    words = set(re.findall(r"[a-z-]+", text.casefold()))
    known = [word for word in words if word in SEX_WORDS]
    sexes = {SEX_WORDS[word] for word in [word for word in known if len(word) > 1] or known}
    return sexes.pop() if len(sexes) == 1 else None
