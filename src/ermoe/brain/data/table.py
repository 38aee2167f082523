"""Tables as labs keep them: TSV or CSV, every cell a string, "n/a" for what is missing."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

from ermoe.errors import UserError

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
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8 text: save it as a UTF-8 TSV or CSV") from None
    except OSError as problem:
        raise UserError(f"{path} cannot be read: {problem.strerror}") from problem
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        raise UserError(f"{path} is empty: it needs a header line and one row a person")
    delimiter = _delimiter(path, lines[0])
    header, *body = csv.reader(lines, delimiter=delimiter)
    columns = tuple(name.strip().casefold() for name in header)
    twice = sorted({name for name in columns if columns.count(name) > 1})
    if twice:
        raise UserError(f"{path} has the column {twice[0]!r} twice: rename or delete one")
    return Table(path, columns, tuple(_row(path, columns, number, cells) for number, cells in enumerate(body, start=2)))


def _delimiter(path: Path, header: str) -> str:
    if path.suffix.casefold() == ".tsv":
        return "\t"
    return max("\t;,", key=header.count)


def _row(path: Path, columns: tuple[str, ...], number: int, cells: list[str]) -> dict[str, str]:
    if len(cells) != len(columns):
        raise UserError(
            f"{path} has {len(cells)} cells in line {number} and {len(columns)} columns in its header: "
            "every row needs a cell for every column, n/a where nothing is known"
        )
    return dict(zip(columns, (cell.strip() for cell in cells), strict=True))
