"""Supplement 10: what each part of the method contributes, by 5-shot probes, load and fallback."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import nn

from ermoe.nn import moe_layers
from ermoe.studies.figures import cell, figures_of, verdict
from ermoe.studies.paper import images
from ermoe.studies.paper.few_shot import describe, probes, sources
from ermoe.studies.paper.images import Variant
from ermoe.studies.paper.study import Findings, Job, Record, Setup, Study


def square_bases(model: nn.Module) -> None:
    """Routes by all columns of full-rank bases, r = D, which the layer itself refuses: every expert scores the same."""
    for layer in moe_layers(model).values():
        if layer.score is not None:
            layer.score.route_rank = layer.experts.dim


FULL = Variant("ERMoE (paper's rule)")
ROWS: dict[str, tuple[Variant, tuple[str, str, str]]] = {
    variant.name: (variant, paper)
    for variant, paper in (
        (Variant("normal weights", sparsity={"experts": "dense"}), ("94.12", "0.10", "0.3")),
        (Variant("learned logits", sparsity={"score": "logit"}), ("91.07", "0.32", "2.4")),
        (Variant("lambda = 0", training={"orthogonality": 0.0}), ("95.35", "0.15", "0.7")),
        (FULL, ("96.05", "0.08", "0.2")),
        (images.AS_PRINTED, ("–", "–", "–")),
        (Variant("offsets", "ermoe"), ("–", "–", "–")),
        (Variant("mean offsets", "ermoe-mean"), ("–", "–", "–")),
        (Variant("square basis", sparsity={"rank": None}, prepare=square_bases), ("–", "–", "–")),
    )
}


def jobs(setup: Setup) -> list[Job]:
    """A training for each row and seed."""
    return [Job(name, seed, partial(measure, setup, name, seed)) for seed in setup.each_seed() for name in ROWS]


def measure(setup: Setup, name: str, seed: int) -> dict[str, Any]:
    """5-shot probes, and the routing of the probed test images."""
    first, second = sources(setup)
    result = images.trained(setup, ROWS[name][0], seed, first)
    recorder = images.routed(result.model, second)
    measured = ("load_cv2", "weight_cv2", "fallback_rate", "spread", "margin", "subspace_overlap")
    return {
        **probes(result.model, second, seed, shots=(5,)),
        "top1": result.figures["top1"],
        **{measure: images.mean_over_layers(recorder, measure) for measure in measured},
    }


def findings(setup: Setup, records: Sequence[Record]) -> Findings:
    """A row for each variant: the paper's three, its full method, and four of ours."""
    header = ["variant", "paper: 5-shot", "5 epochs", "5 images a class", "accuracy where trained"]
    header += ["paper: load CV²", "load CV²", "paper: fallback %", "fallback", "spread of scores"]
    rows = []
    for name, (_, (shot, load, fallback)) in ROWS.items():
        value = partial(figures_of, records, name)
        row = [name, shot, cell(value("epochs-5", "mean")), cell(value("images-5", "mean")), cell(value("top1"))]
        row += [load, cell(value("load_cv2"), ".3f"), fallback, cell(value("fallback_rate"), ".1%")]
        rows.append([*row, cell(value("spread"), ".3f")])
    sentences = []
    for name in ROWS:
        if name != FULL.name:
            ours, other = (figures_of(records, row, "epochs-5", "mean") for row in (FULL.name, name))
            sentences.append(verdict(ours, other, larger="the full method", smaller=name, what="5 epochs", form=".1%"))
            ours, other = (figures_of(records, row, "load_cv2") for row in (FULL.name, name))
            sentences.append(verdict(ours, other, larger="the full method", smaller=name, what="load CV²"))
    return Findings(header, rows, sentences)


STUDY = Study(
    "ablation",
    "what each part of the method contributes",
    "CIFAR-10, 5-shot, features from ImageNet; 8 experts, k = 2, T = 0.5.",
    describe,
    jobs,
    findings,
)
