"""What came out of a run: outputs of all folds for all scans, and predictions whose corrections never saw their ages.

A prediction is ridge + worth · what the network adds. What the network is worth, 0 to 1, is asked of people whom it had
not learnt from: one that knows nothing is worth nothing, and then the ridge alone answers.

Letters: F folds, N scans, K outputs; of a ridge alone K = 0.
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
from ermoe.brain.ridge import MIDDLE, Blend, worth_of
from ermoe.errors import UserError
from ermoe.files import replacing
from ermoe.models.weights.stored import declared, read_checkpoint

OUTPUTS = "outputs.safetensors"
"""The file in a run folder."""
_CALIBRATION_FITS = ("held-out", "train")
_LEVEL = 0.9  # of the intervals
_Basis = Sequence[tuple[int, NDArray[np.int64]]]
"""Whose predictions may be used to correct others: folds, and rows of the scans they judged."""


@dataclass(frozen=True, slots=True)
class Outputs:
    """Raw outputs of every fold's network for every scan, whatever part the scan has in that fold.

    ``ridge_FN`` are the ages that the folds' ridges predict, own ridges included, ``over_all_FN`` those without them,
    and ``width_FN`` how widely their errors are spread; None where networks learnt ages by themselves.
    """

    scans: Sequence[Scan]
    splits: Splits
    head: AgeHead
    output_FNK: Tensor
    ridge_FN: Tensor | None = None
    width_FN: Tensor | None = None
    over_all_FN: Tensor | None = None

    def save(self, path: Path) -> None:
        """One file; the scans are known by their keys."""
        with replacing(path) as draft:
            tensors = {name: getattr(self, name) for name in ("output_FNK", "ridge_FN", "over_all_FN", "width_FN")}
            known = {name: tensor.contiguous() for name, tensor in tensors.items() if tensor is not None}
            save_file(known, draft, metadata={"keys": "\n".join(self.keys)})

    @classmethod
    def load(cls, path: Path, scans: Sequence[Scan], splits: Splits, head: AgeHead) -> Outputs:
        """What `save` wrote, for the same scans."""
        if not path.is_file():
            raise UserError(f"{path} is missing: the run is not finished; start `ermoe brain train` again, it goes on")
        stored = declared(path)
        keys = stored.notes.get("keys", "").split("\n")
        shape = getattr(stored.tensors.get("output_FNK"), "shape", ())
        if tuple(shape) not in [(splits.num_folds, len(keys), number) for number in (head.num_outputs, 0)]:
            raise UserError(f"{path} does not belong to this run: start `ermoe brain train` again, it goes on")
        known = {scan.key: scan for scan in scans}
        if lost := [key for key in keys if key not in known]:
            raise UserError(f"{len(lost)} scans of the run are no longer in the data, {lost[0]} for one: restore them")
        return cls([known[key] for key in keys], splits, head, **read_checkpoint(path))

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

    def predicted(self, fold: int, rows: NDArray[np.int64], worth: float = 1.0) -> Array:
        """Raw predictions of one fold, with a network that is worth so much; one without a ridge is all there is."""
        if self.ridge_FN is None:
            return self.head.age(self.output_FNK[fold, torch.from_numpy(rows)]).double().numpy()
        return self.by_ridge(fold, rows) + worth * self.added(fold, rows)

    def by_ridge(self, fold: int, rows: NDArray[np.int64]) -> Array:
        """Predictions of one fold's ridge."""
        assert self.ridge_FN is not None
        return self.ridge_FN[fold, torch.from_numpy(rows)].double().numpy()

    def over_all(self, fold: int, rows: NDArray[np.int64]) -> Array:
        """The same without what the ridges of people's own scanners add."""
        if self.over_all_FN is None:
            return self.by_ridge(fold, rows)
        return self.over_all_FN[fold, torch.from_numpy(rows)].double().numpy()

    def added(self, fold: int, rows: NDArray[np.int64]) -> Array:
        """Years that one fold's network would add to the ridge."""
        if not self.output_FNK.shape[-1]:
            return np.zeros(len(rows))
        return self.head.age(self.output_FNK[fold, torch.from_numpy(rows)]).double().numpy() - MIDDLE

    def width(self, fold: int, rows: NDArray[np.int64]) -> Array:
        """How widely errors are spread, for intervals."""
        assert self.width_FN is not None
        return self.width_FN[fold, torch.from_numpy(rows)].double().numpy()

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


def blend(outputs: Outputs, basis: _Basis) -> Blend:
    """What certain people say of the predictions they got."""
    if outputs.ridge_FN is None or not (number := sum(len(rows) for _, rows in basis)):
        return Blend()
    added, error = [], []
    for fold, rows in basis:
        added.append(outputs.added(fold, rows))
        error.append(outputs.ages_of(rows) - outputs.by_ridge(fold, rows))
    added_N, width_N = np.concatenate(added), np.concatenate([outputs.width(fold, rows) for fold, rows in basis])
    # A whole site may be a few years off, and so may a network there: people must agree with it among themselves too.
    among = (np.concatenate([years - years.mean() for years in own if len(years)]) for own in (added, error))
    worth = min(worth_of(added_N, np.concatenate(error)), worth_of(*among))
    rest_N = np.concatenate(error) - worth * added_N
    rank = min(number, int(np.ceil((number + 1) * _LEVEL)))  # of so many, as conformal prediction counts
    spread = float(np.sort(np.abs(rest_N) / width_N)[rank - 1])
    if outputs.over_all_FN is None:
        return Blend(worth, spread, number)
    own_N = np.concatenate([outputs.by_ridge(fold, rows) - outputs.over_all(fold, rows) for fold, rows in basis])
    return Blend(worth, spread, number, float(np.sort(np.abs(rest_N + own_N) / width_N)[rank - 1]))


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
        own = blend(outputs, list(outputs.fitting_rows(fold, "held-out")))
        raw = outputs.predicted(fold, rows, own.worth)
        columns["raw"][fold, rows] = raw
        basis = list(outputs.fitting_rows(fold, fit))
        try:
            calibration = _fit_calibration(outputs, basis, own.worth)
            columns["pooled"][fold, rows] = calibration.pooled(raw)
            columns["by_sex"][fold, rows] = calibration.by_sex(raw, outputs.sexes(rows))
        except UserError as refusal:
            refusals.append(f"{outputs.splits.fold_names[fold]}: {refusal}")
        if outputs.ridge_FN is not None:
            reach = own.spread * outputs.width(fold, rows)
            columns["low"][fold, rows], columns["high"][fold, rows] = raw - reach, raw + reach
        elif isinstance(outputs.head, AgeBins):
            tau = _temperature(outputs, basis)
            probability_BK = outputs.head.probability(outputs.output_FNK[fold, torch.from_numpy(rows)], tau)
            columns["low"][fold, rows], columns["high"][fold, rows] = outputs.head.interval(probability_BK).numpy().T
    kept = np.flatnonzero(~np.isnan(columns["raw"]).all(0))
    mean = {f"{name}_N": mean_of_known(values[:, kept]) for name, values in columns.items()}
    return HeldOut(kept, outputs.ages_of(kept), **mean, refusals=tuple(refusals))


def _fit_calibration(outputs: Outputs, basis: _Basis, worth: float) -> AgeCalibration:
    """The lines that certain predictions give."""
    if not basis:
        raise UserError("calibration needs predictions of people it is not applied to: use several folds")
    age_N = np.concatenate([outputs.ages_of(rows) for _, rows in basis])
    raw_N = np.concatenate([outputs.predicted(fold, rows, worth) for fold, rows in basis])
    sexes = [sex for _, rows in basis for sex in outputs.sexes(rows)]
    return AgeCalibration.fit(age_N, raw_N, sexes)


def _temperature(outputs: Outputs, basis: _Basis) -> float:
    """τ that makes the ages of certain people most probable; 1 without bins or people."""
    if outputs.ridge_FN is not None or not isinstance(outputs.head, AgeBins) or not sum(len(rows) for _, rows in basis):
        return 1.0
    output_NK = torch.cat([outputs.output_FNK[fold, torch.from_numpy(rows)] for fold, rows in basis])
    age_N = torch.from_numpy(np.concatenate([outputs.ages_of(rows) for _, rows in basis])).float()
    return fit_temperature(outputs.head, output_NK, age_N)


@dataclass(frozen=True, slots=True)
class Corrections:
    """What people held out tell about predictions: the lines, τ of bins without a ridge, and the blend with one."""

    calibration: AgeCalibration | None
    temperature: float
    blend: Blend


def for_new_people(outputs: Outputs, *, fit: str = "held-out") -> Corrections:
    """For people who are yet to come: all that were held out correct them."""
    basis, kept_out = (_everybody(outputs, how) for how in (fit, "held-out"))
    own = blend(outputs, kept_out)
    return Corrections(_calibration(outputs, basis, own.worth), _temperature(outputs, basis), own)


def for_known_people(outputs: Outputs, *, fit: str = "held-out") -> dict[str, Corrections]:
    """For the people each fold tests, by its name, told without their ages."""
    found = {}
    for fold, name in enumerate(outputs.splits.fold_names):
        basis, kept_out = (list(outputs.fitting_rows(fold, how)) for how in (fit, "held-out"))
        own = blend(outputs, kept_out)
        found[name] = Corrections(_calibration(outputs, basis, own.worth), _temperature(outputs, basis), own)
    return found


def _everybody(outputs: Outputs, fit: str) -> _Basis:
    """Whose predictions may correct those of people who are in no fold."""
    if fit == "held-out" and not any(len(outputs.rows(fold, "validation")) for fold in outputs.tested()):
        return [(fold, outputs.rows(fold, "test")) for fold in outputs.tested()]
    return [pair for fold in outputs.tested() for pair in outputs.fitting_rows(fold, fit)]


def _calibration(outputs: Outputs, basis: _Basis, worth: float) -> AgeCalibration | None:
    try:
        return _fit_calibration(outputs, basis, worth)
    except UserError:
        return None


def mean_of_known(values_FN: Array) -> Array:
    """The mean over the first axis of what is a number, NaN where nothing is."""
    known = ~np.isnan(values_FN)
    total = np.where(known, values_FN, 0).sum(0)
    return np.where(known.any(0), total / np.maximum(known.sum(0), 1), np.nan)
