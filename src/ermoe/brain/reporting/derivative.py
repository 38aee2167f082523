"""Results as a BIDS derivative: a description, tables with a sidecar that explains every column, and the model card.

The card says what a model is, what it was made from, how good it is, and what it is not for.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from ermoe._version import __version__
from ermoe.brain.ages import POOLED
from ermoe.brain.data.tables import write_text, write_tsv
from ermoe.brain.model import BrainAgeModel
from ermoe.errors import UserError
from ermoe.files import read_object, write_json

_BIDS_VERSION = "1.10.0"
_PIPELINE = "ermoe-ba"
_DESCRIPTION = "dataset_description.json"
RESEARCH_USE = "Research use only: not a medical device, and no basis for a decision about a person."

_IGNORED = (
    "*_brainage.tsv",
    "*_brainage.json",
    "**/*_brainage.tsv",
    "**/*_brainage.json",
    "figures",
    "figures/**",
    "logs",
    "logs/**",
    "*.html",
    "model-card.md",
)
"""BIDS has no place yet for tables of predictions over a cohort, nor for reports."""

_COLUMNS: dict[str, dict[str, str]] = json.loads((files("ermoe.brain.reporting") / "columns.json").read_text("utf-8"))
"""What each column means, as a sidecar says it; limits of intervals are explained by `_sidecar`."""


def describe(folder: Path, *, name: str, data: str | None = None, readme: str = "", by: str | None = None) -> None:
    """Makes a folder a BIDS derivative: dataset_description.json, README and what the validator is to pass over.

    ``by`` names the model. What is not ours, and what another model has predicted, is left alone: `UserError`.
    """
    refuse_foreign(folder, by)
    generator = {"Name": _PIPELINE, "Version": __version__}
    description: dict[str, Any] = {
        "Name": name,
        "BIDSVersion": _BIDS_VERSION,
        "DatasetType": "derivative",
        "GeneratedBy": [generator if by is None else {**generator, "Description": by}],
    }
    if data is not None:
        description["SourceDatasets"] = [{"URL": Path(data).resolve().as_uri()}]
    write_json(folder / _DESCRIPTION, description)
    write_text(folder / "README.md", f"# {name}\n\n{readme}\n\n{RESEARCH_USE}\n")
    write_text(folder / ".bidsignore", "\n".join(_IGNORED) + "\n")


def refuse_foreign(folder: Path, by: str | None = None) -> None:
    """A `UserError` where a folder holds a data set, or texts, that were not written here, or not by this model."""
    path = folder / _DESCRIPTION
    if path.is_file():
        makers = read_object(path, "name another folder").get("GeneratedBy")
        maker = makers[0] if isinstance(makers, list) and makers and isinstance(makers[0], dict) else {}
        if maker.get("Name") != _PIPELINE:
            raise UserError(f"{folder} is a data set of its own, which results would overwrite: name another folder")
        if by is not None and (known := maker.get("Description")) not in (None, by):
            raise UserError(f"{folder} holds predictions by {known}, this is {by}: name that model or another folder")
    elif taken := [own for own in ("README.md", ".bidsignore") if (folder / own).exists()]:
        raise UserError(f"{folder} has a {taken[0]} that would be overwritten: name a new folder")


def write_table(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """A TSV with every column that some row has, and its JSON sidecar; missing values are n/a, as BIDS wants."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    write_tsv(path, columns, ([_cell(row.get(column)) for column in columns] for row in rows))
    write_json(path.with_suffix(".json"), _sidecar(columns))


def _sidecar(columns: Sequence[str]) -> dict[str, dict[str, str]]:
    """An explanation of each column.

    >>> _sidecar(["mae_low"])["mae_low"]["Description"]
    'lower limit of the 95 % interval of mae, over resampled people'
    """
    found = {}
    for column in columns:
        stem, _, end = column.rpartition("_")
        if column not in _COLUMNS and stem in _COLUMNS and end in ("low", "high"):
            side = "lower" if end == "low" else "upper"
            text = f"{side} limit of the 95 % interval of {stem}, over resampled people"
            found[column] = _COLUMNS[stem] | {"Description": text}
        else:
            found[column] = _COLUMNS.get(column, {"Description": f"column {column} of the data set's table"})
    return found


def _cell(value: Any) -> str:
    """A value as BIDS writes it.

    >>> _cell(math.nan), _cell(None), _cell(1.23456), _cell(True), _cell("a\\tb")
    ('n/a', 'n/a', '1.2346', 'true', 'a b')
    """
    if value is None or value == "" or (isinstance(value, float) and math.isnan(value)):
        return "n/a"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.4f}"
    return " ".join(str(value).split())


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

    believed = facts.get("network_worth")
    worth = [] if believed is None else [f"Of what the network adds to the ridge, {believed:.0%} is believed."]
    spacing, grid = model.preprocessing.spacing_mm, "×".join(map(str, model.preprocessing.shape))
    sections = {
        "What it is": [
            f"Trained on {facts['num_people']} people ({facts['num_scans']} scans) of {facts['data']}, "
            f"{low:.0f} to {high:.0f} years; split: {facts['split']}, {len(model.folds)} folds.",
            f"Held-out people, raw: MAE {raw['mae']:.2f} years, r {raw['r']:.2f}, slope {raw['slope']:.2f}, "
            f"corr(gap, age) {raw['gap_age_r']:.2f}.",
            f"Calibration ({facts['calibration_fit']}): {calibration}.",
            intervals,
            *worth,
            f"Input: T1-weighted MRI, {spacing:g} mm, {grid} voxels, as “{model.input}”; a token is a cube of "
            f"{model.patch_size * spacing:g} mm, which mostly holds several tissues.",
            f"Brain masks in training came from: {', '.join(model.mask_sources)}. Other masks shift predictions.",
        ],
        "Do not": [
            "Do not diagnose, or decide anything about a person.",
            f"Do not read predictions of people younger than {low:.0f} or older than {high:.0f}: they are flagged for "
            "a reason.",
            "Do not compare gaps between scanners or sites without people of known age from each.",
            "Do not compare errors of cohorts with different age ranges: a narrow range makes any model look good.",
        ],
    }
    if warnings:
        sections["Known problems"] = warnings
    return Card(f"Brain age, {facts['method']}", sections)
