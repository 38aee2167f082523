"""What a recording looks like: plots with their titles, captions and numbers, and a report made of them.

Layers go by the names under which their tallies are given.

Letters: E experts, C classes, B bins, D model width, r routing rank.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from matplotlib.figure import Figure

from ermoe.analysis import measures, plots
from ermoe.analysis.page import Markup, Page, figure, grid, inline_svg, svg, svg_text, table
from ermoe.analysis.plots import Curve, Scale
from ermoe.analysis.summary import MEASURES, Summary, basis_errors, columns, routing_basis
from ermoe.analysis.tally import NUM_BINS, Tally
from ermoe.files import replacing
from ermoe.nn import MixtureLayer

if TYPE_CHECKING:
    from ermoe.analysis.recorder import RoutingRecorder

LOAD = ("Load", "Experts sorted by usage. A flat line at 1 means that all have equal work.")
CLASSES = (
    "Classes and experts",
    "Of all choices made by the tokens of a class (row), the percentage that fell on each expert (column).",
)
MEASURED = ("All measures", "A dash where a layer's router has no such notion.")
THRESHOLDS = [round(0.02 * step, 2) for step in range(50)]
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

    @classmethod
    def of_curves(
        cls,
        name: str,
        title: str,
        caption: str,
        lines: Mapping[str, Curve],
        scale: Scale,
        header: Sequence[str],
        colours: Sequence[str] | None = None,
    ) -> Plot:
        """Lines and their points; without ``colours`` those of layers, the deeper the darker."""
        drawing = plots.curves(lines, plots.depth_colours(len(lines)) if colours is None else colours, scale)
        rows = [(label, x, y) for label, line in lines.items() for x, y in zip(line.x, line.y, strict=True)]
        return cls(name, title, caption, drawing, header, rows)

    def show(self, folder: Path) -> Markup:
        """Writes the plot as PNG, SVG and CSV and returns it as a figure for the page, with the files' name below."""
        raw = save_drawing(self.drawing, folder / self.name, description=self.title)
        with replacing(folder / f"{self.name}.csv") as draft, draft.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(self.header)
            writer.writerows(self.rows)
        return figure(inline_svg(raw, self.title), self.title, self.caption, source=self.name)


def save_drawing(drawing: Figure, stem: Path, *, description: str) -> str:
    """Writes ``stem``.svg and ``stem``.png; returns the SVG."""
    raw = svg_text(drawing, description)
    with replacing(stem.with_name(f"{stem.name}.svg")) as draft:
        draft.write_text(raw, encoding="utf-8")
    with replacing(stem.with_name(f"{stem.name}.png")) as draft:
        drawing.savefig(draft, format="png", dpi=_DOTS_PER_INCH, metadata={"Software": None})
    return raw


def load_plots(tallies: Mapping[str, Tally], summary: Summary) -> list[Plot]:
    """Load curves of all layers, by number of choices and by mixing weight."""
    kinds = {
        "choices": ("By choices.", "How many tokens chose each expert.", "load_cv2"),
        "weight": ("By mixing weight.", "How much say each expert had; idle picks do not count.", "weight_cv2"),
    }
    made = []
    for kind, (title, caption, measure) in kinds.items():
        load = {
            name: (tally.totals.count_E if kind == "choices" else tally.totals.weight_E).cpu()
            for name, tally in tallies.items()
        }
        worst = MEASURES[measure].text(max(figures[measure] for figures in summary.values()))
        rows = [(name, e, float(value)) for name, load_E in load.items() for e, value in enumerate(load_E)]
        drawing = plots.load_curves(load, plots.depth_colours(len(load)))
        caption = f"{caption} CV² of the worst layer: {worst}."
        made.append(Plot(f"load-{kind}", title, caption, drawing, ["layer", "expert", kind], rows))
    return made


def class_plots(
    tallies: Mapping[str, Tally],
    summary: Summary,
    classes: Sequence[str],
    link: Callable[[str, int], str] | None = None,
) -> list[Plot]:
    """The class–expert map of every layer, with its strongest pairs in words.

    ``link`` names the part of the page that is about an expert of a layer; its column leads there.
    """
    made = []
    for name, tally in tallies.items():
        count_CE = tally.totals.count_CE[:-1].cpu().numpy()
        weight_CE = tally.totals.weight_CE[:-1].cpu().numpy()
        bits = MEASURES["class_information"].text(summary[name]["class_information"])
        rows = [
            (label, e, int(count_CE[c, e]), float(weight_CE[c, e]))
            for c, label in enumerate(classes)
            for e in range(tally.num_experts)
        ]
        made.append(
            Plot(
                f"classes-{name.replace(' ', '-')}",
                f"{name}.",
                f"The expert tells {bits} bits about the class. {strongest_pairs(count_CE, classes)}",
                plots.class_map(count_CE, classes, None if link is None else partial(link, name)),
                ["class", "expert", "choices", "weight"],
                rows,
            )
        )
    return made


def strongest_pairs(count_CE: np.ndarray, class_names: Sequence[str], number: int = 3) -> str:
    """The pairs of class and expert that stand out most, as a sentence.

    >>> strongest_pairs(np.array([[90, 10], [50, 50]]), ["cat", "dog"], number=1)
    'Strongest: cat → 0 (90 %).'
    """
    share_CE = np.nan_to_num(plots.class_shares(count_CE))
    order = np.argsort(share_CE, axis=None)[::-1][:number]
    pairs = [np.unravel_index(index, share_CE.shape) for index in order]
    listed = ", ".join(f"{class_names[c]} → {e} ({100 * share_CE[c, e]:.0f} %)" for c, e in pairs)
    return f"Strongest: {listed}."


def score_plots(tallies: Mapping[str, Tally], summary: Summary) -> list[Plot]:
    """Histograms of the scores of all layers, with T; none where no router scores."""
    scored = {name: tally.totals for name, tally in tallies.items() if tally.has_scores()}
    if not scored:
        return []
    histograms = {
        name: (totals.score_B.cpu(), totals.best_score_B.cpu(), tallies[name].threshold)
        for name, totals in scored.items()
    }
    rows = [
        (name, round(-1 + 2 * b / NUM_BINS, 4), int(all_B[b]), int(best_B[b]))
        for name, (all_B, best_B, _) in histograms.items()
        for b in range(NUM_BINS)
    ]
    spread = [summary[name]["spread"] for name in scored]
    caption = f"Spread between experts, best minus worst: {min(spread):.3f} to {max(spread):.3f}, by layer."
    header = ["layer", "bin starts at", "scores", "best scores"]
    return [Plot("scores", "Scores.", caption, plots.score_ridges(histograms), header, rows)]


def fallback_plots(tallies: Mapping[str, Tally]) -> list[Plot]:
    """The share of tokens that would fall back at every other threshold; none where no token can."""
    judged = {
        name: tally
        for name, tally in tallies.items()
        if tally.has_scores() and tally.threshold is not None and bool(tally.totals.num_judged)
    }
    if not judged:
        return []
    lines = {name: Curve(THRESHOLDS, [own.fallback_rate(t) for t in THRESHOLDS]) for name, own in judged.items()}
    now = {f"T = {t:g}": t for t in {tally.threshold for tally in judged.values()} if t is not None}
    scale = Scale("threshold T", "tokens that fall back", percent=True, at=now)
    caption = "Tokens whose best score is below T. With a fixed number of experts a token, T changes nothing else."
    title = "Fallback against T."
    return [Plot.of_curves("fallback", title, caption, lines, scale, ["layer", "T", "fallback"])]


def tail_plots(tallies: Mapping[str, Tally]) -> list[Plot]:
    """The weight above T that every number of experts a token would leave out; none where nothing lies above."""
    tailed = {name: tally for name, tally in tallies.items() if bool(tally.totals.num_above)}
    if not tailed:
        return []
    lines = {}
    for name, tally in tailed.items():
        numbers = range(1, tally.num_experts + 1)
        lines[name] = Curve(numbers, [tally.tail_mass(k) for k in numbers], marked=True)
    now = {f"k = {k}": float(k) for k in {tally.top_k for tally in tailed.values()} if k is not None}
    scale = Scale("experts a token, k", "tail mass", percent=True, whole_x=True, at=now)
    caption = "Of the score above T, the share that lies beyond the k best experts."
    title = "Tail mass against k."
    return [Plot.of_curves("tail-mass", title, caption, lines, scale, ["layer", "k", "tail mass"])]


def basis_plots(layers: Mapping[str, MixtureLayer]) -> list[Plot]:
    """Overlap of the routing subspaces, their principal angles, and how orthonormal all bases are."""
    found = {name: routing_basis(layer) for name, layer in layers.items()}
    bases = {name: basis for name, basis in found.items() if basis is not None}
    made = _subspace_plots(bases) if bases else []
    errors = {
        f"{name} {basis}": error for name, layer in layers.items() for basis, error in basis_errors(layer).items()
    }
    if errors:
        caption = "Of the worst expert. Rounding alone gives 1e-7 in float32; training adds to it until a retraction."
        drawing = plots.orthonormality_bars(errors)
        made.append(
            Plot("orthonormality", "Orthonormality.", caption, drawing, ["basis", "error"], list(errors.items()))
        )
    return made


def _subspace_plots(bases: Mapping[str, torch.Tensor]) -> list[Plot]:
    cosines = {name: measures.principal_cosines(basis) for name, basis in bases.items()}
    overlaps = {name: cosine.square().mean(-1) for name, cosine in cosines.items()}
    dim, route_rank = next(iter(bases.values())).shape[1:]
    rows = [
        (name, i, j, float(overlap[i, j]))
        for name, overlap in overlaps.items()
        for i in range(len(overlap))
        for j in range(i)
    ]
    caption = f"Mean squared cosine of the principal angles; random subspaces of this size have {route_rank / dim:.2f}."
    title, drawing = "Overlap of the experts' subspaces.", plots.overlap_maps(overlaps)
    overlap = Plot("overlap", title, caption, drawing, ["layer", "i", "j", "overlap"], rows)
    lines = {name: Curve(range(1, cosine.shape[-1] + 1), _mean_angles(cosine)) for name, cosine in cosines.items()}
    scale = Scale("principal angle, smallest first", "degrees", whole_x=True)
    caption = "Mean over all pairs of experts: 0° is a shared direction, 90° an orthogonal one."
    header = ["layer", "number", "degrees"]
    return [overlap, Plot.of_curves("angles", "Principal angles.", caption, lines, scale, header)]


def _mean_angles(cosine_EEr: torch.Tensor) -> list[float]:
    """In degrees, over pairs of different experts."""
    others = ~torch.eye(len(cosine_EEr), dtype=torch.bool)
    angle_r: list[float] = torch.rad2deg(cosine_EEr[others].clamp(-1, 1).acos()).mean(0).tolist()
    return angle_r


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
