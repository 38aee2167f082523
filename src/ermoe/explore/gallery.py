"""Plots that can be taken away: each goes onto the page, and beside it as PNG, as SVG and with its numbers as CSV."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from ermoe.analysis.page import Markup, figure, inline_svg, svg_text
from ermoe.files import replacing

_DOTS_PER_INCH = 150


@dataclass(frozen=True, slots=True)
class Plot:
    """A drawing, what is to be said about it, and the numbers in it. ``name`` is that of its files."""

    name: str
    title: str
    caption: str
    drawing: Figure
    header: Sequence[str]
    rows: Iterable[Sequence[object]]


class Gallery:
    """A folder of plots."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def show(self, plot: Plot) -> Markup:
        """Writes the plot's three files and returns it as a figure for the page, with the files' name below it."""
        raw = save_drawing(plot.drawing, self.folder / plot.name, description=plot.title)
        with (
            replacing(self.folder / f"{plot.name}.csv") as draft,
            draft.open("w", newline="", encoding="utf-8") as file,
        ):
            writer = csv.writer(file)
            writer.writerow(plot.header)
            writer.writerows(plot.rows)
        return figure(inline_svg(raw, plot.title), plot.title, plot.caption, source=plot.name)


def save_drawing(drawing: Figure, stem: Path, *, description: str) -> str:
    """Writes ``stem``.svg and ``stem``.png; returns the SVG."""
    raw = svg_text(drawing, description)
    with replacing(stem.with_name(f"{stem.name}.svg")) as draft:
        draft.write_text(raw, encoding="utf-8")
    with replacing(stem.with_name(f"{stem.name}.png")) as draft:
        drawing.savefig(draft, format="png", dpi=_DOTS_PER_INCH, metadata={"Software": None})
    return raw
