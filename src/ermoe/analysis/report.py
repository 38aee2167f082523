"""The report of one recording: loads, classes, scores, all measures."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ermoe.analysis import plots
from ermoe.analysis.page import Markup, Page, figure, grid, svg, table
from ermoe.analysis.summary import MEASURES, Summary, columns
from ermoe.analysis.tally import Tally

if TYPE_CHECKING:
    from ermoe.analysis.recorder import RoutingRecorder


def routing_report(recorder: RoutingRecorder, *, title: str = "Routing") -> Page:
    """A page with everything a recording knows."""
    summary = recorder.summary()
    experts = sorted({tally.num_experts for tally in recorder.tallies.values()})
    tokens = max(figures["tokens"] for figures in summary.values())
    page = Page(
        title,
        facts={
            "MoE layers": str(len(summary)),
            "experts a layer": " or ".join(map(str, experts)),
            "tokens seen by each": f"{tokens:,.0f}",
        },
    )
    page.section(
        "Load",
        "Experts sorted by usage. A flat line at 1 means that all have equal work.",
        [grid(_load_panels(recorder))],
    )
    if recorder.class_names:
        page.section(
            "Classes and experts",
            "Of all choices made by the tokens of a class (row), the percentage that fell on each expert (column).",
            [
                grid(
                    class_panel(name, tally, recorder.class_names, summary[name])
                    for name, tally in recorder.tallies.items()
                )
            ],
        )
    scored = [score_panel(name, tally, summary[name]) for name, tally in recorder.tallies.items() if tally.has_scores()]
    if scored:
        page.section(
            "Scores",
            "How well tokens fit the experts. A token whose best score is below the threshold T fell back.",
            [grid(scored)],
        )
    page.section("All measures", "A dash where a layer's router has no such notion.", [measure_table(summary)])
    return page


def _load_panels(recorder: RoutingRecorder) -> list[Markup]:
    """Load curves of all layers: by number of choices, and by mixing weight."""
    colours = plots.depth_colours(len(recorder.tallies))
    by_count = {name or "layer": tally.totals.count_E.cpu() for name, tally in recorder.tallies.items()}
    by_weight = {name or "layer": tally.totals.weight_E.cpu() for name, tally in recorder.tallies.items()}
    return [
        figure(
            svg(plots.load_curves(by_count, colours), "load of the experts by number of choices"),
            "By choices.",
            "How many tokens chose each expert.",
        ),
        figure(
            svg(plots.load_curves(by_weight, colours), "load of the experts by mixing weight"),
            "By mixing weight.",
            "How much say each expert had; idle picks do not count.",
        ),
    ]


def class_panel(name: str, tally: Tally, class_names: list[str], figures: dict[str, float]) -> Markup:
    """A layer's class–expert map, with its strongest pairs in words."""
    count_CE = tally.totals.count_CE[:-1].cpu().numpy()
    bits = MEASURES["class_information"].text(figures["class_information"])
    caption = f"The expert tells {bits} bits about the class. {strongest_pairs(count_CE, class_names)}"
    drawing = plots.class_map(count_CE, class_names)
    return figure(svg(drawing, f"classes and experts of {name}"), f"{name or 'layer'}.", caption)


def strongest_pairs(count_CE: np.ndarray, class_names: list[str], number: int = 3) -> str:
    """The pairs of class and expert that stand out most, as a sentence.

    >>> strongest_pairs(np.array([[90, 10], [50, 50]]), ["cat", "dog"], number=1)
    'Strongest: cat → 0 (90 %).'
    """
    share_CE = np.nan_to_num(plots.class_shares(count_CE))
    order = np.argsort(share_CE, axis=None)[::-1][:number]
    pairs = [np.unravel_index(index, share_CE.shape) for index in order]
    listed = ", ".join(f"{class_names[c]} → {e} ({100 * share_CE[c, e]:.0f} %)" for c, e in pairs)
    return f"Strongest: {listed}."


def score_panel(name: str, tally: Tally, figures: dict[str, float]) -> Markup:
    """A layer's score histogram."""
    fallback, spread = (MEASURES[key].text(figures[key]) for key in ("fallback_rate", "spread"))
    drawing = plots.score_histogram(tally.totals.score_B.cpu(), tally.totals.best_score_B.cpu(), tally.threshold)
    caption = f"Fell back: {fallback} of the tokens. Spread between experts: {spread}."
    return figure(svg(drawing, f"scores of {name}"), f"{name or 'layer'}.", caption)


def measure_table(summary: Summary) -> Markup:
    """A row for each measure that has a meaning in some layer, and what it means."""
    rows = [
        [MEASURES[name].label, *(MEASURES[name].text(figures[name]) for figures in summary.values())]
        for name in columns(summary)
    ]
    meanings = [MEASURES[name].meaning for name in columns(summary)]
    return table(["measure", *(layer or "layer" for layer in summary)], rows, notes=meanings)
