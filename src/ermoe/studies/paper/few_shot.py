"""Table 2: linear probes with 5 and 10 shots, in both readings of "shot", on classes that trained no feature."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from ermoe.errors import UserError
from ermoe.images.probe import READINGS, features, probe
from ermoe.images.run import LabelledImages
from ermoe.studies.figures import cell, figures_of, verdict
from ermoe.studies.paper import images
from ermoe.studies.paper.images import LABELS, OFFSETS, PAPER_RULE, Variant
from ermoe.studies.paper.study import Findings, Record, Setup, Study, every

SHOTS = (5, 10)
PAPER = {  # CIFAR-10, CIFAR-100, Tiny-ImageNet, each with 5 and 10 shots
    "v-moe": "94.62/98.94, 89.49/91.26, 81.12/83.16",
    "single-gated": "90.30/94.79, 74.85/76.62, 60.45/62.49",
    "deep-moe": "90.28/93.46, 68.81/70.58, 55.46/57.49",
    PAPER_RULE: "96.05/98.79, 93.47/96.94, 83.17/85.04",
    OFFSETS: "–",
}


def sources(setup: Setup) -> tuple[LabelledImages, LabelledImages]:
    """What features are learned from, and what they are probed on: two data sets, or two halves of the classes."""
    if setup.pretrain is not None:
        return images.source(setup, setup.pretrain), images.source(setup)
    if setup.is_full:
        raise UserError("--scale full probes features learned elsewhere: name that data set with --pretrain")
    return images.halves(images.source(setup))


def describe(setup: Setup) -> str:
    """The two data sets, in a sentence."""
    first, second = sources(setup)
    return (
        f"{images.describe(setup)} Features are learned from: {first.train.summary}; frozen and probed on: "
        f"{second.train.summary}."
    )


def measure(setup: Setup, method: str, seed: int) -> dict[str, Any]:
    """Probes of one model."""
    first, second = sources(setup)
    return probes(images.trained(setup, Variant(method, method), seed, first).model, second, seed)


def probes(model: nn.Module, data: LabelledImages, seed: int, shots: Sequence[int] = SHOTS) -> dict[str, Any]:
    """Accuracy by reading and number of shots, with half of its 95 % interval over five draws."""
    given = features(model, data.train, data.test)
    found: dict[str, Any] = {}
    for reading in READINGS:
        for n in shots:
            result = probe(given, data.train, reading=reading, shots=n, seed=seed)
            found[f"{reading}-{n}"] = {"mean": result.mean, "half_width_95": result.half_width}
    return found


def findings(setup: Setup, records: Sequence[Record]) -> Findings:
    """A row for each method."""
    keys = [f"{reading}-{n}" for reading in READINGS for n in SHOTS]
    titles = [f"{n} {'images a class' if reading == 'images' else 'epochs'}" for reading in READINGS for n in SHOTS]
    header = ["method", "paper (5/10: CIFAR-10, CIFAR-100, Tiny-ImageNet)", *titles]
    rows = [
        [LABELS[m], paper, *(cell(figures_of(records, m, key, "mean")) for key in keys)] for m, paper in PAPER.items()
    ]
    sentences = [
        verdict(
            figures_of(records, PAPER_RULE, key, "mean"),
            figures_of(records, "v-moe", key, "mean"),
            larger="ERMoE",
            smaller="V-MoE",
            what=title,
            form=".1%",
        )
        for key, title in zip(keys, titles, strict=True)
    ]
    sentences.append(
        "The paper calls a head trained for 5 epochs on all images 5-shot; elsewhere 5-shot means 5 images a class. "
        "Its text gives ERMoE a lead of 7 points on Tiny-ImageNet; its table says 2."
    )
    return Findings(header, rows, sentences)


STUDY = Study(
    "few-shot",
    "linear probes of frozen features",
    "features from ImageNet, frozen; a linear head trained for 5 and 10 epochs on CIFAR-10, CIFAR-100, Tiny-ImageNet.",
    describe,
    every(PAPER, measure),
    findings,
)
