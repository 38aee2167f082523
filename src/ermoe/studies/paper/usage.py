"""Which experts are used: how evenly, beside other routers (Fig. 4), and by which classes during training (Fig. 3)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from ermoe.analysis import plots
from ermoe.analysis.plots import Curve, Scale, curves
from ermoe.explorer.inspection import pooled_share, short
from ermoe.studies.figures import Runs, cell, verdict
from ermoe.studies.paper import images
from ermoe.studies.paper.images import LABELS, OFFSETS, PAPER_RULE, Variant
from ermoe.studies.paper.setup import Setup
from ermoe.studies.paper.study import Findings, every, study
from ermoe.train.run_folder import RunFolder

_FIGURE_4 = {
    "base": ("near uniform", "#667085"),
    "soft": ("tail grows with depth", "#2563eb"),
    "v-moe": ("pronounced tail", "#8b5fbf"),
    PAPER_RULE: ("nearly flat", plots.ACCENT),
    OFFSETS: ("–", "#d97706"),
}


def _shares(setup: Setup, method: str, seed: int) -> dict[str, Any]:
    """The share of every expert, and measures of balance, on the test images.

    BASE chooses greedily there; a token of Soft MoE counts for the expert with the largest share in it.
    """
    data = images.source(setup)
    model = images.trained(setup, Variant(method, method), seed, data).model
    figures, recorder = images.examined(model, data)
    measured = ("load_cv2", "weight_cv2", "max_load", "drop_rate")
    return {
        "top1": figures["top1"],
        "share": pooled_share(list(recorder.tallies.values())),
        **{name: images.mean_over_layers(recorder, name) for name in measured},
        "by_layer": {layer: f["load_cv2"] for layer, f in recorder.summary().items()},
    }


@study(
    "how evenly experts are used on test images",
    "128 experts (16 layers × 8; a ViT-B has 12 blocks) on Tiny-ImageNet and ImageNet; curves without numbers.",
    images.describe,
    every(_FIGURE_4, _shares),
)
def balance(runs: Runs) -> Findings:
    """A row for each method, and all experts of all layers sorted by usage."""
    header = ["method", "paper", "load CV²", "weight CV²", "max / mean load", "busiest expert", "accuracy"]
    rows, lines = [], {}
    for method, (paper, _) in _FIGURE_4.items():
        shares = [np.asarray(share) for share in runs.of(method, "share")]
        busiest = cell([float(share[0]) * len(share) for share in shares], ".2f")
        loads = [runs.cell(method, name, style=".3f") for name in ("load_cv2", "weight_cv2", "max_load")]
        rows.append([LABELS[method], paper, *loads, busiest, runs.cell(method, "top1")])
        mean_share = np.mean(shares, axis=0)
        lines[LABELS[method]] = Curve(range(1, len(mean_share) + 1), (mean_share * len(mean_share)).tolist())
    scale = Scale("experts of all layers, busiest first", "load / mean load", whole_x=True)
    ours = (PAPER_RULE, "the paper's rule")
    pairs = [(("v-moe", "V-MoE"), ours), (("base", "BASE"), ours), (ours, (OFFSETS, "offsets"))]
    sentences = [runs.verdict(*pair, "load_cv2", what="load CV²") for pair in pairs]
    return Findings(header, rows, sentences, curves(lines, [colour for _, colour in _FIGURE_4.values()], scale))


def _by_epoch(setup: Setup, method: str, seed: int) -> dict[str, Any]:
    """By epoch and layer of one training: mean mixing weight of every class and expert, bits, load, and fallback."""
    data = images.source(setup)
    variant = Variant(method, training={"keep_every": 50 if setup.is_full else 1})
    folder = images.trained(setup, variant, seed, data).folder
    found: dict[str, Any] = {}
    for epoch, place in _first_middle_last(folder):
        recorder = images.routed(images.loaded(place, variant), data)
        summary = recorder.summary()
        found[str(epoch)] = {
            short(layer): {
                "weight": plots.class_shares(tally.totals.weight_CE[:-1].cpu().numpy()).round(4).tolist(),
                "bits": summary[layer]["class_information"],
                "load_cv2": summary[layer]["load_cv2"],
                "fallback": summary[layer]["fallback_rate"],
            }
            for layer, tally in recorder.tallies.items()
        }
    return {"epochs": found, "classes": data.test.classes}


def _first_middle_last(folder: Path) -> list[tuple[int, Path]]:
    kept = sorted(RunFolder(folder).kept(0).parent.glob("epoch-*"))
    chosen = sorted({0, len(kept) // 2, len(kept) - 1})
    return [(int(kept[index].name.removeprefix("epoch-")), kept[index]) for index in chosen]


@study(
    "mean mixing weight of every class and expert over training",
    "four layers of ViT-B/16 during 300 epochs of ImageNet; heat maps, no numbers.",
    images.describe,
    every([PAPER_RULE], _by_epoch),
)
def train_heatmaps(runs: Runs) -> Findings:
    """Bits that the expert tells about the class, by epoch and layer; the maps of the first seed."""
    first_seed = runs.records[0]["figures"]
    epochs = first_seed["epochs"]
    layers = list(next(iter(epochs.values())))
    header = ["epoch", *(f"class bits, {layer}" for layer in layers), *(f"fallback, {layer}" for layer in layers)]
    rows = []
    for epoch in epochs:
        bits = [runs.cell(PAPER_RULE, "epochs", epoch, layer, "bits", style=".3f") for layer in layers]
        fell = [runs.cell(PAPER_RULE, "epochs", epoch, layer, "fallback", style=".1%") for layer in layers]
        rows.append([epoch, *bits, *fell])
    first, last = next(iter(epochs)), list(epochs)[-1]
    early, late = (runs.of(PAPER_RULE, "epochs", epoch, layers[-1], "bits") for epoch in (first, last))
    shallow = runs.of(PAPER_RULE, "epochs", last, layers[0], "bits")
    sentences = [
        "Paper: preferences sharpen with training and with depth.",
        verdict(late, early, larger=f"epoch {last}", smaller=f"epoch {first}", what="class bits, deepest", form=".3f"),
        verdict(late, shallow, larger="the deepest", smaller="the first layer", what="class bits, last", form=".3f"),
    ]
    return Findings(header, rows, sentences, maps(epochs, first_seed["classes"]))


def maps(epochs: dict[str, Any], classes: list[str], *, of: str = "epoch") -> Figure:
    """A map of classes and experts for every epoch and layer, from their ``weight``."""
    layers = list(next(iter(epochs.values())))
    with plots.style():
        height = 0.6 + min(max(0.16 * len(classes), 1.6), 5.0)
        drawing = Figure(figsize=(2.6 * len(layers), height * len(epochs)), layout="constrained")
        grid = drawing.subplots(len(epochs), len(layers), squeeze=False)
        for row, (epoch, found) in zip(grid, epochs.items(), strict=True):
            for axes, layer in zip(row, layers, strict=True):
                share = np.array(found[layer]["weight"], dtype=np.float64)
                plots.draw_class_map(axes, share, classes)
                axes.set_title(f"{of} {epoch}, {layer}", fontsize=8)
    return drawing
