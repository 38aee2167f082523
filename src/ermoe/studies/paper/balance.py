"""Figure 4: how evenly the experts of BASE, Soft MoE, V-MoE and ERMoE are used on test images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ermoe.analysis.curve_plots import Curve, Scale, curves
from ermoe.analysis.plots import ACCENT
from ermoe.explore.inspection import pooled_share
from ermoe.studies.figures import cell, figures_of, verdict
from ermoe.studies.paper import images
from ermoe.studies.paper.images import LABELS, OFFSETS, PAPER_RULE, Variant
from ermoe.studies.paper.study import Findings, Record, Setup, Study, every

METHODS = {
    "base": ("near uniform", "#667085"),
    "soft": ("tail grows with depth", "#2563eb"),
    "v-moe": ("pronounced tail", "#8b5fbf"),
    PAPER_RULE: ("nearly flat", ACCENT),
    OFFSETS: ("–", "#d97706"),
}


def examine(setup: Setup, method: str, seed: int) -> dict[str, Any]:
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


def findings(setup: Setup, records: Sequence[Record]) -> Findings:
    """A row for each method, and all experts of all layers sorted by usage."""
    header = ["method", "paper", "load CV²", "weight CV²", "max / mean load", "busiest expert", "accuracy"]
    rows, lines = [], {}
    for method, (paper, _) in METHODS.items():
        shares = [np.asarray(share) for share in figures_of(records, method, "share")]
        mean_share = np.mean(shares, axis=0)
        busiest = [float(share[0]) * len(share) for share in shares]
        rows.append(
            [
                LABELS[method],
                paper,
                *(cell(figures_of(records, method, name), ".3f") for name in ("load_cv2", "weight_cv2", "max_load")),
                cell(busiest, ".2f"),
                cell(figures_of(records, method, "top1"), ".2%"),
            ]
        )
        lines[LABELS[method]] = Curve(range(1, len(mean_share) + 1), mean_share * len(mean_share))
    scale = Scale("experts of all layers, busiest first", "load / mean load", whole_x=True)
    colours = [colour for _, colour in METHODS.values()]
    load = {method: figures_of(records, method, "load_cv2") for method in METHODS}
    sentences = [
        verdict(load["v-moe"], load[PAPER_RULE], larger="V-MoE", smaller="the paper's rule", what="load CV²"),
        verdict(load["base"], load[PAPER_RULE], larger="BASE", smaller="the paper's rule", what="load CV²"),
        verdict(load[PAPER_RULE], load[OFFSETS], larger="the paper's rule", smaller="offsets", what="load CV²"),
    ]
    return Findings(header, rows, sentences, curves(lines, colours, scale))


STUDY = Study(
    "balance",
    "how evenly experts are used on test images",
    "128 experts (16 layers × 8; a ViT-B has 12 blocks) on Tiny-ImageNet and ImageNet; curves without numbers.",
    images.describe,
    every(METHODS, examine),
    findings,
)
