"""``ermoe info``: what a model costs, part by part, beside what the paper prints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.console import Console

from ermoe.console import parse_command

if TYPE_CHECKING:
    from rich.table import Table

    from ermoe.models.count import Count
    from ermoe.models.presets import Way


@dataclass(frozen=True, slots=True)
class Info:
    """Parameters and multiply-adds per image of a model, by part, beside the paper's figures.

    Presets: paper-b16, parity-b16, dense-experts-b16, v-moe-b16, vit-b16, small-s16, tiny-ti16. Nothing is downloaded
    and no weights are made.
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PRESET|FOLDER")]
    """A preset, or a folder that ermoe.save wrote."""

    def __call__(self, console: Console) -> None:
        if not Path(self.model).is_dir():
            _show_preset(self.model, console)
            return
        from ermoe.models.count import count
        from ermoe.models.io import weightless

        _show(self.model, count(weightless(self.model)), console)


def run(argv: list[str]) -> None:
    """Entry point of the command."""
    parse_command(Info, argv, prog="ermoe info")(Console())


def _show_preset(name: str, console: Console) -> None:
    from ermoe.models import presets

    chosen = presets.preset(name)
    console.print(f"[bold]{name}[/bold]: {' '.join((presets.PRESETS[name].__doc__ or '').split())}")
    _show(name, presets.count_preset(chosen), console)
    console.print(_ways(presets.three_ways(chosen)))
    if name in presets.PAPER:
        console.print(presets.WHAT_DOES_NOT_FIT)


def _show(name: str, counted: Count, console: Console) -> None:
    from ermoe.models import presets

    console.print(_sizes(name, counted))
    parts = _table("part", "multiply-adds", "share")
    for row in presets.parts(counted):
        parts.add_row(*row)
    console.print(parts)


def _sizes(name: str, counted: Count) -> Table:
    from ermoe.models import presets

    table = _table("", "counted", "paper prints")
    paper = presets.PAPER.get(name)
    flops, total, active, work, routing = counted.flops, "–", "–", "–", "–"
    if paper is not None:
        total, active, work = f"{paper.total:.1f} M", f"{paper.active:.1f} M", f"{paper.multiply_adds:.1f} G"
        routing = f"{paper.routing:.2f} G" if paper.routing else "–"
    table.add_row("parameters", presets.millions(counted.total_parameters), total)
    table.add_row("active for a token", presets.millions(counted.active_parameters), active)
    table.add_row("multiply-adds per image", presets.multiply_adds(flops.total), work)
    table.add_row("  of which routing", presets.multiply_adds(flops.routing), routing)
    return table


def _ways(ways: list[Way]) -> Table:
    from ermoe.models import presets

    v_moe = ways[-1].count.flops.experts
    table = _table(
        "8 experts, 2 a token", "parameters", "experts", "of V-MoE's", "routing, context", "parity with dense"
    )
    for way in ways:
        table.add_row(
            way.name,
            presets.millions(way.count.total_parameters),
            presets.multiply_adds(way.count.flops.experts),
            f"{way.count.flops.experts / v_moe:.2f} ×",
            presets.multiply_adds(way.count.flops.routing + way.count.flops.context),
            way.parity,
        )
    return table


def _table(*columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 or column.startswith("parity") else "right")
    return table
