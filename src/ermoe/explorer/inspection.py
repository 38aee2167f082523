"""What `ermoe inspect` finds out about models, and its report: one page, models side by side, plots also in files."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ermoe.analysis import plots, report
from ermoe.analysis.page import Markup, Page, escape, grid, heading, table
from ermoe.analysis.plots import ACCENT, Curve, Scale
from ermoe.analysis.recorder import RoutingRecorder
from ermoe.analysis.report import CLASSES, LOAD, MEASURED, Plot, measure_table
from ermoe.analysis.summary import MEASURES, Summary, over_layers
from ermoe.analysis.tally import Tally
from ermoe.explorer.card_page import card_markup, card_style
from ermoe.explorer.cards import Cards, Words
from ermoe.explorer.patches import SCRIPT, Patched, viewer
from ermoe.nn import MixtureLayer

if TYPE_CHECKING:
    from ermoe.explorer.cube_cards import CubeCards

_COLOURS = [ACCENT, "#d97706", "#8b5fbf", "#2563eb", "#be123c", "#4d7c0f", "#0e7490", "#a16207"]
_OVERVIEW = ["load_cv2", "weight_cv2", "fallback_rate", "spread", "class_information"]
_OVERVIEW += ["subspace_overlap", "orthonormality_error"]
_EPOCH_MEASURES = {"fluctuation": "routing fluctuation", "fallback_rate": "fallback", "top1": "accuracy"}


@dataclass(frozen=True, slots=True)
class AtK:
    """A model with another number of experts a token: accuracy, half its 95 % interval, and how often it agrees."""

    top_k: int
    accuracy: float
    half_width: float
    agreement: float


@dataclass(frozen=True, slots=True)
class Inspection:
    """Everything about one model.

    ``accuracy`` is None if the classes are not those the model knows; ``by_k`` is empty where the routers have no
    number of experts a token; ``epochs`` holds a run's evaluations, one a row, empty if it kept none; ``cards`` what is
    known of every expert, and ``words`` finds captions for them; ``patched`` is None where there are no images.
    """

    recorder: RoutingRecorder
    patched: Patched | None
    accuracy: float | None = None
    by_k: Sequence[AtK] = ()
    epochs: Sequence[dict[str, float]] = ()
    cards: Cards | CubeCards | None = None
    words: Words | None = None

    def tallies(self) -> dict[str, Tally]:
        """Totals by layer, by the names that plots use."""
        return {short(name): tally for name, tally in self.recorder.tallies.items()}

    def layers(self) -> dict[str, MixtureLayer]:
        """The layers themselves, by the same names."""
        return {short(name): layer for name, layer in self.recorder.layers.items()}

    def summary(self) -> Summary:
        """Measures by layer, by the same names."""
        return {short(name): figures for name, figures in self.recorder.summary().items()}


def short(layer: str) -> str:
    """A layer's name without what all of them share.

    >>> short("blocks.3.mlp")
    'block 3'
    """
    return re.sub(r"^(?:.*\.)?(?:blocks|layers?)\.(\d+)(?:\..*)?$", r"block \1", layer) or "layer"


def pooled_share(tallies: Sequence[Tally]) -> list[float]:
    """Shares of all choices by expert, over all layers, largest first."""
    count = torch.cat([tally.totals.count_E.cpu() for tally in tallies]).double()
    return (count / count.sum().clamp_min(1)).sort(descending=True).values.tolist()


def inspection_page(
    models: dict[str, Inspection],
    *,
    data: str,
    num_images: int,
    figures: Path,
    num_k_images: int = 0,
    noun: str = "image",
) -> Page:
    """The report of one or more models, by name, on the same images; plots are also written to folder ``figures``."""
    page = Page(
        "Routing of " + ", ".join(models),
        f"What the experts of {'this model' if len(models) == 1 else 'these models'} did with {num_images:,} {noun}s. "
        f"Every plot is also in the folder {figures.name}, under the name below it, as PNG, SVG and CSV.",
        facts={"data": data, f"{noun}s": f"{num_images:,}"},
    )
    for title, lead, blocks in _Report(models, figures).sections(num_k_images):
        if blocks:
            page.section(title, lead, blocks)
    page.contents()
    if any(found.patched is not None for found in models.values()):
        page.script(SCRIPT)
    return page


class _Report:
    """The blocks of the page."""

    def __init__(self, models: dict[str, Inspection], folder: Path) -> None:
        self.models = models
        self.folder = folder
        self.colours = [_COLOURS[number % len(_COLOURS)] for number in range(len(models))]

    def sections(self, num_k_images: int) -> Iterator[tuple[str, str, list[Markup]]]:
        """Title, lead and blocks of each; no blocks where the routers have nothing of the kind."""
        yield (
            "At a glance",
            "Loads, class bits and ‖UᵀU−I‖ are the largest of all layers; other measures are means.",
            [self.overview()],
        )
        loads = self.side_by_side(lambda found: report.load_plots(found.tallies(), found.summary()))
        yield *LOAD, [*loads, *self.row_of([self.pooled()])]
        yield (
            "Where the patches go",
            "Each patch in the colour of the expert with the largest say in it; point at a picture to see it alone. "
            "Colours mean nothing across models or layers.",
            self.patches(),
        )
        yield *CLASSES, self.side_by_side(self.class_plots, pairs=True)
        yield (
            "Experts",
            "A card for each expert: what fits it best, and how what it takes differs, beside what shuffling gives."
            + (" A click on a column of a map above opens the card of that expert." if self.has_classes() else ""),
            self.cards(),
        )
        yield (
            "Scores",
            "How well tokens fit the experts: all scores, and each token's best.",
            self.together(lambda found: report.score_plots(found.tallies(), found.summary())),
        )
        yield (
            "Threshold",
            "How the fallback rate would change with the threshold T.",
            self.together(lambda found: report.fallback_plots(found.tallies())),
        )
        yield (
            "Experts a token",
            "What more or fewer experts a token would change.",
            self.together(lambda found: report.tail_plots(found.tallies()))
            + self.together(lambda found: _accuracy_plots(found, num_k_images)),
        )
        yield (
            "Bases",
            "How much the experts' routing subspaces share, and how orthonormal their bases are.",
            self.side_by_side(lambda found: report.basis_plots(found.layers())),
        )
        epochs = [plot for measure in _EPOCH_MEASURES for plot in self.by_epoch(measure)]
        yield "Over training", "What the runs wrote down after every epoch.", self.row_of(epochs)
        yield *MEASURED, self.measures()

    def has_classes(self) -> bool:
        """Whether there are maps of classes and experts."""
        return any(found.recorder.class_names for found in self.models.values())

    def patches(self) -> list[Markup]:
        """Pictures in the colours of experts, where there are any."""
        patched = {name: found.patched for name, found in self.models.items() if found.patched is not None}
        return viewer(patched) if patched else []

    def overview(self) -> Markup:
        """One row a model."""
        header = ["model", "accuracy", "layers × experts", *(MEASURES[name].label for name in _OVERVIEW)]
        rows = []
        for name, found in self.models.items():
            overall, tallies = over_layers(found.summary(), _OVERVIEW), found.tallies()
            experts = "/".join(str(e) for e in sorted({tally.num_experts for tally in tallies.values()}))
            cells = [MEASURES[measure].text(overall.get(measure, math.nan)) for measure in _OVERVIEW]
            accuracy = "–" if found.accuracy is None else f"{found.accuracy:.1%}"
            rows.append([name, accuracy, f"{len(tallies)} × {experts}", *cells])
        return table(header, rows)

    def _made(self, make: Callable[[Inspection], list[Plot]]) -> list[list[Plot]]:
        """The plots of each model that has any; where there are several, titles and files say whose they are."""
        if len(self.models) == 1:
            made = [make(found) for found in self.models.values()]
        else:
            made = []
            for name, found in self.models.items():
                file = re.sub(r"[^\w.-]+", "-", name)
                made.append([replace(p, name=f"{file}-{p.name}", title=f"{name}: {p.title}") for p in make(found)])
        return [own for own in made if own]

    def side_by_side(self, make: Callable[[Inspection], list[Plot]], *, pairs: bool = False) -> list[Markup]:
        """The plots that ``make`` draws of each model, the first of every model before the second of any."""
        made = self._made(make)
        if len(made) == 1:
            return self.row_of(made[0])
        return [grid(self._shown(row), pairs=pairs) for row in zip_longest(*made)]

    def together(self, make: Callable[[Inspection], list[Plot]]) -> list[Markup]:
        """The plots that ``make`` draws of each model, in one row."""
        return self.row_of([plot for own in self._made(make) for plot in own])

    def row_of(self, made: Sequence[Plot]) -> list[Markup]:
        """A row of plots, if there are any."""
        return [grid(self._shown(made))] if made else []

    def _shown(self, made: Iterable[Plot | None]) -> Iterator[Markup]:
        return (plot.show(self.folder) for plot in made if plot is not None)

    def pooled(self) -> Plot:
        """The paper's picture of balance: all experts of all layers in one line, by their share of the choices."""
        shares = {name: pooled_share(list(found.tallies().values())) for name, found in self.models.items()}
        lines = {name: Curve(range(1, len(share) + 1), share) for name, share in shares.items()}
        scale = Scale("experts of all layers, busiest first", "share of choices", percent=True, whole_x=True)
        caption = "Each expert's share of all choices in the model; a flat line is equal load everywhere."
        header = ["model", "rank", "share"]
        return Plot.of_curves("load-pooled", "All layers together.", caption, lines, scale, header, self.colours)

    def by_epoch(self, measure: str) -> list[Plot]:
        """A measure over the epochs of the runs that kept it."""
        lines, colours = {}, []
        for (name, found), colour in zip(self.models.items(), self.colours, strict=True):
            kept = [(row["epoch"], row[measure]) for row in found.epochs if not math.isnan(row.get(measure, math.nan))]
            if kept:
                lines[name] = Curve([epoch for epoch, _ in kept], [value for _, value in kept], marked=len(kept) <= 30)
                colours.append(colour)
        if not lines:
            return []
        label = _EPOCH_MEASURES[measure]
        scale = Scale("epoch", label, percent=True, whole_x=True, from_zero=measure != "top1")
        changed = "Probe tokens whose set of experts changed since the epoch before."
        caption = changed if measure == "fluctuation" else ""
        title, header = f"{label[0].upper()}{label[1:]} over epochs.", ["model", "epoch", measure]
        return [Plot.of_curves(f"epochs-{measure}", title, caption, lines, scale, header, colours)]

    def class_plots(self, found: Inspection) -> list[Plot]:
        """Class–expert maps whose columns lead to the experts' cards."""
        classes = found.recorder.class_names
        number = list(self.models.values()).index(found)
        link = partial(_anchor, number) if found.cards is not None else None
        return report.class_plots(found.tallies(), found.summary(), classes, link) if classes else []

    def cards(self) -> list[Markup]:
        """Closed cards, a row of them for each layer."""
        blocks = []
        for number, (name, found) in enumerate(self.models.items()):
            if found.cards is None:
                continue
            blocks += [heading(name)] if len(self.models) > 1 else []
            for card in found.cards.all_cards(found.words):
                layer = short(card.layer)
                summary = f"{layer}, expert {card.expert}"
                body = card_markup(card, summary)
                anchor = _anchor(number, layer, card.expert)
                blocks.append(
                    Markup(f"<details><summary>{escape(summary)}</summary><div id='{anchor}'>{body}</div></details>")
                )
        return [card_style(), *blocks] if blocks else []

    def measures(self) -> list[Markup]:
        """Every measure of every layer."""
        blocks = []
        for name, found in self.models.items():
            blocks += [heading(name)] if len(self.models) > 1 else []
            blocks.append(measure_table(found.summary()))
        return blocks


def _anchor(model: int, layer: str, expert: int) -> str:
    """Where a card is on the page.

    >>> _anchor(0, "block 3", 7)
    'card-0-block-3-7'
    """
    return f"card-{model}-{re.sub(r'[^a-z0-9]+', '-', layer.lower())}-{expert}"


def _accuracy_plots(found: Inspection, num_images: int) -> list[Plot]:
    """Accuracy of the same weights with other numbers of experts a token."""
    if not found.by_k:
        return []
    points = sorted(found.by_k, key=lambda at: at.top_k)
    line = Curve(
        [at.top_k for at in points], [at.accuracy for at in points], [at.half_width for at in points], marked=True
    )
    scale = Scale("experts a token, k", "accuracy", percent=True, whole_x=True, from_zero=False)
    rows = [(at.top_k, at.accuracy, at.half_width, at.agreement) for at in points]
    changed = ", ".join(f"{1 - at.agreement:.0%} at k = {at.top_k}" for at in points if at.agreement < 1)
    caption = (
        f"The same weights, {num_images:,} images, 95 % intervals. "
        f"Predictions that change: {changed or 'none'}. Retraining with another k may end elsewhere."
    )
    header = ["k", "accuracy", "half of the 95 % interval", "agreement"]
    return [Plot("accuracy", "Accuracy against k.", caption, plots.curves({"": line}, [ACCENT], scale), header, rows)]
