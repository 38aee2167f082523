"""Drawings of a routing. ``draw_…`` draws on given axes; the others make a whole figure, as wide as a phone.

Letters: E experts, C classes, B bins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, PercentFormatter
from numpy.typing import ArrayLike, NDArray

_LOOK = matplotlib.rc_params_from_file(str(files("ermoe.analysis") / "figures.mplstyle"), use_default_template=False)
INK, MUTED, LINE = (str(_LOOK[name]) for name in ("text.color", "axes.labelcolor", "axes.edgecolor"))
ACCENT = "#0f766e"
# Okabe and Ito, "Color universal design" (2008), distinct to every kind of colour vision; for black, which would hide
# a photograph, a dark violet.
_EXPERTS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#5b3a8c"]
_HEAT = LinearSegmentedColormap.from_list("heat", ["#ffffff", "#cfe8e4", "#5fb3a8", "#0f766e", "#083f3b"])
_DEPTH = LinearSegmentedColormap.from_list("depth", ["#9bd3c9", "#0f766e", "#072d3f"])
_MAX_NUMBERED_CELLS = 200
_MOST_INSIDE = 4  # names of lines among the lines; more of them stand above
_MOST_BELOW_EACH_OTHER = 8
_MAPS_A_ROW = 3
_LONGEST_NAME = 40


def style() -> AbstractContextManager[None]:
    """The look of all figures, as a context to draw in."""
    return matplotlib.rc_context(_LOOK)


@contextmanager
def panel(height: float) -> Iterator[tuple[Figure, Axes]]:
    """A figure with one pair of axes, as wide as a phone and ``height`` inches high, as a context to draw in."""
    with style():
        drawing = Figure(figsize=(4.1, height), layout="constrained")
        yield drawing, drawing.subplots()


def expert_colours(num_experts: int) -> list[str]:
    """One colour an expert.

    >>> expert_colours(2)
    ['#0072b2', '#e69f00']
    """
    if num_experts <= len(_EXPERTS):
        return _EXPERTS[:num_experts]
    return [to_hex(colour) for colour in matplotlib.colormaps["turbo"](np.linspace(0.05, 0.95, num_experts))]


def expert_washes(num_experts: int) -> list[str]:
    """The experts' colours, pale enough to read black ink on them."""
    strong = [np.array(to_rgb(colour)) for colour in expert_colours(num_experts)]
    return [to_hex(tuple(0.35 + 0.65 * colour)) for colour in strong]


def depth_colours(num_layers: int) -> list[str]:
    """One colour a layer, the deeper the darker."""
    return [to_hex(colour) for colour in _DEPTH(np.linspace(0, 1, max(num_layers, 2))[:num_layers])]


def load_curves(load: Mapping[str, ArrayLike], colours: Sequence[str]) -> Figure:
    """Each expert's load over the mean load, experts sorted by usage, a line for each entry of ``load``."""
    with panel(3.1) as (drawing, axes):
        draw_load_curves(axes, load, colours)
    return drawing


def draw_load_curves(axes: Axes, load: Mapping[str, ArrayLike], colours: Sequence[str]) -> None:
    """A flat line at 1 is equal load."""
    axes.axhline(1, color=MUTED, linewidth=1, linestyle=(0, (4, 3)), zorder=1, label="equal load")
    highest = 1.0
    for (name, load_E), colour in zip(load.items(), colours, strict=True):
        relative_E = sorted_load(load_E)
        rank_E = np.arange(1, len(relative_E) + 1)
        marker = "o" if len(rank_E) <= 16 else ""
        axes.plot(rank_E, relative_E, marker, color=colour, linestyle="-", markersize=3.5, linewidth=1.8, label=name)
        highest = max(highest, float(relative_E[0]))
    _scale(axes, Scale("experts, busiest first", "load / mean load", whole_x=True))
    axes.set_ylim(0, max(1.6, 1.08 * highest))
    if len(load) > 1:
        axes.legend(loc="upper right", ncols=1 if len(load) <= 6 else 2, handlelength=1.4, borderaxespad=0)


def sorted_load(load_E: ArrayLike) -> NDArray[np.float64]:
    """Loads over their mean, busiest expert first.

    >>> sorted_load([1, 3, 2]).tolist()
    [1.5, 1.0, 0.5]
    """
    load = np.sort(np.asarray(load_E, dtype=np.float64))[::-1]
    relative: NDArray[np.float64] = load / max(load.mean(), np.finfo(np.float64).tiny)
    return relative


def class_map(count_CE: ArrayLike, class_names: Sequence[str], link: Callable[[int], str] | None = None) -> Figure:
    """For every class, the share of its tokens' choices that went to each expert; rows sum to 1.

    Where the page has something on every expert, ``link`` says where: an expert's column leads there.
    """
    share_CE = class_shares(count_CE)
    with panel(0.7 + min(0.25 * len(share_CE), 7.0)) as (drawing, axes):
        draw_class_map(axes, share_CE, class_names)
        for expert in range(share_CE.shape[1] if link is not None else 0):
            assert link is not None
            column = Rectangle((expert - 0.5, -0.5), 1, len(share_CE), alpha=0, linewidth=0, zorder=3)
            column.set_url(f"#{link(expert)}")
            axes.add_patch(column)
    return drawing


def draw_class_map(axes: Axes, share_CE: NDArray[np.float64], class_names: Sequence[str]) -> None:
    """Dark where a class prefers an expert; percentages where there is room for them."""
    num_classes, num_experts = share_CE.shape
    highest = max(float(np.nanmax(share_CE, initial=0)), 2 / num_experts)
    axes.imshow(share_CE, cmap=_HEAT, vmin=0, vmax=highest, aspect="auto", interpolation="none")
    step = max(1, -(-num_classes // 30))
    axes.set_yticks(range(0, num_classes, step), [name[:_LONGEST_NAME] for name in class_names[::step]])
    axes.set_xticks(range(0, num_experts, max(1, num_experts // 16)))
    axes.set_xlabel("expert")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    if share_CE.size <= _MAX_NUMBERED_CELLS:
        for (row, column), share in np.ndenumerate(share_CE):
            colour = "#ffffff" if share > 0.55 * highest else INK
            if not np.isnan(share):
                axes.text(column, row, f"{100 * share:.0f}", ha="center", va="center", fontsize=7.5, color=colour)


def class_shares(count_CE: ArrayLike) -> NDArray[np.float64]:
    """Rows of counts as rows of shares; NaN for a class that never came.

    >>> class_shares([[3, 1], [0, 0]]).tolist()
    [[0.75, 0.25], [nan, nan]]
    """
    count = np.asarray(count_CE, dtype=np.float64)
    total = count.sum(1, keepdims=True)
    share: NDArray[np.float64] = np.divide(count, total, out=np.full_like(count, np.nan), where=total > 0)
    return share


@dataclass(frozen=True, slots=True)
class Curve:
    """One line: where it goes, and where it may as well go (half widths of its error bars)."""

    x: Sequence[float]
    y: Sequence[float]
    error: Sequence[float] | None = None
    marked: bool = False
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Scale:
    """What the axes say, and how they count."""

    x: str
    y: str
    percent: bool = False
    whole_x: bool = False
    log_x: bool = False
    from_zero: bool = True
    at: Mapping[str, float] = field(default_factory=dict)  # vertical lines, by what they mean


def curves(lines: Mapping[str, Curve], colours: Sequence[str], scale: Scale) -> Figure:
    """All lines in one picture, with a legend where there is more than one."""
    columns = 1 if len(lines) <= _MOST_BELOW_EACH_OTHER else 2
    above = math.ceil(len(lines) / columns) if len(lines) > _MOST_INSIDE else 0  # rows of names, where lines are many
    with panel(2.9 + 0.17 * above) as (drawing, axes):
        for (name, line), colour in zip(lines.items(), colours, strict=True):
            look: dict[str, Any] = {"color": colour, "linewidth": 1.6, "markersize": 3.5, "label": name}
            look["marker"] = "o" if line.marked else None
            look["linestyle"] = (0, (4, 3)) if line.dashed else "-"
            if line.error is None:
                axes.plot(line.x, line.y, **look)
            else:
                axes.errorbar(line.x, line.y, line.error, capsize=2, **look)
        for meaning, place in scale.at.items():
            axes.axvline(place, color=INK, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
            where: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points", "va": "top"}
            paper = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
            axes.annotate(meaning, (place, 1), (4, -2), fontsize=8.5, bbox=paper, **where)
        _scale(axes, scale)
        if above:
            drawing.legend(loc="outside upper left", handlelength=1.4, ncols=columns, fontsize=8 if columns == 1 else 7)
        elif len(lines) > 1:
            axes.legend(handlelength=1.4, fontsize=8)
    return drawing


def _scale(axes: Axes, scale: Scale) -> None:
    axes.set_xlabel(scale.x)
    axes.set_ylabel(scale.y)
    if scale.log_x:
        axes.set_xscale("log")
    if scale.from_zero:
        axes.set_ylim(bottom=0)
    if scale.percent:
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=None))
    if scale.whole_x and not scale.log_x:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y", color=LINE, linewidth=0.5, alpha=0.6)
    axes.set_axisbelow(True)


def score_ridges(histograms: Mapping[str, tuple[ArrayLike, ArrayLike, float | None]]) -> Figure:
    """How scores are distributed, a row for each layer: those of all experts, each token's best, the threshold.

    Each entry holds counts of equal bins on [−1, 1] (all scores, best scores) and T. All rows share one axis.
    """
    with panel(0.8 + 0.52 * max(len(histograms), 3)) as (drawing, axes):
        _draw_ridges(axes, histograms)
    return drawing


def _draw_ridges(axes: Axes, histograms: Mapping[str, tuple[ArrayLike, ArrayLike, float | None]]) -> None:
    seen: list[float] = []
    for row, (all_B, best_B, threshold) in enumerate(histograms.values()):
        shares = [_halved(all_B), _halved(best_B)]
        edge = np.linspace(-1, 1, len(shares[0]) + 1)
        floor, tallest = -float(row), max(float(share.max()) for share in shares) or 1.0
        for share, colour, name in zip(shares, (MUTED, ACCENT), ("all experts", "best of each token"), strict=True):
            height = floor + 0.9 * share / tallest
            axes.stairs(height, edge, baseline=floor, fill=True, color=colour, alpha=0.22)
            axes.stairs(height, edge, baseline=None, color=colour, linewidth=1, label=name if row == 0 else None)
        if threshold is not None:
            axes.plot([threshold, threshold], [floor, floor + 0.9], color=INK, linewidth=1, linestyle=(0, (3, 2)))
            seen.append(threshold)
        occupied = edge[:-1][(shares[0] + shares[1]) > 0]
        seen += [float(occupied.min()), float(occupied.max()) + edge[1] - edge[0]] if len(occupied) else []
    axes.set_yticks([-float(row) for row in range(len(histograms))], list(histograms))
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set_ylim(-len(histograms) + 0.95, 1.0)
    if seen:
        axes.set_xlim(min(seen) - 0.03, max(seen) + 0.03)
    axes.set_xlabel("score (dashed: T)")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, handlelength=1.2, borderaxespad=0)


def _halved(histogram_B: ArrayLike) -> NDArray[np.float64]:
    """Bins of twice the width, as shares."""
    paired = np.asarray(histogram_B, dtype=np.float64).reshape(-1, 2).sum(1)
    return np.asarray(paired / max(paired.sum(), 1))


def overlap_maps(overlaps: Mapping[str, ArrayLike]) -> Figure:
    """Mean squared cosine of the principal angles between each two experts, (E, E), one small map a layer."""
    columns = min(_MAPS_A_ROW, len(overlaps))
    rows = math.ceil(len(overlaps) / columns)
    highest = max(float(np.nanmax(_others(overlap), initial=0)) for overlap in overlaps.values()) or 1.0
    with style():
        drawing = Figure(figsize=(4.1, 0.35 + 1.55 * rows), layout="constrained")
        grid = drawing.subplots(rows, columns, squeeze=False)
        picture = None
        for axes, (name, overlap) in zip(grid.flat, overlaps.items(), strict=False):
            picture = axes.imshow(_others(overlap), cmap=_HEAT, vmin=0, vmax=highest, interpolation="none")
            axes.set_title(name, fontsize=8)
            axes.set_xticks([])
            axes.set_yticks([])
            axes.spines[:].set_visible(False)
        for axes in grid.flat[len(overlaps) :]:
            axes.set_axis_off()
        if picture is not None:
            bar = drawing.colorbar(picture, ax=grid, shrink=0.8, aspect=25, pad=0.02)
            bar.outline.set_visible(False)
            bar.ax.tick_params(labelsize=7)
    return drawing


def _others(overlap_EE: ArrayLike) -> NDArray[np.float64]:
    """Without the diagonal, where every expert meets itself."""
    overlap = np.asarray(overlap_EE, dtype=np.float64).copy()
    np.fill_diagonal(overlap, np.nan)
    return overlap


def orthonormality_bars(errors: Mapping[str, float]) -> Figure:
    """‖UᵀU − I‖₂ of every stack of bases on a logarithmic scale, the worst expert's."""
    names, floor = list(errors), 1e-9
    with panel(0.7 + 0.2 * len(names)) as (drawing, axes):
        width = [max(errors[name], floor) for name in names]
        axes.barh(range(len(names)), width, color=ACCENT, height=0.6)
        axes.set_xscale("log")
        axes.set_xlim(floor, max(1e-2, 3 * max(width)))
        axes.xaxis.set_major_locator(LogLocator(numticks=5))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_yticks(range(len(names)), names, fontsize=7)
        axes.invert_yaxis()
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel("‖UᵀU − I‖₂")
        axes.grid(axis="x", color=LINE, linewidth=0.5, alpha=0.6)
        axes.set_axisbelow(True)
    return drawing
