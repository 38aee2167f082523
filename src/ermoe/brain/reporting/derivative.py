"""Results as a BIDS derivative: a description of the data set, tables with a sidecar that explains every column."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ermoe._version import __version__
from ermoe.files import replacing, write_json

_BIDS_VERSION = "1.10.0"
_PIPELINE = "ermoe-ba"
RESEARCH_USE = "Research use only: not a medical device, and no basis for a decision about a person."

_IGNORED = ("*_brainage.tsv", "*_brainage.json", "figures", "figures/**", "report.html", "model-card.md")
"""BIDS has no place yet for tables of predictions over a cohort, nor for reports."""

_EXPLAINED: dict[str, dict[str, Any]] = {
    "participant_id": {"Description": "participant"},
    "session_id": {"Description": "session"},
    "scan": {"Description": "T1-weighted image that was read"},
    "fold": {"Description": "folds whose networks judged this scan; none of them has learnt from this person"},
    "age": {"Description": "chronological age at the scan", "Units": "year"},
    "sex": {"Description": "sex as the data set's table gives it"},
    "site": {"Description": "site as the data set's table gives it"},
    "brain_age": {"Description": "predicted age, raw: the headline", "Units": "year"},
    "brain_age_low": {"Description": "lower limit of the 90 % prediction interval, from the age bins", "Units": "year"},
    "brain_age_high": {"Description": "upper limit of the 90 % prediction interval", "Units": "year"},
    "brain_age_calibrated": {
        "Description": "(brain_age − a) / b with one line for all, fitted without this person's age",
        "Units": "year",
    },
    "brain_age_calibrated_sex": {
        "Description": "(brain_age − a) / b with the line of the person's sex, fitted without this person's age",
        "Units": "year",
    },
    "gap": {
        "Description": "brain_age − age, raw; use age as a covariate with it",
        "Units": "year",
    },
    "gap_calibrated": {"Description": "brain_age_calibrated − age", "Units": "year"},
    "gap_age_residualised": {
        "Description": "gap without its straight trend over age in this very sample; uses the age, so it is no score",
        "Units": "year",
    },
    "fold_sd": {"Description": "standard deviation over the folds that judged", "Units": "year"},
    "num_folds": {"Description": "folds that judged"},
    "mask_source": {"Description": "where the brain mask came from"},
    "seen_in_training": {
        "Description": "the person was in the training data; folds that had not learnt from them judge, if any"
    },
    "outside_age_range": {"Description": "age (brain age where it is unknown) outside of the training people's"},
    "unusual_mask": {"Description": "no training scan had its brain mask from this source"},
    "unlike_t1": {"Description": "hardly brighter inside the brain than at its surface, as in no T1 of an adult"},
    "problem": {"Description": "why there is no prediction"},
    "group": {"Description": "which scans"},
    "prediction": {"Description": "raw, or which calibration"},
    "num_scans": {"Description": "scans"},
    "num_people": {"Description": "people"},
    "mae": {"Description": "mean absolute error", "Units": "year"},
    "rmse": {"Description": "root mean squared error", "Units": "year"},
    "r2": {"Description": "1 − squared error over variance of age"},
    "r": {"Description": "correlation of predicted and chronological age"},
    "gap_age_r": {"Description": "correlation of gap and age"},
    "slope": {"Description": "of predicted = intercept + slope · age"},
    "intercept": {"Description": "of predicted = intercept + slope · age", "Units": "year"},
    "bias": {"Description": "mean gap", "Units": "year"},
}
"""What each column means; limits of intervals are explained by `_sidecar`."""


def describe(folder: Path, *, name: str, source: str | None = None, readme: str = "") -> None:
    """Makes a folder a BIDS derivative: dataset_description.json, README and what the validator is to pass over."""
    description: dict[str, Any] = {
        "Name": name,
        "BIDSVersion": _BIDS_VERSION,
        "DatasetType": "derivative",
        "GeneratedBy": [{"Name": _PIPELINE, "Version": __version__}],
    }
    if source is not None:
        description["SourceDatasets"] = [{"URL": Path(source).resolve().as_uri()}]
    write_json(folder / "dataset_description.json", description)
    write_text(folder / "README.md", f"# {name}\n\n{readme}\n\n{RESEARCH_USE}\n")
    write_text(folder / ".bidsignore", "\n".join(_IGNORED) + "\n")


def write_table(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """A TSV with every column that some row has, and its JSON sidecar; missing values are n/a, as BIDS wants."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    lines = ["\t".join(columns)]
    lines += ["\t".join(_cell(row.get(column)) for column in columns) for row in rows]
    write_text(path, "\n".join(lines) + "\n")
    write_json(path.with_suffix(".json"), _sidecar(columns))


def _sidecar(columns: Sequence[str]) -> dict[str, dict[str, Any]]:
    """An explanation of each column.

    >>> _sidecar(["mae_low"])["mae_low"]["Description"]
    'lower limit of the 95 % interval of mae, over resampled people'
    """
    found = {}
    for column in columns:
        stem, _, end = column.rpartition("_")
        if column not in _EXPLAINED and stem in _EXPLAINED and end in ("low", "high"):
            side = "lower" if end == "low" else "upper"
            text = f"{side} limit of the 95 % interval of {stem}, over resampled people"
            found[column] = {**_EXPLAINED[stem], "Description": text}
        else:
            found[column] = _EXPLAINED.get(column, {"Description": f"column {column} of the data set's table"})
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


def write_text(path: Path, text: str) -> None:
    """UTF-8, in one step."""
    with replacing(path) as draft:
        draft.write_text(text, encoding="utf-8")
