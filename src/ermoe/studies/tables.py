"""One table for the terminal and for documents, and tables in documents that are written from records.

In a document a table stands between two comments, and what is between them is written anew::

    <!-- table: cifar10 -->
    | preset | accuracy |
    …
    <!-- end of table -->

A figure within a sentence stands between two of its own: ``<!-- figure: NAME -->0.97<!-- end -->``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.table import Table as TerminalTable

from ermoe.errors import UserError
from ermoe.studies.figures import Runs
from ermoe.studies.record import Record

_MARKED = re.compile(r"^( *)<!-- table: ([\w-]+) -->\n.*?^ *<!-- end of table -->$", re.MULTILINE | re.DOTALL)
_MARKED_FIGURE = re.compile(r"<!-- figure: ([\w-]+) -->.*?<!-- end -->")


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text under a header; the first column says what a row is about."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        """For documents.

        >>> print(Table(["a", "|b|"], [["1", "2"]]).markdown())
        | a | \\|b\\| |
        | :-- | --: |
        | 1 | 2 |
        """
        rows = [self.header, [":--", *["--:"] * (len(self.header) - 1)], *self.rows]
        return "\n".join(" | ".join(["", *(cell.replace("|", r"\|") for cell in row), ""]).strip() for row in rows)

    def terminal(self, *, bold: str | None = None) -> TerminalTable:
        """For the terminal; the row about ``bold`` stands out."""
        table = TerminalTable(box=box.SIMPLE, header_style="bold", pad_edge=False, collapse_padding=True)
        for index, name in enumerate(self.header):
            table.add_column(name, justify="left" if index == 0 else "right", overflow="fold")
        for row in self.rows:
            table.add_row(*row, style="bold" if row[0] == bold else None)
        return table

    def only(self, *columns: str) -> Table:
        """The first column and the named ones."""
        chosen = [0, *(list(self.header).index(name) for name in columns)]
        return Table([self.header[i] for i in chosen], [[row[i] for i in chosen] for row in self.rows])


Show = Callable[[Sequence[Record]], str]
"""What a cell says about all runs of one name."""


def one_row_a_name(
    records: Sequence[Record], first: str, columns: Mapping[str, Show], labels: Mapping[str, str] | None = None
) -> Table:
    """A row for all runs that have a name in common, in the order of the records, or of ``labels`` if they are given.

    >>> runs = [{"name": "a", "figures": {"top1": 0.5}}, {"name": "a", "figures": {"top1": 0.6}}]
    >>> one_row_a_name(runs, "preset", {"accuracy": spread("top1")}).rows
    [['a', '2', '55.00% ± 7.07%']]
    """
    there = dict.fromkeys(record["name"] for record in records)
    shown = list(there) if labels is None else [name for name in labels if name in there]
    own = {name: [record for record in records if record["name"] == name] for name in shown}
    rows = [[(labels or {}).get(name, name), str(len(runs)), *(show(runs) for show in columns.values())]
            for name, runs in own.items()]  # fmt: skip
    return Table([first, "seeds", *columns], rows)


def spread(*path: str, style: str = ".2%") -> Show:
    """Mean ± standard deviation over runs of one of their figures."""
    return lambda runs: Runs(runs).cell(runs[0]["name"], *path, style=style)


def filled_in(
    text: str, tables: Mapping[str, Callable[[], Table]], figures: Mapping[str, Callable[[], str]] | None = None
) -> str:
    """A document with all its marked tables and figures written anew, tables as far indented as their marks.

    >>> print(filled_in("See:\\n<!-- table: x -->\\nold\\n<!-- end of table -->", {"x": lambda: Table(["new"], [])}))
    See:
    <!-- table: x -->
    <BLANKLINE>
    | new |
    | :-- |
    <BLANKLINE>
    <!-- end of table -->
    >>> filled_in("in <!-- figure: y -->2<!-- end --> years", {}, {"y": lambda: "3"})
    'in <!-- figure: y -->3<!-- end --> years'
    """

    def table(found: re.Match[str]) -> str:
        indent, name = found.groups()
        made = _known("table", name, tables)().markdown().splitlines()
        lines = [f"<!-- table: {name} -->", "", *made, "", "<!-- end of table -->"]
        return "\n".join(indent + line if line else "" for line in lines)

    def figure(found: re.Match[str]) -> str:
        return f"<!-- figure: {found[1]} -->{_known('figure', found[1], figures or {})()}<!-- end -->"

    return _MARKED_FIGURE.sub(figure, _MARKED.sub(table, text))


def _known(kind: str, name: str, made: Mapping[str, Callable[[], Any]]) -> Callable[[], Any]:
    if name not in made:
        raise UserError(f"there is no {kind} {name!r}: use one of {', '.join(made)}")
    return made[name]
