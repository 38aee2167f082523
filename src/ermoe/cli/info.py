"""``ermoe info``: what a model costs, part by part, beside what the paper prints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.console import Console

if TYPE_CHECKING:
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


def _show_preset(name: str, console: Console) -> None:
    from ermoe.models import presets

    chosen = presets.preset(name)
    console.print(f"[bold]{name}[/bold]: {chosen.about}")
    _show(name, presets.count_preset(chosen), console)
    _show_ways(presets.ways(chosen), console)
    if name in presets.PAPER:
        console.print(presets.WHAT_DOES_NOT_FIT)


def _show(name: str, counted: Count, console: Console) -> None:
    from ermoe.models import presets
    from ermoe.studies.tables import Table

    console.print(Table(["", "counted", "paper prints"], _sizes(name, counted)).terminal())
    console.print(Table(["part", "multiply-adds", "share"], presets.parts(counted)).terminal())


def _sizes(name: str, counted: Count) -> list[list[str]]:
    from ermoe.models import presets

    paper = presets.PAPER.get(name)
    flops, total, active, work, routing = counted.flops, "–", "–", "–", "–"
    if paper is not None:
        total, active, work = f"{paper.total:.1f} M", f"{paper.active:.1f} M", f"{paper.multiply_adds:.1f} G"
        routing = f"{paper.routing:.2f} G" if paper.routing else "–"
    return [
        ["parameters", presets.millions(counted.total_parameters), total],
        ["active for a token", presets.millions(counted.active_parameters), active],
        ["multiply-adds per image", presets.multiply_adds(flops.total), work],
        ["  of which routing", presets.multiply_adds(flops.routing), routing],
    ]


def _show_ways(ways: list[Way], console: Console) -> None:
    from ermoe.models.presets import millions, multiply_adds
    from ermoe.studies.tables import Table

    header = ["8 experts, 2 a token", "parameters", "experts", "of V-MoE's", "routing, context", "parity with dense"]
    rows, v_moe = [], ways[-1].count.flops.experts
    for way in ways:
        flops, size = way.count.flops, millions(way.count.total_parameters)
        experts = flops.experts + flops.shared_expert
        ours = [multiply_adds(experts), f"{experts / v_moe:.2f} ×"]
        rows.append([way.name, size, *ours, multiply_adds(flops.routing + flops.context), way.parity])
    console.print(Table(header, rows).terminal())
