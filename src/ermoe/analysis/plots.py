"""Pictures of a routing. ``draw_…`` draws on given axes; the others make a whole figure, as wide as a phone.

Letters: E experts, C classes, B bins, h × w patches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import ArrayLike, NDArray

INK, MUTED, LINE, ACCENT = "#1c2230", "#667085", "#d0d5dd", "#0f766e"
_EXPERTS = ["#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#b07aa1", "#76b7b2", "#edc948", "#9c755f"]
HEAT = LinearSegmentedColormap.from_list("heat", ["#ffffff", "#cfe8e4", "#5fb3a8", "#0f766e", "#083f3b"])
_DEPTH = LinearSegmentedColormap.from_list("depth", ["#9bd3c9", "#0f766e", "#072d3f"])
_MAX_NUMBERED_CELLS = 200


def style() -> AbstractContextManager[None]:
    """The look of all figures, as a context to draw in."""
    return matplotlib.rc_context(
        {
            "font.size": 9,
            "axes.edgecolor": LINE,
            "axes.labelcolor": MUTED,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.titlecolor": INK,
            "axes.titlelocation": "left",
            "axes.titlesize": 10,
            "legend.frameon": False,
            "legend.fontsize": 8.5,
            "legend.labelcolor": INK,
            "text.color": INK,
            "xtick.color": LINE,
            "xtick.labelcolor": MUTED,
            "ytick.color": LINE,
            "ytick.labelcolor": MUTED,
        }
    )


def expert_colours(num_experts: int) -> list[str]:
    """One colour an expert.

    >>> expert_colours(2)
    ['#4e79a7', '#f28e2b']
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
    with style():
        drawing = Figure(figsize=(4.1, 3.1), layout="constrained")
        draw_load_curves(drawing.subplots(), load, colours)
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
    axes.set_ylim(0, max(1.6, 1.08 * highest))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("experts, busiest first")
    axes.set_ylabel("load / mean load")
    axes.grid(axis="y", color=LINE, linewidth=0.5, alpha=0.6)
    axes.set_axisbelow(True)
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


def class_map(count_CE: ArrayLike, class_names: Sequence[str]) -> Figure:
    """For every class, the share of its tokens' choices that went to each expert; rows sum to 1."""
    share_CE = class_shares(count_CE)
    with style():
        height = 0.7 + min(0.25 * len(share_CE), 7.0)
        drawing = Figure(figsize=(4.1, height), layout="constrained")
        draw_class_map(drawing.subplots(), share_CE, class_names)
    return drawing


def draw_class_map(axes: Axes, share_CE: NDArray[np.float64], class_names: Sequence[str]) -> None:
    """Dark where a class prefers an expert; percentages where there is room for them."""
    num_classes, num_experts = share_CE.shape
    highest = max(float(np.nanmax(share_CE, initial=0)), 2 / num_experts)
    axes.imshow(share_CE, cmap=HEAT, vmin=0, vmax=highest, aspect="auto", interpolation="none")
    step = max(1, -(-num_classes // 30))
    axes.set_yticks(range(0, num_classes, step), list(class_names)[::step])
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


def score_histogram(score_B: ArrayLike, best_score_B: ArrayLike, threshold: float | None) -> Figure:
    """How scores are distributed on [−1, 1]: those of all experts, and each token's best, with the threshold."""
    with style():
        drawing = Figure(figsize=(4.1, 2.7), layout="constrained")
        _draw_score_histogram(drawing.subplots(), score_B, best_score_B, threshold)
    return drawing


def _draw_score_histogram(axes: Axes, score_B: ArrayLike, best_score_B: ArrayLike, threshold: float | None) -> None:
    """Shares of bins of width 0.02."""
    edge = np.linspace(-1, 1, len(np.asarray(score_B)) // 2 + 1)
    shares = {}
    for name, histogram_B in (("all experts", score_B), ("best of each token", best_score_B)):
        paired = np.asarray(histogram_B, dtype=np.float64).reshape(-1, 2).sum(1)
        shares[name] = paired / max(paired.sum(), 1)
    for (name, share), colour in zip(shares.items(), (MUTED, ACCENT), strict=True):
        axes.stairs(share, edge, fill=True, color=colour, alpha=0.22)
        axes.stairs(share, edge, color=colour, linewidth=1.3, label=name)
    seen = edge[:-1][sum(shares.values()) > 0]
    left, right = (seen.min(), seen.max() + 0.02) if len(seen) else (-1.0, 1.0)
    if threshold is not None:
        left, right = min(left, threshold), max(right, threshold)
        axes.axvline(threshold, color=INK, linewidth=1, linestyle=(0, (4, 3)))
        axes.annotate(
            f"T = {threshold:g}",
            (threshold, 1),
            (4, -2),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            va="top",
            fontsize=8.5,
        )
    axes.set_xlim(left - 0.03, right + 0.03)
    axes.set_ylim(0, 1.25 * max(share.max() for share in shares.values()) or 1)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("score")
    axes.legend(loc="upper left", handlelength=1.2, borderaxespad=0)
