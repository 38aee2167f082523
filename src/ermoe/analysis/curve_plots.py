"""Lines over one quantity: thresholds, numbers of experts, epochs, ranks. One figure for each, as wide as a phone.

Letters: E experts, B bins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter
from numpy.typing import ArrayLike, NDArray

from ermoe.analysis.plots import ACCENT, INK, LINE, MUTED, style

_MOST_NAMED = 8


@dataclass(frozen=True, slots=True)
class Curve:
    """One line: where it goes, and where it may as well go (half widths of its error bars)."""

    x: ArrayLike
    y: ArrayLike
    error: ArrayLike | None = None
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
    log_y: bool = False
    from_zero: bool = True
    at: Mapping[str, float] = field(default_factory=dict)  # vertical lines, by what they mean


def curves(lines: Mapping[str, Curve], colours: Sequence[str], scale: Scale) -> Figure:
    """All lines in one picture, with a legend where there is more than one."""
    with style():
        drawing = Figure(figsize=(4.1, 2.9), layout="constrained")
        _draw_curves(drawing.subplots(), lines, colours, scale)
    return drawing


def _draw_curves(axes: Axes, lines: Mapping[str, Curve], colours: Sequence[str], scale: Scale) -> None:
    """The same on given axes."""
    for (name, line), colour in zip(lines.items(), colours, strict=True):
        look: dict[str, Any] = {
            "color": colour,
            "linewidth": 1.6,
            "marker": "o" if line.marked else None,
            "markersize": 3.5,
        }
        look["linestyle"] = (0, (4, 3)) if line.dashed else "-"
        if line.error is None:
            axes.plot(np.asarray(line.x), np.asarray(line.y), label=name, **look)
        else:
            axes.errorbar(np.asarray(line.x), np.asarray(line.y), np.asarray(line.error), label=name, capsize=2, **look)
    for meaning, place in scale.at.items():
        axes.axvline(place, color=INK, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
        text: dict[str, Any] = {
            "xycoords": ("data", "axes fraction"),
            "textcoords": "offset points",
            "va": "top",
            "fontsize": 8.5,
            "bbox": {"facecolor": "white", "edgecolor": "none", "pad": 1.0},
        }
        axes.annotate(meaning, (place, 1), (4, -2), **text)
    _scale(axes, scale)
    if len(lines) > 1:
        columns = 1 if len(lines) <= _MOST_NAMED else 2
        axes.legend(handlelength=1.4, ncols=columns, fontsize=8 if columns == 1 else 7)


def _scale(axes: Axes, scale: Scale) -> None:
    axes.set_xlabel(scale.x)
    axes.set_ylabel(scale.y)
    if scale.log_x:
        axes.set_xscale("log")
    if scale.log_y:
        axes.set_yscale("log")
    elif scale.from_zero:
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
    with style():
        drawing = Figure(figsize=(4.1, 0.8 + 0.52 * max(len(histograms), 3)), layout="constrained")
        axes = drawing.subplots()
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
