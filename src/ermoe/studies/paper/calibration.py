"""Supplement 5: what a linear calibration does to brain ages."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from ermoe.brain.metrics import figures
from ermoe.studies.figures import cell, figures_of
from ermoe.studies.paper import brains
from ermoe.studies.paper.study import Findings, Job, Record, Setup, Study

FITS = {"train": "line fitted on training people (paper)", "held-out": "line fitted on other held-out people"}
QUOTED = {
    "raw": ("2.307", "-0.287", "0.887", "9.026"),
    "pooled": ("2.287", "-0.125", "0.949", "4.221"),
    "sex-specific": ("2.295", "-0.126", "0.949", "4.244"),
}
_NAMES = ("mae", "gap_age_r", "slope", "intercept")


def jobs(setup: Setup) -> list[Job]:
    """One run a seed, with both ways to fit the line."""
    return [Job("ermoe", seed, partial(corrected, setup, seed)) for seed in setup.each_seed()]


def corrected(setup: Setup, seed: int) -> dict[str, Any]:
    """Figures of raw and corrected predictions; nothing where a calibration was refused."""
    found: dict[str, Any] = {}
    for fit in FITS:
        evaluation = brains.evaluation(setup, "ermoe", seed, calibration_fit=fit)
        age_N = evaluation.held_out.age_N
        for name, predicted_N in evaluation.corrected().items():
            found.setdefault(fit, {})[name] = figures(age_N, predicted_N)
        found[f"refusals, {fit}"] = list(evaluation.held_out.refusals)
    return found


def findings(setup: Setup, records: Sequence[Record]) -> Findings:
    """A row for each calibration and fit."""
    titles = ("MAE", "corr(gap, age)", "slope", "intercept")
    header = ["calibration", *(f"{side}{title}" for title in titles for side in ("paper: ", ""))]
    rows = []
    for fit, label in FITS.items():
        for name, quoted in QUOTED.items():
            if name == "raw" and fit == "held-out":
                continue
            ours = [cell(figures_of(records, "ermoe", fit, name, figure), ".3f") for figure in _NAMES]
            paper = quoted if fit == "train" else ("–",) * 4
            label_of = name if name == "raw" else f"{name}, {label}"
            rows.append([label_of, *(value for pair in zip(paper, ours, strict=True) for value in pair)])
    refused = [text for record in records for fit in FITS for text in record["figures"][f"refusals, {fit}"]]
    example = [f"{len(refused)} calibrations were refused, for example: {refused[0]}"] if refused else []
    sentences = [
        "A line fitted on training people describes training people, whom a model that overfits predicts too well: it "
        "corrects too little. The paper's slope stays at 0.949 after calibration for that reason.",
        *example,
    ]
    return Findings(header, rows, sentences)


STUDY = Study(
    "calibration",
    "error and slope of brain age before and after a linear calibration",
    "ADNI test set, 797 scans; the line is fitted on training predictions.",
    brains.describe,
    jobs,
    findings,
)
