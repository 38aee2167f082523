"""What came out of a run: outputs of all folds for all scans, and predictions whose corrections never saw their ages.

Letters: F folds, N scans, K outputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

from ermoe.brain.ages import AgeBins, AgeCalibration, AgeHead, fit_temperature
from ermoe.brain.data.scans import Scan
from ermoe.brain.data.splits import Splits
from ermoe.brain.metrics import Array
from ermoe.errors import UserError
from ermoe.files import replacing
from ermoe.models.weights.stored import declared, read_checkpoint

_CALIBRATION_FITS = ("held-out", "train")
_Basis = Sequence[tuple[int, NDArray[np.int64]]]
"""Whose predictions may be used to correct others: folds, and rows of the scans they judged."""


@dataclass(frozen=True, slots=True)
class Outputs:
    """Raw outputs of every fold's network for every scan, whatever part the scan has in that fold."""

    scans: Sequence[Scan]
    splits: Splits
    head: AgeHead
    output_FNK: Tensor

    def save(self, path: Path) -> None:
        """One file; the scans are known by their keys."""
        with replacing(path) as draft:
            save_file({"output_FNK": self.output_FNK.contiguous()}, draft, metadata={"keys": "\n".join(self.keys)})

    @classmethod
    def load(cls, path: Path, scans: Sequence[Scan], splits: Splits, head: AgeHead) -> Outputs:
        """What `save` wrote, for the same scans."""
        if not path.is_file():
            raise UserError(f"{path} is missing: the run is not finished; start `ermoe brain train` again, it goes on")
        stored = declared(path)
        keys = stored.notes.get("keys", "").split("\n")
        if getattr(stored.tensors.get("output_FNK"), "shape", None) != (splits.num_folds, len(keys), head.num_outputs):
            raise UserError(f"{path} does not belong to this run: start `ermoe brain train` again, it goes on")
        known = {scan.key: scan for scan in scans}
        if lost := [key for key in keys if key not in known]:
            raise UserError(f"{len(lost)} scans of the run are no longer in the data, {lost[0]} for one: restore them")
        return cls([known[key] for key in keys], splits, head, read_checkpoint(path)["output_FNK"])

    @property
    def keys(self) -> list[str]:
        """Of the scans."""
        return [scan.key for scan in self.scans]

    def rows(self, fold: int, part: str) -> NDArray[np.int64]:
        """Positions of the scans that have this part in a fold."""
        wanted = [n for n, scan in enumerate(self.scans) if self.splits.part_of(scan.participant_id, fold) == part]
        return np.array(wanted, dtype=np.int64)

    def ages_of(self, rows: NDArray[np.int64]) -> Array:
        """Chronological ages."""
        return np.array([self.scans[int(row)].age for row in rows], dtype=np.float64)

    def predicted(self, fold: int, rows: NDArray[np.int64]) -> Array:
        """Raw predictions of one fold."""
        return self.head.age(self.output_FNK[fold, torch.from_numpy(rows)]).double().numpy()

    def sexes(self, rows: NDArray[np.int64]) -> list[str | None]:
        """Of the scans."""
        return [self.scans[int(row)].sex for row in rows]

    def tested(self) -> list[int]:
        """Folds that test somebody."""
        return [fold for fold in range(self.splits.num_folds) if len(self.rows(fold, "test"))]

    def fitting_rows(self, fold: int, fit: str) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """(fold, rows) of predictions whose ages may be used to correct those of the people tested in ``fold``.

        The validation people of the fold, if it has some; else people whom other folds test, as those folds predict
        them. With ``fit="train"``, as in the paper, the fold's own training people.
        """
        if fit not in _CALIBRATION_FITS:
            raise UserError(f"calibration fit {fit!r}: use one of {', '.join(_CALIBRATION_FITS)}")
        if fit == "train":
            yield fold, self.rows(fold, "train")
        elif len(validation := self.rows(fold, "validation")):
            yield fold, validation
        else:
            yield from ((other, self.rows(other, "test")) for other in self.tested() if other != fold)


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Predictions of everybody who was tested, raw and corrected. A scan tested by several folds has their mean.

    ``pooled_N`` and ``by_sex_N`` are NaN where calibration was refused; ``low_N`` and ``high_N`` where the head has no
    bins. ``refusals`` says why.
    """

    row_N: NDArray[np.int64]
    age_N: Array
    raw_N: Array
    pooled_N: Array
    by_sex_N: Array
    low_N: Array
    high_N: Array
    refusals: tuple[str, ...]

    @property
    def coverage(self) -> float:
        """Share of held-out ages inside their intervals; NaN without intervals."""
        known = ~np.isnan(self.low_N)
        inside = (self.low_N <= self.age_N) & (self.age_N <= self.high_N)
        return float(inside[known].mean()) if known.any() else float("nan")


def held_out(outputs: Outputs, *, fit: str = "held-out") -> HeldOut:
    """Predictions of tested people; what corrects a fold's people was fitted without their ages."""
    names = ("raw", "pooled", "by_sex", "low", "high")
    columns = {name: np.full((outputs.splits.num_folds, len(outputs.scans)), np.nan) for name in names}
    refusals: list[str] = []
    for fold in outputs.tested():
        rows = outputs.rows(fold, "test")
        raw = outputs.predicted(fold, rows)
        columns["raw"][fold, rows] = raw
        basis = list(outputs.fitting_rows(fold, fit))
        try:
            calibration = _fit_calibration(outputs, basis)
            columns["pooled"][fold, rows] = calibration.pooled(raw)
            columns["by_sex"][fold, rows] = calibration.by_sex(raw, outputs.sexes(rows))
        except UserError as refusal:
            refusals.append(f"{outputs.splits.fold_names[fold]}: {refusal}")
        if isinstance(outputs.head, AgeBins):
            tau = _temperature(outputs, basis)
            probability_BK = outputs.head.probability(outputs.output_FNK[fold, torch.from_numpy(rows)], tau)
            columns["low"][fold, rows], columns["high"][fold, rows] = outputs.head.interval(probability_BK).numpy().T
    kept = np.flatnonzero(~np.isnan(columns["raw"]).all(0))
    mean = {f"{name}_N": mean_of_known(values[:, kept]) for name, values in columns.items()}
    return HeldOut(kept, outputs.ages_of(kept), **mean, refusals=tuple(refusals))


def _fit_calibration(outputs: Outputs, basis: _Basis) -> AgeCalibration:
    """The lines that certain predictions give."""
    if not basis:
        raise UserError("calibration needs predictions of people it is not applied to: use several folds")
    age_N = np.concatenate([outputs.ages_of(rows) for _, rows in basis])
    raw_N = np.concatenate([outputs.predicted(fold, rows) for fold, rows in basis])
    sexes = [sex for _, rows in basis for sex in outputs.sexes(rows)]
    return AgeCalibration.fit(age_N, raw_N, sexes)


def _temperature(outputs: Outputs, basis: _Basis) -> float:
    """τ that makes the ages of certain people most probable; 1 without bins or people."""
    if not isinstance(outputs.head, AgeBins) or not sum(len(rows) for _, rows in basis):
        return 1.0
    output_NK = torch.cat([outputs.output_FNK[fold, torch.from_numpy(rows)] for fold, rows in basis])
    age_N = torch.from_numpy(np.concatenate([outputs.ages_of(rows) for _, rows in basis])).float()
    return fit_temperature(outputs.head, output_NK, age_N)


def for_new_people(outputs: Outputs, *, fit: str = "held-out") -> tuple[AgeCalibration | None, float]:
    """AgeCalibration and τ for people who are yet to come: all that were held out correct them."""
    if fit == "held-out" and not any(len(outputs.rows(fold, "validation")) for fold in outputs.tested()):
        basis = [(fold, outputs.rows(fold, "test")) for fold in outputs.tested()]
    else:
        basis = [pair for fold in outputs.tested() for pair in outputs.fitting_rows(fold, fit)]
    return _calibration(outputs, basis), _temperature(outputs, basis)


def for_known_people(outputs: Outputs, *, fit: str = "held-out") -> dict[str, AgeCalibration | None]:
    """The calibration of each fold for the people it tests, fitted without their ages; None where it was refused."""
    names = enumerate(outputs.splits.fold_names)
    return {name: _calibration(outputs, list(outputs.fitting_rows(fold, fit))) for fold, name in names}


def _calibration(outputs: Outputs, basis: _Basis) -> AgeCalibration | None:
    try:
        return _fit_calibration(outputs, basis)
    except UserError:
        return None


def mean_of_known(values_FN: Array) -> Array:
    """The mean over the first axis of what is a number, NaN where nothing is."""
    known = ~np.isnan(values_FN)
    total = np.where(known, values_FN, 0).sum(0)
    return np.where(known.any(0), total / np.maximum(known.sum(0), 1), np.nan)
