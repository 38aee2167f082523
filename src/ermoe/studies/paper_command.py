"""``ermoe paper``: every table and figure of the paper as one command."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated

import tyro

from ermoe.console import Command
from ermoe.studies.paper.setup import Setup

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, slots=True)
class List:
    """What can be run, which part of the paper it repeats, and what data it takes."""

    def __call__(self, console: Console) -> None:
        from rich import box
        from rich.table import Table

        from ermoe.studies.paper.catalogue import ENTRIES

        table = Table("ID", "in the paper", "data", "scales", "what is claimed", box=box.SIMPLE, header_style="bold")
        for name, entry in ENTRIES.items():
            table.add_row(name, entry.shows, entry.data, ", ".join(entry.scales), entry.claims)
        console.print(table)


@dataclass(frozen=True, slots=True)
class Run:
    """Run one study, with the paper's figures beside ours; what was run already is not run again.

    Without --data it takes what comes with the library: digits, generated shapes with captions, phantom brains. Results
    are small then, and the output says how they differ from the paper's setting.
    """

    study: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="ID")]
    """One of `ermoe paper list`."""
    setup: Setup = field(default_factory=Setup)

    def __call__(self, console: Console) -> None:
        from ermoe.studies.paper.catalogue import find
        from ermoe.studies.paper.study import run

        run(find(self.study, self.setup.scale), replace(self.setup, console=console))


COMMANDS: dict[str, type[Command]] = {"list": List, "run": Run}
