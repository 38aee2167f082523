"""The report of `ermoe inspect`: one page, several models side by side, every plot also in a folder beside it."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

from ermoe.analysis.page import Markup, Page, grid, heading, table
from ermoe.analysis.plots import ACCENT
from ermoe.analysis.report import measure_table
from ermoe.analysis.summary import MEASURES
from ermoe.explore import inspection as see
from ermoe.explore.gallery import Gallery, Plot
from ermoe.explore.inspection import Inspection
from ermoe.explore.patch_viewer import SCRIPT, viewer

_COLOURS = [ACCENT, "#d97706", "#8b5fbf", "#2563eb", "#be123c", "#4d7c0f", "#0e7490", "#a16207"]
_OVERVIEW: dict[str, Callable[[list[float]], float]] = {
    "load_cv2": max,
    "weight_cv2": max,
    "fallback_rate": statistics.fmean,
    "spread": statistics.fmean,
    "class_information": max,
    "subspace_overlap": statistics.fmean,
    "orthonormality_error": max,
}
"""Measure → what stands for all layers: the largest, or the mean."""


def inspection_page(
    models: dict[str, Inspection], *, data: str, num_images: int, figures: Path, num_k_images: int = 0
) -> Page:
    """The report of one or more models, by name, on the same images; plots are also written to folder ``figures``."""
    report = _Report(models, Gallery(figures))
    page = Page(
        "Routing of " + ", ".join(models),
        f"What the experts of {'this model' if len(models) == 1 else 'these models'} did with {num_images:,} images. "
        f"Every plot is also in the folder {figures.name}, under the name below it, as PNG, SVG and CSV.",
        facts={"data": data, "images": f"{num_images:,}"},
    )
    page.section(
        "At a glance",
        "Loads, class bits and ‖UᵀU−I‖ are the largest of all layers; other measures are means.",
        [report.overview()],
    )
    page.section(
        "Load",
        "Experts sorted by usage. A flat line at 1 means that all have equal work.",
        [*report.side_by_side(see.load_plots), report.pooled()],
    )
    page.section(
        "Where the patches go",
        "Each patch in the colour of the expert with the largest say in it; point at a picture to see it alone. "
        "Colours mean nothing across models or layers.",
        viewer({name: found.patched for name, found in models.items()}),
    )
    if any(found.recorder.class_names for found in models.values()):
        page.section(
            "Classes and experts",
            "Of all choices made by the tokens of a class (row), the percentage that fell on each expert (column).",
            report.classes(),
        )
    for title, lead, blocks in report.optional_sections(num_k_images):
        if blocks:
            page.section(title, lead, blocks)
    page.section("All measures", "A dash where a layer's router has no such notion.", report.measures())
    page.contents()
    page.script(SCRIPT)
    return page


class _Report:
    """The blocks of the page."""

    def __init__(self, models: dict[str, Inspection], gallery: Gallery) -> None:
        self.models = models
        self.gallery = gallery
        self.colours = [_COLOURS[number % len(_COLOURS)] for number in range(len(models))]

    def prefix(self, model: str) -> str:
        """What file names of a model's plots begin with."""
        return "" if len(self.models) == 1 else re.sub(r"[^\w.-]+", "-", model) + "-"

    def overview(self) -> Markup:
        """One row a model."""
        header = ["model", "accuracy", "layers × experts", *(MEASURES[name].label for name in _OVERVIEW)]
        rows = []
        for name, found in self.models.items():
            summary, tallies = found.summary(), found.tallies()
            experts = "/".join(str(e) for e in sorted({tally.num_experts for tally in tallies.values()}))
            cells = []
            for measure, over_layers in _OVERVIEW.items():
                known = [figures[measure] for figures in summary.values() if not math.isnan(figures[measure])]
                cells.append(MEASURES[measure].text(over_layers(known) if known else math.nan))
            accuracy = f"{found.figures['top1']:.1%}" if "top1" in found.figures else "–"
            rows.append([name, accuracy, f"{len(tallies)} × {experts}", *cells])
        return table(header, rows)

    def side_by_side(self, make: Callable[[Inspection, str], list[Plot]]) -> list[Markup]:
        """The plots that ``make`` draws of each model, the first of every model before the second of any."""
        made = [self._named(name, make(found, self.prefix(name))) for name, found in self.models.items()]
        made = [plots for plots in made if plots]
        rows = [tuple(made[0])] if len(made) == 1 else list(zip_longest(*made))
        return [grid(self._shown(row)) for row in rows]

    def _named(self, model: str, plots: Iterable[Plot]) -> list[Plot]:
        """Titles say which model they are of, where there are several."""
        if len(self.models) == 1:
            return list(plots)
        return [replace(plot, title=f"{model}: {plot.title}") for plot in plots]

    def _shown(self, plots: Iterable[Plot | None]) -> Iterator[Markup]:
        return (self.gallery.show(plot) for plot in plots if plot is not None)

    def pooled(self) -> Markup:
        """All experts of all layers in one line."""
        return grid([self.gallery.show(see.pooled_plot(self.models, self.colours))])

    def classes(self) -> list[Markup]:
        """A row of maps for each layer, one map a model."""
        made = [
            self._named(name, see.class_plots(found, self.prefix(name)).values())
            for name, found in self.models.items()
            if found.recorder.class_names
        ]
        if len(made) == 1:
            return [grid(self._shown(made[0]))]
        return [grid(self._shown(row), pairs=True) for row in zip_longest(*made)]

    def optional_sections(self, num_k_images: int) -> Iterator[tuple[str, str, list[Markup]]]:
        """Sections that depend on what the routers are, with no blocks where nothing is known."""
        yield (
            "Scores",
            "How well tokens fit the experts: all scores, and each token's best.",
            self._one_each(see.score_plot),
        )
        yield (
            "Threshold",
            "How the fallback rate would change with the threshold T.",
            self._one_each(see.fallback_plot),
        )
        yield (
            "Experts a token",
            "What more or fewer experts a token would change.",
            self._one_each(see.tail_plot)
            + self._one_each(lambda found, prefix: see.accuracy_plot(found, prefix, num_k_images)),
        )
        yield (
            "Bases",
            "How much the experts' routing subspaces share, and how orthonormal their bases are.",
            self.side_by_side(see.basis_plots),
        )
        epochs = [see.epoch_plot(self.models, self.colours, name) for name in ("fluctuation", "fallback_rate", "top1")]
        kept = list(self._shown(epochs))
        yield "Over training", "What the runs wrote down after every epoch.", [grid(kept)] if kept else []

    def _one_each(self, make: Callable[[Inspection, str], Plot | None]) -> list[Markup]:
        made = {name: make(found, self.prefix(name)) for name, found in self.models.items()}
        drawn = [plot for name, found in made.items() if found is not None for plot in self._named(name, [found])]
        return [grid(self._shown(drawn))] if drawn else []

    def measures(self) -> list[Markup]:
        """Every measure of every layer."""
        blocks = []
        for name, found in self.models.items():
            blocks += [heading(name)] if len(self.models) > 1 else []
            blocks.append(measure_table(found.summary()))
        return blocks
