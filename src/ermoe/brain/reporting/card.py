"""The model card: what a model is, what it was made from, how good it is, and what it is not for."""

from __future__ import annotations

from dataclasses import dataclass

from ermoe.brain.ages import POOLED
from ermoe.brain.model import BrainAgeModel
from ermoe.brain.reporting.derivative import RESEARCH_USE


@dataclass(frozen=True, slots=True)
class Card:
    """Sections under their headings, in order, each a list of statements."""

    title: str
    sections: dict[str, list[str]]

    def markdown(self) -> str:
        """As ``model-card.md``."""
        parts = [f"# {self.title}", f"**{RESEARCH_USE}**"]
        for heading, statements in self.sections.items():
            parts += [f"## {heading}", "\n".join(f"- {statement}" for statement in statements)]
        return "\n\n".join(parts) + "\n"


def model_card(model: BrainAgeModel, *, warnings: list[str]) -> Card:
    """What to know of a model; ``warnings`` are problems of the data it was made from."""
    facts, raw = model.facts, model.facts["raw"]
    low, high = model.age_range
    calibration = "refused: predictions are too flat for it"
    if model.calibration is not None:
        line = model.calibration.lines[POOLED]
        calibration = f"predicted = {line.intercept:.3f} + {line.slope:.4f} · age, on {line.num_scans} scans"
    coverage = facts["interval_coverage"]
    intervals = "No intervals." if coverage is None else f"90 % intervals held {coverage:.0%} of held-out ages."
    spacing, grid = model.preprocessing.spacing_mm, "×".join(map(str, model.preprocessing.shape))
    sections = {
        "What it is": [
            f"Trained on {facts['num_people']} people ({facts['num_scans']} scans) of {facts['data']}, "
            f"{low:.0f} to {high:.0f} years; split: {facts['split']}, {len(model.networks)} networks.",
            f"Held-out people, raw: MAE {raw['mae']:.2f} years, r {raw['r']:.2f}, slope {raw['slope']:.2f}, "
            f"corr(gap, age) {raw['gap_age_r']:.2f}.",
            f"AgeCalibration ({facts['calibration_fit']}): {calibration}.",
            intervals,
            f"Input: T1-weighted MRI, {spacing:g} mm, {grid} voxels, as “{model.input}”; a token is a cube of "
            f"{model.patch_size * spacing:g} mm, which mostly holds several tissues.",
            f"Brain masks in training came from: {', '.join(model.mask_sources)}. Other masks shift predictions.",
        ],
        "Do not": [
            "diagnose, or decide anything about a person;",
            f"read predictions of people younger than {low:.0f} or older than {high:.0f}: they are flagged for a "
            "reason;",
            "compare gaps between scanners or sites without people of known age from each;",
            "compare errors of cohorts with different age ranges: a narrow range makes any model look good.",
        ],
    }
    if warnings:
        sections["Known problems"] = warnings
    return Card(f"Brain age, {facts['method']}", sections)
