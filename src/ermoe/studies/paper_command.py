"""``ermoe paper``: every table and figure of the paper as one command."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from ermoe.console import Command, run_command

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, slots=True)
class List:
    """What can be run, which part of the paper it repeats, and what data it takes."""

    def __call__(self, console: Console) -> None:
        from rich import box
        from rich.table import Table

        from ermoe.studies.paper.catalogue import ENTRIES

        table = Table("ID", "in the paper", "data", "what is claimed", box=box.SIMPLE, header_style="bold")
        for name, entry in ENTRIES.items():
            table.add_row(name, entry.shows, entry.data, entry.claims)
        console.print(table)


@dataclass(frozen=True, slots=True)
class Run:
    """Run one study, with the paper's figures beside ours; what was run already is not run again.

    Without --data it takes what comes with the library: digits, generated shapes with captions, phantom brains. Results
    are small then, and the output says how they differ from the paper's setting.
    """

    study: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="ID")]
    """One of `ermoe paper list`."""
    data: str | None = None
    """Folder of a data set of the kind that the list names."""
    scale: Literal["mini", "full"] = "mini"
    """mini: minutes on two cores. full: the paper's sizes, on the data you name; for GPUs."""
    seeds: int = 3
    """How many seeds."""
    pretrain: str | None = None
    """few-shot, ablation: the images that features are learned from; by default half of the classes of --data."""
    weights: str | None = None
    """full: what models start from, a file with weights of a ViT, or "timm"."""
    epochs: int | None = None
    """Other than what the scale has, for a quick try; results go to a folder of their own."""
    out: Path = Path("runs/paper")
    """Folder for the records, a line a run, the table and the plot."""
    work: Path = Path("runs/paper/trained")
    """Folder for trained models, which studies share."""
    threads: int = 0
    """CPU threads; 0 leaves that to torch."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """auto is the accelerator if there is one."""

    def __call__(self, console: Console) -> None:
        from ermoe.studies.paper.catalogue import find
        from ermoe.studies.paper.study import Setup, run

        run(
            find(self.study),
            Setup(
                data=self.data,
                scale=self.scale,
                seeds=self.seeds,
                out=self.out,
                work=self.work,
                threads=self.threads,
                weights=self.weights,
                pretrain=self.pretrain,
                epochs=self.epochs,
                device=self.device,
                console=console,
            ),
        )


COMMANDS: dict[str, type[Command]] = {"list": List, "run": Run}


def run(argv: list[str]) -> None:
    """Entry point of the command."""
    run_command(COMMANDS, argv, prog="ermoe paper", description="Every table and figure of the paper as one command.")
