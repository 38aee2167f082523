"""The report of one recording: loads, classes, scores, all measures."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ermoe.analysis.page import Markup, Page, figure, grid, svg, table
from ermoe.analysis.pictures import Plot, class_plots, load_plots, score_plots
from ermoe.analysis.summary import MEASURES, Summary, columns

if TYPE_CHECKING:
    from ermoe.analysis.recorder import RoutingRecorder

LOAD = ("Load", "Experts sorted by usage. A flat line at 1 means that all have equal work.")
CLASSES = (
    "Classes and experts",
    "Of all choices made by the tokens of a class (row), the percentage that fell on each expert (column).",
)
MEASURED = ("All measures", "A dash where a layer's router has no such notion.")


def routing_report(recorder: RoutingRecorder, *, title: str = "Routing") -> Page:
    """A page with everything a recording knows."""
    tallies = {name or "layer": tally for name, tally in recorder.tallies.items()}
    summary = {name or "layer": figures for name, figures in recorder.summary().items()}
    experts = sorted({tally.num_experts for tally in tallies.values()})
    facts = {
        "MoE layers": str(len(summary)),
        "experts a layer": " or ".join(map(str, experts)),
        "tokens seen by each": f"{max(figures['tokens'] for figures in summary.values()):,.0f}",
    }
    page = Page(title, facts=facts)
    page.section(*LOAD, [_panels(load_plots(tallies, summary))])
    if recorder.class_names:
        page.section(*CLASSES, [_panels(class_plots(tallies, summary, recorder.class_names))])
    if scores := score_plots(tallies, summary):
        lead = "How well tokens fit the experts. A token whose best score is below the threshold T fell back."
        page.section("Scores", lead, [_panels(scores)])
    page.section(*MEASURED, [measure_table(summary)])
    return page


def _panels(plots: Iterable[Plot]) -> Markup:
    return grid(figure(svg(plot.drawing, plot.title), plot.title, plot.caption) for plot in plots)


def measure_table(summary: Summary) -> Markup:
    """A row for each measure that has a meaning in some layer, and what it means."""
    rows = [
        [MEASURES[name].label, *(MEASURES[name].text(figures[name]) for figures in summary.values())]
        for name in columns(summary)
    ]
    meanings = [MEASURES[name].meaning for name in columns(summary)]
    return table(["measure", *(layer or "layer" for layer in summary)], rows, notes=meanings)
