"""Pictures of a brain-age run. Each function makes one figure, as wide as a phone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray
from PIL import Image
from scipy import ndimage

from ermoe.analysis import plots
from ermoe.analysis.page import Markup, figure, svg
from ermoe.analysis.plots import ACCENT, INK, MUTED, Curve, Scale, expert_colours, panel, style
from ermoe.brain.data.preprocess import Volume
from ermoe.brain.data.scans import TISSUES
from ermoe.brain.metrics import FEWEST, Array, figures
from ermoe.brain.regions import NUM_REGIONS, expert_name
from ermoe.files import replacing

_PART_COLOURS = {"train": "#c3cad5", "validation": "#edc948", "test": ACCENT}


class Album:
    """Figures that go on the page as SVG and into the derivative as PNG."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def panel(self, drawing: Figure, name: str, title: str, caption: str = "") -> Markup:
        """The figure on the page; its file is ``NAME.png``."""
        with replacing(self.folder / f"{name}.png") as draft:
            drawing.savefig(draft, format="png", dpi=150)
        return figure(svg(drawing, name), title, caption)


def scatter(age_N: Array, predicted_N: Array, group_N: Sequence[str]) -> Figure:
    """Predicted against chronological age, points by group, with the identity and the line through all of them."""
    names = sorted(set(group_N))
    with panel(3.9) as (drawing, axes):
        shown = np.concatenate([age_N, predicted_N])
        margin = 0.04 * float(np.ptp(shown)) + 1
        low, high = float(shown.min()) - margin, float(shown.max()) + margin
        axes.plot([low, high], [low, high], color=MUTED, linewidth=1, linestyle=(0, (4, 3)), label="identity")
        for name, colour in zip(names, expert_colours(len(names)), strict=True):
            rows = np.array([own == name for own in group_N])
            axes.scatter(
                age_N[rows],
                predicted_N[rows],
                s=18,
                color=colour,
                alpha=0.8,
                linewidths=0,
                label=f"{name} ({rows.sum()})",
            )
        if len(age_N) >= FEWEST and np.ptp(age_N) > 0:
            slope, intercept = np.polyfit(age_N, predicted_N, 1)
            ends = np.array([age_N.min(), age_N.max()])
            label = f"{intercept:.1f} {slope:+.2f} · age"
            axes.plot(ends, intercept + slope * ends, color=INK, linewidth=1.6, label=label)
        axes.set(xlim=(low, high), ylim=(low, high), xlabel="chronological age", ylabel="predicted age")
        axes.set_aspect("equal")
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3, handlelength=1.4)
    return drawing


def gap_against_age(age_N: Array, predictions: Mapping[str, Array]) -> Figure:
    """The gap against age, one panel for each kind of prediction, before and after calibration."""
    with style():
        drawing = Figure(figsize=(4.1, 0.5 + 1.7 * len(predictions)), layout="constrained")
        panels = drawing.subplots(len(predictions), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
        for axes, (name, predicted_N) in zip(panels, predictions.items(), strict=True):
            gap_N = predicted_N - age_N
            axes.axhline(0, color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
            axes.scatter(age_N, gap_N, s=12, color=ACCENT, alpha=0.75, linewidths=0)
            if len(age_N) >= FEWEST and np.ptp(age_N) > 0:
                ends = np.array([age_N.min(), age_N.max()])
                axes.plot(ends, np.polyval(np.polyfit(age_N, gap_N, 1), ends), color=INK, linewidth=1.4)
                name = f"{name}: r = {figures(age_N, predicted_N)['gap_age_r']:.2f}"
            axes.set_title(name)
            axes.set_ylabel("gap (years)")
        panels[-1].set_xlabel("chronological age")
    return drawing


def age_histogram(ages: Mapping[str, Sequence[float]]) -> Figure:
    """How old the people of each part are, parts stacked."""
    parts = {name: values for name, values in ages.items() if len(values)}
    everybody = np.concatenate([np.asarray(values, dtype=float) for values in parts.values()])
    step = 5 if np.ptp(everybody) > 20 else 2
    first, last = step * np.floor(everybody.min() / step), step * np.ceil((everybody.max() + 0.01) / step)
    with panel(2.6) as (drawing, axes):
        colours = [_PART_COLOURS[name] for name in parts]
        edges = np.arange(first, last + step, step)
        axes.hist(
            list(parts.values()), bins=edges.tolist(), stacked=True, color=colours, label=list(parts), rwidth=0.92
        )
        axes.set(xlabel="age", ylabel="scans")
        axes.set_ylim(top=1.3 * axes.get_ylim()[1])
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend(loc="upper left", ncols=3, handlelength=1, borderaxespad=0)
    return drawing


def learning_curves(curves: Mapping[str, Sequence[tuple[float, float]]], label: str) -> Figure:
    """A line for each fold: (epoch, error) pairs."""
    lines = {
        name: Curve([epoch for epoch, _ in points], [error for _, error in points], marked=True)
        for name, points in curves.items()
    }
    return plots.curves(lines, expert_colours(len(lines)), Scale("epoch", label, whole_x=True))


def tissues_by_experts(panels: Mapping[str, Array], highest: float | None = None) -> Figure:
    """How tissues go with experts, one panel for each (3, E): rows are tissues, columns experts.

    ``highest`` is the value of the deepest colour, by default the largest that is shown.
    """
    with style():
        drawing = Figure(figsize=(4.1, 0.75 + 1.15 * len(panels)), layout="constrained")
        every_axes = drawing.subplots(len(panels), 1, squeeze=False)[:, 0]
        largest = highest or max(0.5, *(float(np.abs(value_RE).max()) for value_RE in panels.values()))
        for axes, (name, value_RE) in zip(every_axes, panels.items(), strict=True):
            _draw_matrix(axes, value_RE, largest)
            axes.set_title(name)
        every_axes[-1].set_xlabel("expert")
    return drawing


def _draw_matrix(axes: Axes, value_RE: Array, highest: float) -> None:
    """Tissues against experts, the best of each tissue framed."""
    num_experts = value_RE.shape[1]
    axes.imshow(value_RE, cmap="PiYG", vmin=-highest, vmax=highest, aspect="auto", interpolation="none")
    for (row, column), value in np.ndenumerate(value_RE):
        strong = abs(value) > 0.7 * highest
        axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=7, color="#ffffff" if strong else INK)
    for row, best in enumerate(value_RE.argmax(1)):
        corner = (float(best) - 0.48, row - 0.46)
        axes.add_patch(Rectangle(corner, 0.96, 0.92, fill=False, edgecolor=INK, linewidth=1.3))
    names = [expert_name(expert).replace("_expert", "").replace("free", "f") for expert in range(num_experts)]
    axes.set_xticks(range(num_experts), names)
    axes.set_yticks(range(NUM_REGIONS), list(TISSUES))
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def in_cubes(value_xyz: Array, shape: Sequence[int], patch_size: int) -> Array:
    """What is known of cubes at each of their voxels, (X, Y, Z), without any blending."""
    x, y, z = shape
    full_XYZ: Array = np.kron(value_xyz, np.ones((patch_size,) * 3)).astype(np.float64)
    return full_XYZ[:x, :y, :z]


def occlusion(change_xyz: Array, background_XYZ: Array, inside_XYZ: NDArray[np.bool_], patch_size: int) -> Figure:
    """Three slices through the mean brain, tinted inside it by what hiding each cube does to the predicted age."""
    shape = background_XYZ.shape
    full = np.where(inside_XYZ, in_cubes(change_xyz, shape, patch_size), np.nan)
    highest = max(float(np.nanmax(np.abs(change_xyz))), 1e-6)
    middle = [size // 2 for size in shape]
    cuts = {"axial": (2, middle[2]), "coronal": (1, middle[1]), "sagittal": (0, middle[0])}
    with style():
        drawing = Figure(figsize=(4.1, 1.9), layout="constrained")
        panels = drawing.subplots(1, 3)
        for axes, (name, (axis, position)) in zip(panels, cuts.items(), strict=True):
            axes.imshow(
                np.take(background_XYZ, position, axis).T, origin="lower", cmap="gray", interpolation="bilinear"
            )
            tint = np.take(full, position, axis).T
            tinted = axes.imshow(
                tint, origin="lower", cmap="RdBu_r", vmin=-highest, vmax=highest, alpha=0.55, interpolation="nearest"
            )
            axes.set_title(name, fontsize=8)
            axes.set_axis_off()
        drawing.colorbar(tinted, ax=panels, shrink=0.7, label="change (years)")
    return drawing


_OUTLINE = (0xF2, 0x8E, 0x2B)
_ZOOM = 2


def mosaic(volume: Volume) -> Image.Image:
    """An axial, a coronal and a sagittal slice through the middle of the brain, side by side, outline in orange."""
    t1, mask = np.asarray(volume.t1_XYZ), np.asarray(volume.mask_XYZ)
    where = np.argwhere(mask)
    middle = where.mean(0).round().astype(int) if len(where) else np.array(mask.shape) // 2
    inside = t1[mask] if mask.any() else t1.ravel()
    low, high = np.percentile(inside, [1, 99.5])
    grey = np.where(mask, (t1 - low) / max(high - low, 1e-6), 0).clip(0, 1)
    height = max(mask.shape[1], mask.shape[2])
    panels = [
        _panel(np.take(grey, middle[axis], axis), np.take(mask, middle[axis], axis), height) for axis in (2, 1, 0)
    ]
    picture = Image.fromarray(np.concatenate(panels, axis=1))
    return picture.resize((_ZOOM * picture.width, _ZOOM * picture.height), Image.Resampling.BICUBIC)


def _panel(grey: NDArray[np.float32], mask: NDArray[np.bool_], height: int) -> NDArray[np.uint8]:
    """A slice with its second axis upwards, in colour, padded to a height."""
    colour = np.repeat((255 * grey).astype(np.uint8)[..., None], 3, axis=2)
    colour[mask & ~ndimage.binary_erosion(mask)] = _OUTLINE
    upright = np.flip(colour.swapaxes(0, 1), axis=0)
    missing = height - upright.shape[0]
    return np.pad(upright, ((missing // 2, missing - missing // 2), (0, 0), (0, 0)))
