"""Brain age for those who write Python: train, evaluate and predict, on data sets and scans as they lie on disk."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

from ermoe._moved import Function
from ermoe.brain import run
from ermoe.brain.data.cache import Archive
from ermoe.brain.data.cohort import open_cohort, open_scans
from ermoe.brain.data.scans import CohortOptions
from ermoe.brain.metrics import figures
from ermoe.brain.model import BrainAgeModel, Prediction
from ermoe.brain.model import predict as judged
from ermoe.brain.predicting import Predictor
from ermoe.brain.recipes import BrainRecipe
from ermoe.errors import UserError
from ermoe.files import StrPath, several
from ermoe.train.compute import Compute, device_named


@dataclass(frozen=True, slots=True)
class Estimator:
    """A trained model, ready to judge scans."""

    model: BrainAgeModel

    def predict(self, scan: StrPath) -> Prediction:
        """The age of one NIfTI file; raises `ermoe.errors.UserError` if the scan cannot be used."""
        rows = self.predict_all([scan])
        if len(rows) != 1:
            raise UserError(f"{scan} holds {len(rows)} scans: use predict_all for several")
        if rows[0].problem:
            raise UserError(rows[0].problem)
        return rows[0]

    def predict_all(self, scans: Sequence[StrPath], *, participants: Sequence[str] | None = None) -> list[Prediction]:
        """Rows of NIfTI files, folders, BIDS roots or tables; a scan that cannot be used has a row with its reason."""
        return list(judged(self.model, open_scans(scans, participants=participants).scans))


def load(model: StrPath, *, device: str = "cpu") -> Estimator:
    """The estimator in a run folder of `ermoe brain train`, or in its model folder; ``device`` may be "auto"."""
    return Estimator(BrainAgeModel.load(model, device_named(device)))


def _as_before(train: Function) -> Function:
    """Lets ``train(data, folder, preset=…)`` of development versions work, and give what it gave."""

    @wraps(train)
    def called(*given: Any, **options: Any) -> Any:
        named = {"data", "folder"} & options.keys()
        if len(given) + len(named) != 2 or (len(given) == 1 and "data" in named) or (not given and "preset" in options):
            return train(*given, **options)
        warnings.warn(
            "ermoe.brain.train(data, folder, preset=…) is ermoe.brain.train(preset, data, folder) now: it returns "
            "figures, and ermoe.brain.load(folder) gives the estimator",
            DeprecationWarning,
            stacklevel=2,
        )
        return Estimator(run.train(*given, **options))

    return called  # type: ignore[return-value]


@_as_before
def train(preset: str | BrainRecipe, data: StrPath, folder: StrPath, **options: Any) -> dict[str, float]:
    """Trains a preset on a BIDS root or a table in a run folder, or goes on with the run there.

    Args:
        preset: a name of `ermoe.brain.recipes.PRESETS`, such as "small-ermoe", or a recipe of your own.
        data: a BIDS root, or a table with the columns participant_id, age, t1, ….
        folder: of the run; `load` reads it.
        options: of `ermoe.brain.run.train`: ``split``, ``folds``, ``init``, ``cache``, ``callbacks``, …, and fields of
            the recipe or of its training that are to differ.

    Returns:
        How far the predictions of held-out people are from their ages: ``mae``, ``r``, ``slope``, ….
    """
    return dict(run.train(data, folder, preset=preset, **options).facts["raw"])


def predict(
    model: StrPath | Estimator,
    scans: StrPath | Sequence[StrPath],
    *,
    cache: StrPath | None = None,
    compute: Compute | None = None,
) -> list[Prediction]:
    """Brain ages of scans: a row each, and for a scan that cannot be used a row with its reason in ``problem``.

    Args:
        model: a run folder, the model folder in it, or what `load` gave.
        scans: NIfTI files, folders, BIDS roots or tables, one or several.
        cache: folder for prepared scans; by default among your caches.
        compute: device and workers.
    """
    found = open_scans(several(scans)).scans
    return list(_predictor(model, cache, compute).rows(found))


def evaluate(
    model: StrPath | Estimator,
    data: StrPath,
    *,
    cohort_options: CohortOptions | Mapping[str, Any] | None = None,
    cache: StrPath | None = None,
    compute: Compute | None = None,
) -> dict[str, float]:
    """How far predictions are from known ages: ``mae``, ``rmse``, ``r``, ``slope``, …, and how many scans were judged.

    People whom the model knows from training are judged by the networks that have not learnt from them. A recalibrated
    model is judged by its recalibrated ages.

    Args:
        model: a run folder, the model folder in it, or what `load` gave.
        data: a BIDS root, or a table with ages.
        cohort_options: how the table is read.
        cache: folder for prepared scans; by default among your caches.
        compute: device and workers.
    """
    options = cohort_options if isinstance(cohort_options, CohortOptions) else CohortOptions(**(cohort_options or {}))
    cohort = open_cohort(data, options)
    rows = list(_predictor(model, cache, compute).rows(cohort.with_age))
    used = [row for row in rows if not row.problem and not math.isnan(row.age)]
    if not used:
        raise UserError(f"{data}: no scan could be judged, {rows[0].problem if rows else 'there is none with an age'}")
    found = figures([row.age for row in used], [row.at_its_site for row in used])
    return {"scans": float(len(used)), "left_out": float(len(rows) - len(used)), **found}


def _predictor(model: StrPath | Estimator, cache: StrPath | None, compute: Compute | None) -> Predictor:
    compute, kept = compute or Compute(), None if cache is None else Path(cache)
    if not isinstance(model, Estimator):
        return Predictor.at(Path(model), kept, compute)
    return Predictor(model.model, Path(), Archive.at(kept).volumes(model.model.preprocessing), compute.workers)
