"""The picture of the README: digits coloured by ERMoE's experts, beside the loads of all sparse models."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ermoe.analysis import plots
from ermoe.analysis.recorder import record_routing
from ermoe.data.images import open_images
from ermoe.explore.patches import patch_experts, patch_grid, tinted
from ermoe.files import StrPath, replacing
from ermoe.images.run import transform_for
from ermoe.models.io import load
from ermoe.train.loader import Loader
from ermoe.train.run_folder import RunFolder

_COLOURS = {"learned gate": "#d97706", "V-MoE": "#8b5fbf", "ERMoE": plots.ACCENT}
_STROKE = 0.75  # how dark the ink of a digit is drawn


@torch.no_grad()
def write_picture(runs: Mapping[str, Path], path: StrPath) -> Path:
    """One held-out digit of each class by the experts of ERMoE's last layer, and that layer's loads in each model."""
    images = open_images("digits", "test")
    models = {name: load(RunFolder(runs[name]).final).eval() for name in _COLOURS}
    loads = {}
    for name, model in models.items():
        with record_routing(model) as recorder:
            for (batch,) in Loader(transform_for(model).of(images)).epoch():
                model(batch.image)
        loads[name] = list(recorder.tallies.values())[-1].totals.count_E
    ermoe, transform = models["ERMoE"], transform_for(models["ERMoE"])
    first_C = torch.stack([(images.label_N == digit).nonzero()[0, 0] for digit in range(10)]).numpy()
    ink_CSS = torch.stack([images.read(int(index))[0] for index in first_C]).float() / 255
    batch = transform.of(images).finish(transform.host(images, first_C, 0), first_C, 0, torch.device("cpu"))
    expert_CHW = list(patch_experts(ermoe, batch.image, patch_grid(ermoe, batch.image)).values())[-1]
    washes = plots.expert_washes(8)
    brightness = (1 - _STROKE * ink_CSS).numpy()
    pictures = [tinted(image, expert, washes) for image, expert in zip(brightness, expert_CHW.numpy(), strict=True)]
    with plots.style():
        drawing = Figure(figsize=(10, 3.25), layout="constrained", dpi=150)
        left, right = drawing.subfigures(1, 2, squeeze=False, width_ratios=(1.5, 1), wspace=0.05)[0]
        left.suptitle("Patches go to the experts whose basis they fit", x=0.01, ha="left", fontsize=12)
        for axes, picture in zip(left.subplots(2, 5).flat, pictures, strict=True):
            axes.imshow(picture, interpolation="none")
            axes.set_axis_off()
        swatches = [Patch(color=wash, label=str(expert)) for expert, wash in enumerate(washes)]
        named = [Patch(alpha=0, label="expert"), *swatches]
        left.legend(handles=named, loc="outside lower left", ncols=len(named), handlelength=1, columnspacing=1.4)
        right.suptitle("Every expert gets equal work", x=0.01, ha="left", fontsize=12)
        plots.draw_load_curves(right.subplots(), loads, list(_COLOURS.values()))
        with replacing(path) as draft:
            drawing.savefig(draft, format="png", metadata={"Software": None})
    return Path(path)
