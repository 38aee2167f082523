"""``ermoe demo``: the whole idea on one's own machine, in about two minutes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from ermoe.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


@dataclass(frozen=True, slots=True)
class Options:
    """Train dense and sparse versions of one small ViT on handwritten digits, and see how they route.

    The digits come with scikit-learn, so nothing is downloaded. All versions start from the same weights and see the
    same batches. Prints a table of what they reached on held-out digits and writes a report to look at.
    """

    epochs: int = 20
    """Passes over the 1,198 training digits."""
    seed: int = 0
    """Of initial weights and the order of the digits."""
    out: Path = Path("runs/demo")
    """Folder for report.html; an older report in it is replaced."""
    picture: Path | None = None
    """Also write the picture of the README to this PNG file."""

    def __post_init__(self) -> None:
        if self.epochs < 1:
            raise UserError(f"--epochs {self.epochs}: train for at least one epoch")


def run(argv: list[str]) -> None:
    """Trains, prints the table, writes the report."""
    options = tyro.cli(Options, prog="ermoe demo", args=argv)
    from rich.console import Console

    from ermoe.tasks import demo, demo_report

    console = Console()
    budget = demo.Budget(epochs=options.epochs, seed=options.seed)
    console.print(
        f"Training {', '.join(['dense', *demo.SPARSE])} on the digits of scikit-learn, {budget.epochs} epochs."
    )
    with _progress(console) as on_step:
        results = demo.run(budget, on_step)
    console.print(_table(demo_report.HEADER, demo_report.rows(results)))
    console.print(demo_report.noise_note(results))
    report = demo_report.demo_page(results, budget).write(options.out / "report.html")
    console.print(f"Report: [bold]{report}[/bold]")
    if options.picture is not None:
        console.print(f"Picture: [bold]{demo_report.write_picture(results, options.picture)}[/bold]")


@contextmanager
def _progress(console: Console) -> Iterator[Callable[[int, int], None]]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("steps"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("steps", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def _table(header: list[str], rows: list[list[str]]) -> Table:
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for index, name in enumerate(header):
        table.add_column(name, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*row, style="bold" if row[0] == "ERMoE" else None)
    return table
