"""What parts and numbers of the method change from real weights on: Supplements 7, 8 and 10 at scale tiny."""

from __future__ import annotations

from typing import Any

from ermoe.analysis.plots import ACCENT, Curve, Scale, curves
from ermoe.analysis.recorder import record_routing
from ermoe.explorer.inspect import experts_a_token
from ermoe.studies.figures import Runs, mean
from ermoe.studies.paired import paired_verdict
from ermoe.studies.paper import images
from ermoe.studies.paper.accuracy import square_bases
from ermoe.studies.paper.finetuning import answers, contested, points
from ermoe.studies.paper.images import OFFSETS, Variant
from ermoe.studies.paper.setup import Setup
from ermoe.studies.paper.study import Findings, Job, every, study
from ermoe.studies.paper.sweeps import NUMBERS, step_times

FULL = Variant("ERMoE (paper's rule)")
EVEN = Variant("1 added to scores in Eq. 7", sparsity={"weight_floor": 1.0})
PARTS: dict[str, tuple[Variant, tuple[str, str, str]]] = {
    variant.name: (variant, paper)
    for variant, paper in (
        (FULL, ("96.05", "0.08", "0.2")),
        (Variant("normal weights", sparsity={"experts": "dense"}), ("94.12", "0.10", "0.3")),
        (Variant("learned logits", sparsity={"score": "logit"}), ("91.07", "0.32", "2.4")),
        (Variant("lambda = 0", training={"orthogonality": 0.0}), ("95.35", "0.15", "0.7")),
        (Variant("offsets", OFFSETS), ("–", "–", "–")),
        (EVEN, ("–", "–", "–")),
        (Variant("square basis", prepare=square_bases), ("–", "–", "–")),
    )
}
"""Variants of the method by name, with the paper's 5-shot accuracy, load CV² and fallback in per cent."""


@study(
    "what each part of the method contributes",
    "CIFAR-10, 5-shot, features from ImageNet; 8 experts, k = 2, T = 0.5.",
    images.describe,
    every(PARTS, lambda setup, name, seed: contested(setup, PARTS[name][0], seed)),
)
def ablation(runs: Runs) -> Findings:
    """A row for each variant, fine-tuned; mixing weights are Eq. 7 as printed but for one row."""
    header = ["variant", "paper: 5-shot", "accuracy", "over the full method", "paper: load CV²", "load CV²"]
    header += ["paper: fallback %", "fallback", "spread of scores"]
    rows, sentences = [], []
    for name, (_, (shot, load, fallback)) in PARTS.items():
        row = [name, shot, runs.cell(name, "top1"), points(runs, (name,), (FULL.name,))]
        row += [load, runs.cell(name, "load_cv2", style=".3f"), fallback, runs.cell(name, "fallback_rate", style=".1%")]
        rows.append([*row, runs.cell(name, "spread", style=".3f")])
        if name != FULL.name:
            sentences.append(paired_verdict(runs, ((FULL.name,), "the full method"), ((name,), name)))
            pair = (FULL.name, "the full method"), (name, name)
            sentences.append(runs.verdict(*pair, "load_cv2", what="load CV²"))
    return Findings(header, rows, sentences)


_LAMBDAS = {
    "lambda-0": (0.0, PARTS["lambda = 0"][0], "under-regularised"),
    "lambda-5e-05": (5e-5, FULL, "lowest loss"),
    "lambda-0.01": (1e-2, Variant("lambda-0.01", training={"orthogonality": 1e-2}), "dominates"),
}
"""λ, the variant that learns with it, and what the paper says of it."""


def _with_lambda(setup: Setup, name: str, seed: int) -> dict[str, Any]:
    weight, variant, _ = _LAMBDAS[name]
    found = contested(setup, variant, seed)
    return {**found, "combined_loss": found["loss"] + weight * found["penalty"]}


@study(
    "validation loss against the weight λ of the orthogonality loss",
    "λ from 0 to 0.01, 15 epochs on 10 % of ImageNet; a U-shaped curve with its minimum at 5e-5, no numbers.",
    images.describe,
    every(_LAMBDAS, _with_lambda),
)
def lambda_(runs: Runs) -> Findings:
    """A row for none, the paper's and a large λ."""
    header = ["λ", "paper", "test loss", "with λ · penalty", "accuracy", "over λ = 5e-5", "drift ‖UᵀU−I‖₂", "load CV²"]
    rows = []
    for name, (weight, _, paper) in _LAMBDAS.items():
        losses = [runs.cell(name, figure, style=".4f") for figure in ("loss", "combined_loss")]
        row = [f"{weight:g}", paper, *losses, runs.cell(name, "top1"), points(runs, (name,), ("lambda-5e-05",))]
        rows.append([*row, runs.cell(name, "drift", style=".2g"), runs.cell(name, "load_cv2", style=".3f")])
    usual = (("lambda-5e-05",), "λ = 5e-5")
    others = {"lambda-0": "λ = 0", "lambda-0.01": "λ = 0.01"}
    sentences = [paired_verdict(runs, usual, ((name,), label)) for name, label in others.items()]
    return Findings(header, rows, sentences)


_SWEPT = {FULL.name: FULL, EVEN.name: EVEN}
_RETRAINED = {1: "trained with 1", 4: "trained with 4"}


def _each_k(setup: Setup) -> list[Job]:
    swept = every(_SWEPT, lambda setup, name, seed: _at_each_k(setup, _SWEPT[name], seed))
    retrained = every(list(_RETRAINED.values()), _with_k)
    return [*swept(setup), *retrained(setup)]


def _at_each_k(setup: Setup, variant: Variant, seed: int) -> dict[str, Any]:
    """One model that was trained with two experts a token, at every k."""
    data = images.source(setup)
    model = images.trained(setup, variant, seed, data).model
    found: dict[str, Any] = {}
    for k in NUMBERS:
        with experts_a_token(model, k), record_routing(model) as recorder:
            found[str(k)] = answers(model, data)
        found[str(k)]["tail_mass"] = mean([tally.tail_mass(k) for tally in recorder.tallies.values()])
    for k_name, ratio in step_times(model, data, rounds=3).items():
        found[k_name]["time"] = ratio
    return found


def _with_k(setup: Setup, name: str, seed: int) -> dict[str, Any]:
    return contested(setup, Variant(name, sparsity={"top_k": int(name.split()[-1])}), seed)


@study(
    "accuracy, tail mass and time against the number of experts a token",
    "k in 1, 2, 3, 4, 6 at T = 0.5 on Tiny-ImageNet; a figure without numbers, best at k = 2, tail mass said to rise.",
    images.describe,
    _each_k,
)
def top_k(runs: Runs) -> Findings:
    """A row for each k, of a model that was trained with 2; fewer of models that had k from the start."""
    header = [
        "k",
        "paper",
        "accuracy, swept",
        "over k = 2",
        f"swept, {EVEN.name}",
        "retrained",
        "over k = 2, retrained",
    ]
    header += ["tail mass, swept", "time of a pass, k = 2 is 1"]
    two = (FULL.name, "2")
    rows = []
    for k, paper in NUMBERS.items():
        own = (FULL.name, str(k))
        anew = two if k == 2 else (_RETRAINED.get(k, "–"),)
        row = [str(k), paper, runs.cell(*own, "top1"), points(runs, own, two), runs.cell(EVEN.name, str(k), "top1")]
        row += [runs.cell(*anew, "top1"), points(runs, anew, two), runs.cell(*own, "tail_mass", style=".1%")]
        rows.append([*row, runs.cell(*own, "time", style=".2f")])
    lines = {
        label: Curve(list(NUMBERS), [runs.mean(name, str(k), figure) for k in NUMBERS], marked=True, dashed=dashed)
        for label, name, figure, dashed in (
            ("accuracy, Eq. 7 as printed", FULL.name, "top1", False),
            (f"accuracy, {EVEN.name}", EVEN.name, "top1", False),
            ("tail mass", FULL.name, "tail_mass", True),
        )
    }
    drawing = curves(lines, [ACCENT, "#d97706", "#667085"], Scale("experts a token, k", "", percent=True, whole_x=True))
    called = {name: ((name,), f"{k} expert{'s' * (k > 1)}, retrained") for k, name in _RETRAINED.items()}
    sentences = [paired_verdict(runs, (two, "two experts a token"), other) for other in called.values()]
    return Findings(header, rows, sentences, drawing)
