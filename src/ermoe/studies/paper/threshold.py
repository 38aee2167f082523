"""Supplement 6: how the fallback rate depends on the threshold T, and what T does to accuracy and load."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from ermoe.analysis.curve_plots import Curve, Scale, curves
from ermoe.analysis.plots import ACCENT
from ermoe.nn import TopKRouter, moe_layers
from ermoe.studies.figures import cell, figures_of, mean
from ermoe.studies.paper import images
from ermoe.studies.paper.images import LABELS, OFFSETS, PAPER_RULE, Variant
from ermoe.studies.paper.study import Findings, Record, Setup, Study, every

THRESHOLDS = [round(0.1 * step, 1) for step in range(10)]
_METHODS = (PAPER_RULE, OFFSETS)
_PAPER = {t: "near zero" if t < 0.5 else "rises" for t in THRESHOLDS}


def sweep(setup: Setup, method: str, seed: int) -> dict[str, Any]:
    """The fallback rate at every T from the scores; accuracy and load at every T where experts below T are pruned."""
    data = images.source(setup)
    model = images.trained(setup, Variant(method, method), seed, data).model
    figures, recorder = images.examined(model, data)
    layers = list(recorder.tallies.values())
    pruned = {}
    for t in THRESHOLDS:
        with pruning(model, t):
            result, at_t = images.examined(model, data)
        pairs = sum(int(tally.totals.count_E.sum()) for tally in at_t.tallies.values())
        tokens = sum(int(tally.totals.num_tokens) for tally in at_t.tallies.values())
        pruned[str(t)] = {
            "top1": result["top1"],
            "load_cv2": images.mean_over_layers(at_t, "load_cv2"),
            "experts_per_token": pairs / tokens,
        }
    return {
        "top1": figures["top1"],
        "load_cv2": images.mean_over_layers(recorder, "load_cv2"),
        "fallback": {str(t): mean([tally.fallback_rate(t) for tally in layers]) for t in THRESHOLDS},
        "pruned": pruned,
    }


@contextmanager
def pruning(model: nn.Module, threshold: float) -> Iterator[None]:
    """Within it, experts below the threshold are left out instead of filling up the choice."""
    layers = moe_layers(model).values()
    routers = [layer.router for layer in layers if isinstance(layer.router, TopKRouter)]
    before = [(router, router.threshold, router.below_threshold) for router in routers]
    try:
        for router in routers:
            router.threshold, router.below_threshold = threshold, "prune"
        yield
    finally:
        for router, old, rule in before:
            router.threshold, router.below_threshold = old, rule


def findings(setup: Setup, records: Sequence[Record]) -> Findings:
    """Fallback at every T beside what the paper says of it, and what pruning at T would cost."""
    header = ["T", "paper: fallback"]
    for method in _METHODS:
        header += [f"fallback, {LABELS[method]}", "pruned: accuracy", "pruned: experts a token", "pruned: load CV²"]
    rows = []
    for t in map(str, THRESHOLDS):
        row = [t, _PAPER[float(t)]]
        for method in _METHODS:
            row.append(cell(figures_of(records, method, "fallback", t), ".1%"))
            row.append(cell(figures_of(records, method, "pruned", t, "top1"), ".1%"))
            row.append(cell(figures_of(records, method, "pruned", t, "experts_per_token"), ".2f"))
            row.append(cell(figures_of(records, method, "pruned", t, "load_cv2"), ".3f"))
        rows.append(row)
    lines, colours = {}, []
    for method, colour in zip(_METHODS, (ACCENT, "#d97706"), strict=True):
        values = [figures_of(records, method, "fallback", str(t)) for t in THRESHOLDS]
        lines[LABELS[method]] = Curve(THRESHOLDS, [mean(v) for v in values], marked=True)
        colours.append(colour)
    scale = Scale("threshold T", "tokens that fall back", percent=True, at={"T = 0.5": 0.5})
    return Findings(header, rows, _sentences(records), curves(lines, colours, scale))


def _sentences(records: Sequence[Record]) -> list[str]:
    rate = {t: mean(figures_of(records, PAPER_RULE, "fallback", str(t))) for t in THRESHOLDS}
    agrees = rate[0.4] < 0.05 and rate[0.9] > rate[0.5] + 0.05
    plain = mean(figures_of(records, PAPER_RULE, "top1"))
    return [
        f"Fallback under the paper's rule: {rate[0.4]:.1%} at T = 0.4, {rate[0.5]:.1%} at 0.5, {rate[0.9]:.1%} at 0.9: "
        + ("near zero below 0.5 and rising above, as the paper says." if agrees else "not the paper's curve."),
        f"With two experts a token and filling up (the paper's rule), T changes no choice: accuracy is {plain:.1%} at "
        "every T. That a low T hurts accuracy and a high T overloads experts, as the paper has it, cannot come from "
        "this rule.",
    ]


STUDY = Study(
    "threshold",
    "fallback rate, accuracy and load against the threshold T",
    "T swept over 0 … 0.9 at test time, weights frozen, Tiny-ImageNet; only a curve, no numbers.",
    images.describe,
    every(_METHODS, sweep),
    findings,
)
