"""Supplement 7: how the weight λ of the orthogonality loss changes what is learned."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from ermoe.analysis.curve_plots import Curve, Scale, curves
from ermoe.analysis.plots import ACCENT
from ermoe.studies.figures import cell, deviation, figures_of, mean
from ermoe.studies.paper import images
from ermoe.studies.paper.images import Variant
from ermoe.studies.paper.study import Findings, Job, Record, Setup, Study

LAMBDAS = (0.0, 1e-6, 1e-5, 5e-5, 1e-4, 1e-3, 1e-2)
_PAPER = {0.0: "under-regularised", 1e-6: "under-regularised", 1e-5: "under-regularised", 5e-5: "lowest loss"}
_PAPER |= {1e-4: "–", 1e-3: "dominates", 1e-2: "dominates"}
# Within an epoch retraction would hide what λ does; the paper has it at the end of epochs.
_RETRACTION: dict[str, Any] = {"retract_every": 0}
_SMALLEST_DRAWN = 1e-7  # where a logarithmic axis shows 0


def name_of(weight: float) -> str:
    """The name of a run."""
    return f"lambda-{weight:g}"


def jobs(setup: Setup) -> list[Job]:
    """A training for each λ and seed."""
    return [
        Job(name_of(weight), seed, partial(train, setup, weight, seed))
        for seed in setup.each_seed()
        for weight in LAMBDAS
    ]


def train(setup: Setup, weight: float, seed: int) -> dict[str, float]:
    """Validation loss, alone and with λ times the penalty that the bases had before their last retraction."""
    variant = Variant(name_of(weight), training={"orthogonality": weight, **_RETRACTION})
    result = images.trained(setup, variant, seed, images.source(setup))
    names = ("loss", "top1", "load_cv2", "fallback_rate", "drift", "penalty")
    figures = {name: result.figures[name] for name in names if name in result.figures}
    return {**figures, "combined_loss": figures["loss"] + weight * figures["penalty"]}


def findings(setup: Setup, records: Sequence[Record]) -> Findings:
    """One row for each λ."""
    header = ["λ", "paper", "validation loss", "with λ · penalty", "accuracy", "drift ‖UᵀU−I‖₂", "load CV²", "fallback"]
    styles = {"loss": ".4f", "combined_loss": ".4f", "top1": ".2%", "drift": ".2g", "load_cv2": ".3f"}
    styles |= {"fallback_rate": ".1%"}
    rows = [
        [f"{w:g}", _PAPER[w], *(cell(figures_of(records, name_of(w), name), style) for name, style in styles.items())]
        for w in LAMBDAS
    ]
    lines = {}
    for label, name in (("validation loss", "loss"), ("with λ · penalty", "combined_loss")):
        values = [figures_of(records, name_of(w), name) for w in LAMBDAS]
        place = [max(w, _SMALLEST_DRAWN) for w in LAMBDAS]
        lines[label] = Curve(place, [mean(v) for v in values], [deviation(v) for v in values], marked=True)
    scale = Scale("λ (0 drawn at 1e-7)", "loss", log_x=True, from_zero=False, at={"5e-5": 5e-5})
    return Findings(header, rows, _sentences(records), curves(lines, [ACCENT, "#d97706"], scale))


def _sentences(records: Sequence[Record]) -> list[str]:
    loss = {w: figures_of(records, name_of(w), "combined_loss") for w in LAMBDAS}
    best = min(LAMBDAS, key=lambda w: mean(loss[w]))
    gap = mean(loss[5e-5]) - mean(loss[best])
    noise = max(deviation(values) for values in loss.values())
    inside = "inside the spread over seeds" if gap <= noise else "larger than the spread over seeds"
    drift = {w: mean(figures_of(records, name_of(w), "drift")) for w in (0.0, 5e-5, 1e-2)}
    return [
        f"The lowest mean loss is at λ = {best:g}; 5e-5 is above it by {gap:.4f}, {inside} ({noise:.4f}).",
        "Bases drift within an epoch by "
        + ", ".join(f"{d:.2g} at λ = {w:g}" for w, d in drift.items())
        + "; the retraction after each epoch takes that back, whatever λ is.",
    ]


STUDY = Study(
    "lambda",
    "validation loss against the weight λ of the orthogonality loss",
    "λ from 0 to 0.01, 15 epochs on 10 % of ImageNet; a U-shaped curve with its minimum at 5e-5, no numbers.",
    lambda setup: images.describe(setup, **_RETRACTION),
    jobs,
    findings,
)
