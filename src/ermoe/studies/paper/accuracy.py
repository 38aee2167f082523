"""How accurate ERMoE is beside other mixtures: Tables 1 and 2, Supplements 10 (its parts) and 13 (expert choice)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from ermoe.errors import UserError
from ermoe.images.probe import READINGS, features, probe
from ermoe.images.run import LabelledImages
from ermoe.nn import moe_layers
from ermoe.studies.figures import Runs
from ermoe.studies.paper import images
from ermoe.studies.paper.images import LABELS, OFFSETS, PAPER_RULE, Variant
from ermoe.studies.paper.setup import Setup
from ermoe.studies.paper.study import Findings, every, study

_TABLE_1 = {
    "v-moe": ("87.41", "97.94"),
    "single-gated": ("72.38", "93.26"),
    "deep-moe": ("77.12", "95.07"),
    PAPER_RULE: ("88.03", "98.97"),
    OFFSETS: ("–", "–"),
    "dense": ("–", "–"),
}
_TABLE_2 = {  # CIFAR-10, CIFAR-100, Tiny-ImageNet, each with 5 and 10 shots
    "v-moe": "94.62/98.94, 89.49/91.26, 81.12/83.16",
    "single-gated": "90.30/94.79, 74.85/76.62, 60.45/62.49",
    "deep-moe": "90.28/93.46, 68.81/70.58, 55.46/57.49",
    PAPER_RULE: "96.05/98.79, 93.47/96.94, 83.17/85.04",
    OFFSETS: "–",
}
_SUPPLEMENT_13 = {"expert-choice": "78.95", PAPER_RULE: "88.03", OFFSETS: "–"}
_SHOTS = (5, 10)


def train(setup: Setup, method: str, seed: int) -> dict[str, float]:
    """Accuracies of the last evaluation."""
    figures = images.trained(setup, Variant(method, method), seed, images.source(setup)).figures
    return {name: figures[name] for name in ("top1", "top5", "loss", "load_cv2") if name in figures}


@study(
    "accuracy of ERMoE and of other mixtures of experts for vision",
    "ViT-B/16 from ImageNet weights, fine-tuned on ImageNet-1K for 300 epochs; the two others on ResNet-18.",
    images.describe,
    every(_TABLE_1, train),
)
def imagenet(runs: Runs) -> Findings:
    """A row for each method."""
    header = ["method", "paper: top-1", "top-1", "paper: top-5", "top-5"]
    rows = [[LABELS[m], top1, runs.cell(m, "top1"), top5, runs.cell(m, "top5")] for m, (top1, top5) in _TABLE_1.items()]
    sentences = [
        runs.verdict((PAPER_RULE, "ERMoE"), (other, LABELS[other]), "top1", what="top-1", form=".1%")
        for other in ("v-moe", "dense", OFFSETS)
    ]
    return Findings(header, rows, sentences)


@study(
    "accuracy of expert choice beside ERMoE",
    "ImageNet, the settings of Table 1; 9.1 points between the two.",
    images.describe,
    every(_SUPPLEMENT_13, train),
)
def expert_choice(runs: Runs) -> Findings:
    """A row for each method."""
    rows = [[LABELS[method], paper, runs.cell(method, "top1")] for method, paper in _SUPPLEMENT_13.items()]
    ours, other = (PAPER_RULE, "ERMoE"), ("expert-choice", "expert choice")
    sentence = runs.verdict(ours, other, "top1", what="top-1", form=".1%")
    return Findings(["method", "paper: top-1", "top-1"], rows, [sentence])


def sources(setup: Setup) -> tuple[LabelledImages, LabelledImages]:
    """What features are learned from, and what they are probed on: two data sets, or two halves of the classes."""
    if setup.pretrain is not None:
        return images.source(setup, setup.pretrain), images.source(setup)
    if setup.is_full:
        raise UserError("--scale full probes features learned elsewhere: name that data set with --pretrain")
    return images.halves(images.source(setup))


def _describe(setup: Setup) -> str:
    """The two data sets, in a sentence."""
    first, second = sources(setup)
    return (
        f"{images.describe(setup)} Features are learned from: {first.train.summary}; frozen and probed on: "
        f"{second.train.summary}."
    )


def _probed(setup: Setup, method: str, seed: int) -> dict[str, Any]:
    """Probes of one model, on classes that trained no feature of it."""
    first, second = sources(setup)
    return probes(images.trained(setup, Variant(method, method), seed, first).model, second, seed)


def probes(model: nn.Module, data: LabelledImages, seed: int, shots: Sequence[int] = _SHOTS) -> dict[str, Any]:
    """Accuracy by reading and number of shots, with half of its 95 % interval over five draws."""
    given = features(model, data.train, data.test)
    found: dict[str, Any] = {}
    for reading in READINGS:
        for n in shots:
            result = probe(given, data.train, reading=reading, shots=n, seed=seed)
            found[f"{reading}-{n}"] = {"mean": result.mean, "half_width_95": result.half_width}
    return found


@study(
    "linear probes of frozen features",
    "features from ImageNet, frozen; a linear head trained for 5 and 10 epochs on CIFAR-10, CIFAR-100, Tiny-ImageNet.",
    _describe,
    every(_TABLE_2, _probed),
)
def few_shot(runs: Runs) -> Findings:
    """A row for each method, in both readings of "shot"."""
    words = {"images": "images a class", "epochs": "epochs"}
    titles = {f"{reading}-{n}": f"{n} {words[reading]}" for reading in READINGS for n in _SHOTS}
    header = ["method", "paper (5/10: CIFAR-10, CIFAR-100, Tiny-ImageNet)", *titles.values()]
    rows = [[LABELS[m], paper, *(runs.cell(m, key, "mean") for key in titles)] for m, paper in _TABLE_2.items()]
    sentences = [
        runs.verdict((PAPER_RULE, "ERMoE"), ("v-moe", "V-MoE"), key, "mean", what=title, form=".1%")
        for key, title in titles.items()
    ]
    sentences.append(
        "The paper calls a head trained for 5 epochs on all images 5-shot; elsewhere 5-shot means 5 images a class. "
        "Its text gives ERMoE a lead of 7 points on Tiny-ImageNet; its table says 2."
    )
    return Findings(header, rows, sentences)


def square_bases(model: nn.Module) -> None:
    """Routes by all columns of full-rank bases, r = D, which the layer itself refuses: every expert scores the same."""
    for layer in moe_layers(model).values():
        if layer.score is not None:
            layer.score.route_rank = layer.experts.dim


FULL = Variant("ERMoE (paper's rule)")
PARTS: dict[str, tuple[Variant, tuple[str, str, str]]] = {
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
"""Variants of the method by name, with the paper's 5-shot accuracy, load CV² and fallback in per cent."""


def _ablated(setup: Setup, name: str, seed: int) -> dict[str, Any]:
    """5-shot probes of a variant, and the routing of the probed test images."""
    first, second = sources(setup)
    result = images.trained(setup, PARTS[name][0], seed, first)
    recorder = images.routed(result.model, second)
    measured = ("load_cv2", "weight_cv2", "fallback_rate", "spread", "margin", "subspace_overlap")
    return {
        **probes(result.model, second, seed, shots=(5,)),
        "top1": result.figures["top1"],
        **{measure: images.mean_over_layers(recorder, measure) for measure in measured},
    }


@study(
    "what each part of the method contributes",
    "CIFAR-10, 5-shot, features from ImageNet; 8 experts, k = 2, T = 0.5.",
    _describe,
    every(PARTS, _ablated),
)
def ablation(runs: Runs) -> Findings:
    """A row for each variant: the paper's three, its full method, and four of ours."""
    header = ["variant", "paper: 5-shot", "5 epochs", "5 images a class", "accuracy where trained"]
    header += ["paper: load CV²", "load CV²", "paper: fallback %", "fallback", "spread of scores"]
    rows, sentences = [], []
    for name, (_, (shot, load, fallback)) in PARTS.items():
        row = [name, shot, runs.cell(name, "epochs-5", "mean"), runs.cell(name, "images-5", "mean")]
        row += [runs.cell(name, "top1"), load, runs.cell(name, "load_cv2", style=".3f")]
        row += [fallback, runs.cell(name, "fallback_rate", style=".1%"), runs.cell(name, "spread", style=".3f")]
        rows.append(row)
        if name != FULL.name:
            pair = (FULL.name, "the full method"), (name, name)
            sentences.append(runs.verdict(*pair, "epochs-5", "mean", what="5 epochs", form=".1%"))
            sentences.append(runs.verdict(*pair, "load_cv2", what="load CV²"))
    return Findings(header, rows, sentences)
