"""Pictures of the experts' bases: how much their routing subspaces share, and how orthonormal they are.

Letters: E experts, D model width, r routing rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator
from numpy.typing import ArrayLike

from ermoe.analysis.plots import ACCENT, HEAT, LINE, style

_COLUMNS = 3


def overlap_maps(overlaps: Mapping[str, ArrayLike]) -> Figure:
    """Mean squared cosine of the principal angles between each two experts, (E, E), one small map a layer."""
    columns = min(_COLUMNS, len(overlaps))
    rows = math.ceil(len(overlaps) / columns)
    highest = max(float(np.nanmax(_others(overlap), initial=0)) for overlap in overlaps.values()) or 1.0
    with style():
        drawing = Figure(figsize=(4.1, 0.35 + 1.55 * rows), layout="constrained")
        grid = drawing.subplots(rows, columns, squeeze=False)
        picture = None
        for axes, (name, overlap) in zip(grid.flat, overlaps.items(), strict=False):
            picture = axes.imshow(_others(overlap), cmap=HEAT, vmin=0, vmax=highest, interpolation="none")
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


def _others(overlap_EE: ArrayLike) -> np.ndarray:
    """Without the diagonal, where every expert meets itself."""
    overlap = np.asarray(overlap_EE, dtype=np.float64).copy()
    np.fill_diagonal(overlap, np.nan)
    return overlap


def orthonormality_bars(errors: Mapping[str, float]) -> Figure:
    """‖UᵀU − I‖₂ of every stack of bases on a logarithmic scale, the worst expert's."""
    names, floor = list(errors), 1e-9
    with style():
        drawing = Figure(figsize=(4.1, 0.7 + 0.2 * len(names)), layout="constrained")
        axes = drawing.subplots()
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
