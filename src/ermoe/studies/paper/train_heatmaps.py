"""Figure 3: which classes use which experts, early and late in training, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from ermoe.analysis import plots
from ermoe.explore.inspection import short
from ermoe.studies.figures import cell, figures_of, verdict
from ermoe.studies.paper import images
from ermoe.studies.paper.images import PAPER_RULE, Variant
from ermoe.studies.paper.study import Findings, Job, Record, Setup, Study
from ermoe.train.run_folder import RunFolder


def jobs(setup: Setup) -> list[Job]:
    """One training a seed, of which models of several epochs are kept."""
    return [Job(PAPER_RULE, seed, partial(watch, setup, seed)) for seed in setup.each_seed()]


def watch(setup: Setup, seed: int) -> dict[str, Any]:
    """By epoch and layer: mean mixing weight of every class and expert, bits, load, and fallback."""
    data = images.source(setup)
    variant = Variant(PAPER_RULE, training={"keep_every": 50 if setup.is_full else 1})
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


def findings(setup: Setup, records: Sequence[Record]) -> Findings:
    """Bits that the expert tells about the class, by epoch and layer; the maps of the first seed."""
    epochs = records[0]["figures"]["epochs"]
    layers = list(next(iter(epochs.values())))
    header = ["epoch", *(f"class bits, {layer}" for layer in layers), *(f"fallback, {layer}" for layer in layers)]
    rows = []
    for epoch in epochs:
        bits = [cell(figures_of(records, PAPER_RULE, "epochs", epoch, layer, "bits"), ".3f") for layer in layers]
        fell = [cell(figures_of(records, PAPER_RULE, "epochs", epoch, layer, "fallback"), ".1%") for layer in layers]
        rows.append([epoch, *bits, *fell])
    first, last = next(iter(epochs)), list(epochs)[-1]
    early, late = (figures_of(records, PAPER_RULE, "epochs", epoch, layers[-1], "bits") for epoch in (first, last))
    shallow = figures_of(records, PAPER_RULE, "epochs", last, layers[0], "bits")
    sentences = [
        "Paper: preferences sharpen with training and with depth.",
        verdict(late, early, larger=f"epoch {last}", smaller=f"epoch {first}", what="class bits, deepest", form=".3f"),
        verdict(late, shallow, larger="the deepest", smaller="the first layer", what="class bits, last", form=".3f"),
    ]
    return Findings(header, rows, sentences, _maps(epochs, records[0]["figures"]["classes"]))


def _maps(epochs: dict[str, Any], classes: list[str]) -> Figure:
    layers = list(next(iter(epochs.values())))
    with plots.style():
        height = 0.6 + min(max(0.16 * len(classes), 1.6), 5.0)
        drawing = Figure(figsize=(2.6 * len(layers), height * len(epochs)), layout="constrained")
        grid = drawing.subplots(len(epochs), len(layers), squeeze=False)
        for row, (epoch, found) in zip(grid, epochs.items(), strict=True):
            for axes, layer in zip(row, layers, strict=True):
                share = np.array(found[layer]["weight"], dtype=np.float64)
                plots.draw_class_map(axes, share, classes)
                axes.set_title(f"epoch {epoch}, {layer}", fontsize=8)
    return drawing


STUDY = Study(
    "train-heatmaps",
    "mean mixing weight of every class and expert over training",
    "four layers of ViT-B/16 during 300 epochs of ImageNet; heat maps, no numbers.",
    images.describe,
    jobs,
    findings,
)
