"""One table for the terminal and for documents, and tables in documents that are written from records.

In a document a table stands between two comments, and what is between them is written anew::

    <!-- table: cifar10 -->
    | preset | accuracy |
    …
    <!-- end of table -->
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table as TerminalTable

from ermoe.errors import UserError
from ermoe.studies.figures import Runs
from ermoe.studies.record import Record

_MARKED = re.compile(r"^( *)<!-- table: ([\w-]+) -->\n.*?^ *<!-- end of table -->$", re.MULTILINE | re.DOTALL)


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


def filled_in(text: str, tables: Mapping[str, Callable[[], Table]]) -> str:
    """A document with all its marked tables written anew, as far indented as their marks.

    >>> print(filled_in("See:\\n<!-- table: x -->\\nold\\n<!-- end of table -->", {"x": lambda: Table(["new"], [])}))
    See:
    <!-- table: x -->
    <BLANKLINE>
    | new |
    | :-- |
    <BLANKLINE>
    <!-- end of table -->
    """

    def anew(found: re.Match[str]) -> str:
        indent, name = found.groups()
        if name not in tables:
            raise UserError(f"there is no table {name!r}: use one of {', '.join(tables)}")
        lines = [f"<!-- table: {name} -->", "", *tables[name]().markdown().splitlines(), "", "<!-- end of table -->"]
        return "\n".join(indent + line if line else "" for line in lines)

    return _MARKED.sub(anew, text)
