"""The picture of the README: digits coloured by ERMoE's experts, beside what each model reaches at which cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from PIL import Image

from ermoe.analysis import plots
from ermoe.data.images import Images, open_images
from ermoe.explorer.patches import patch_experts, patch_grid, tinted
from ermoe.files import StrPath, replacing
from ermoe.images.run import transform_for
from ermoe.models.io import load
from ermoe.nn import moe_layers
from ermoe.studies.demo_table import Row
from ermoe.train.run_folder import model_folder

_STROKE = 0.75  # how dark the ink of a digit is drawn
_OURS = ("ERMoE", "slim")
_CROWDED = 0.2  # of the dense operations: nearer than that, names overlap


@torch.no_grad()
def write_picture(rows: Sequence[Row], path: StrPath) -> Path:
    """One held-out digit of each class by the experts of ERMoE's last layer, and accuracy against operations."""
    images = open_images("digits", "test")
    ermoe = load(model_folder(next(row.place for row in rows if row.name == "ERMoE"))).eval()
    washes = plots.expert_washes(list(moe_layers(ermoe).values())[-1].experts.num_experts)
    with plots.style():
        drawing = Figure(figsize=(10, 3.25), layout="constrained", dpi=150)
        left, right = drawing.subfigures(1, 2, squeeze=False, width_ratios=(1.5, 1), wspace=0.05)[0]
        left.suptitle("Patches go to the experts whose basis they fit", x=0.01, ha="left", fontsize=12)
        for axes, picture in zip(left.subplots(2, 5).flat, _digits_by_expert(ermoe, images, washes), strict=True):
            axes.imshow(picture, interpolation="none")
            axes.set_axis_off()
        swatches = [Patch(color=wash, label=str(expert)) for expert, wash in enumerate(washes)]
        named = [Patch(alpha=0, label="expert"), *swatches]
        left.legend(handles=named, loc="outside lower left", ncols=len(named), handlelength=1, columnspacing=1.4)
        right.suptitle("What it costs, what it reaches", x=0.01, ha="left", fontsize=12)
        _draw_costs(right.subplots(), rows, len(images))
        with replacing(path) as draft:
            drawing.savefig(draft, format="png", metadata={"Software": None})
    return Path(path)


def _digits_by_expert(model: torch.nn.Module, images: Images, washes: Sequence[str]) -> list[Image.Image]:
    transform = transform_for(model)
    first_C = torch.stack([(images.label_N == digit).nonzero()[0, 0] for digit in range(10)]).numpy()
    ink_CSS = torch.stack([images.read(int(index))[0] for index in first_C]).float() / 255
    batch = transform.of(images).finish(transform.host(images, first_C, 0), first_C, 0, torch.device("cpu"))
    expert_CHW = list(patch_experts(model, batch.image, patch_grid(model, batch.image)).values())[-1]
    brightness = (1 - _STROKE * ink_CSS).numpy()
    return [tinted(image, expert, washes) for image, expert in zip(brightness, expert_CHW.numpy(), strict=True)]


def _draw_costs(axes: Axes, rows: Sequence[Row], num_images: int) -> None:
    """Held-out accuracy, in per cent with its 95 % interval, against operations."""
    shares = [row.operations / rows[0].operations for row in rows]
    for row, share in zip(rows, shares, strict=True):
        half_width = 1.96 * math.sqrt(row.accuracy * (1 - row.accuracy) / num_images)
        colour = plots.ACCENT if row.name in _OURS else plots.MUTED
        axes.errorbar(share, 100 * row.accuracy, 100 * half_width, fmt="o", color=colour, markersize=6, linewidth=1.4)
        is_crowded = any(0 < other - share < _CROWDED for other in shares)  # then its name stands on the left
        offset, side = ((-7, 5), "right") if is_crowded else ((7, 5), "left")
        axes.annotate(row.name, (share, 100 * row.accuracy), offset, textcoords="offset points", ha=side, color=colour)
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.yaxis.set_major_formatter("{x:.0f}%")
    axes.set(xlabel="operations ÷ dense", ylabel="accuracy, held-out digits")
    axes.set_xlim(min(0.5, *shares) - 0.1, max(shares) + 0.25)
    axes.set_xticks(np.arange(0.5, max(shares) + 0.2, 0.25))
