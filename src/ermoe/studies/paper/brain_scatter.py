"""Figures 2 and S2: predicted brain age against age, by sex, for tested and for training people."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from ermoe.analysis import plots
from ermoe.brain.metrics import figures
from ermoe.studies.figures import cell, mean
from ermoe.studies.paper import brains
from ermoe.studies.paper.study import Findings, Job, Record, Setup, Study

PAPER = {("test", "M"): "2.30", ("test", "F"): "2.32", ("train", "M"): "2.29", ("train", "F"): "2.27"}
_SEX = {"M": ("men", "#2563eb"), "F": ("women", "#d97706")}


def jobs(setup: Setup) -> list[Job]:
    """One run a seed."""
    return [Job("ermoe", seed, partial(predictions, setup, seed)) for seed in setup.each_seed()]


def predictions(setup: Setup, seed: int) -> dict[str, Any]:
    """Ages, raw predictions and sexes of tested people, and of training people as their own fold sees them."""
    found = brains.evaluation(setup, "ermoe", seed)
    outputs, tested = found.outputs, found.held_out
    fold = outputs.tested()[0]
    rows = outputs.rows(fold, "train")
    return {
        "test": {
            "age": tested.age_N.tolist(),
            "predicted": tested.raw_N.tolist(),
            "sex": [scan.sex for scan in found.scans],
        },
        "train": {
            "age": outputs.ages_of(rows).tolist(),
            "predicted": outputs.predicted(fold, rows).tolist(),
            "sex": outputs.sexes(rows),
        },
    }


def points(record: Record, part: str, sex: str) -> tuple[np.ndarray, np.ndarray]:
    """Ages and predictions of one sex."""
    found = record["figures"][part]
    rows = np.array([other == sex for other in found["sex"]], dtype=bool)
    return np.array(found["age"])[rows], np.array(found["predicted"])[rows]


def findings(setup: Setup, records: Sequence[Record]) -> Findings:
    """Error, slope and intercept of every panel, over seeds."""
    header = ["panel", "paper: MAE", "MAE", "slope", "intercept"]
    rows = []
    for (part, sex), quoted in PAPER.items():
        values = [figures(*points(record, part, sex)) for record in records]
        cells = [cell([v[name] for v in values], ".2f") for name in ("mae", "slope", "intercept")]
        rows.append([f"{part}, {_SEX[sex][0]}", quoted, *cells])
    gap = {part: mean([_error(record, part) for record in records]) for part in ("train", "test")}
    sentence = (
        f"Training people have an error of {gap['train']:.2f} years, tested ones {gap['test']:.2f}. The paper's errors "
        "are nearly equal on both, which for a model of this size would mean that it does not overfit at all."
    )
    return Findings(header, rows, [sentence], _panels(records[0]))


def _error(record: Record, part: str) -> float:
    found = record["figures"][part]
    return float(np.abs(np.array(found["predicted"]) - np.array(found["age"])).mean())


def _panels(record: Record) -> Figure:
    with plots.style():
        drawing = Figure(figsize=(6.4, 6.0), layout="constrained")
        grid = drawing.subplots(2, 2, sharex=True, sharey=True)
        for axes, (part, sex) in zip(grid.flat, PAPER, strict=True):
            age, predicted = points(record, part, sex)
            axes.axline((60, 60), slope=1, color=plots.MUTED, linewidth=1)
            axes.scatter(age, predicted, s=14, color=_SEX[sex][1], alpha=0.8, linewidth=0)
            if len(age) > 1:
                slope, intercept = np.polyfit(age, predicted, 1)
                ends = np.array([age.min(), age.max()])
                axes.plot(ends, intercept + slope * ends, color=_SEX[sex][1], linewidth=1.2, linestyle="--")
            axes.set_title(f"{part}, {_SEX[sex][0]}")
        for axes in grid[1]:
            axes.set_xlabel("age")
        for axes in grid[:, 0]:
            axes.set_ylabel("predicted")
    return drawing


STUDY = Study(
    "brain-scatter",
    "predicted brain age against age",
    "ADNI, test (Fig. 2) and train (Fig. S2, whose caption says test), by sex.",
    brains.describe,
    jobs,
    findings,
)
