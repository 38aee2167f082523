"""Table 1: accuracy on ImageNet of ERMoE and of other mixtures for vision."""

from __future__ import annotations

from collections.abc import Sequence

from ermoe.studies.figures import cell, figures_of, verdict
from ermoe.studies.paper import images
from ermoe.studies.paper.images import LABELS, OFFSETS, PAPER_RULE, Variant
from ermoe.studies.paper.study import Findings, Record, Setup, Study, every

PAPER = {
    "v-moe": ("87.41", "97.94"),
    "single-gated": ("72.38", "93.26"),
    "deep-moe": ("77.12", "95.07"),
    PAPER_RULE: ("88.03", "98.97"),
    OFFSETS: ("–", "–"),
    "dense": ("–", "–"),
}


def train(setup: Setup, method: str, seed: int) -> dict[str, float]:
    """Accuracies of the last evaluation."""
    figures = images.trained(setup, Variant(method, method), seed, images.source(setup)).figures
    return {name: figures[name] for name in ("top1", "top5", "loss", "load_cv2") if name in figures}


def findings(setup: Setup, records: Sequence[Record]) -> Findings:
    """A row for each method."""
    header = ["method", "paper: top-1", "top-1", "paper: top-5", "top-5"]
    rows = [
        [LABELS[m], top1, cell(figures_of(records, m, "top1")), top5, cell(figures_of(records, m, "top5"))]
        for m, (top1, top5) in PAPER.items()
    ]
    ours = {method: figures_of(records, method, "top1") for method in PAPER}
    sentences = [
        verdict(ours[PAPER_RULE], ours[other], larger="ERMoE", smaller=LABELS[other], what="top-1", form=".1%")
        for other in ("v-moe", "dense", OFFSETS)
    ]
    return Findings(header, rows, sentences)


STUDY = Study(
    "imagenet",
    "accuracy of ERMoE and of other mixtures of experts for vision",
    "ViT-B/16 from ImageNet weights, fine-tuned on ImageNet-1K for 300 epochs; the two others on ResNet-18.",
    images.describe,
    every(PAPER, train),
    findings,
)
