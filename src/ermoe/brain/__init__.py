"""Brain age in Python: ``ermoe.brain.load(MODEL).predict("scan.nii.gz")``.

>>> import ermoe.brain
>>> callable(ermoe.brain.load), callable(ermoe.brain.train)
(True, True)
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ermoe.brain.model import BrainAgeModel, Prediction

__all__ = ["Estimator", "load", "report", "train"]

Paths = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class Estimator:
    """A trained model, ready to judge scans."""

    model: BrainAgeModel

    def predict(self, scan: Paths) -> Prediction:
        """The age of one NIfTI file; raises `ermoe.errors.UserError` if the scan cannot be used."""
        from ermoe.errors import UserError

        rows = self.predict_all([scan])
        if len(rows) != 1:
            raise UserError(f"{scan} holds {len(rows)} scans: use predict_all for several")
        if rows[0].problem:
            raise UserError(rows[0].problem)
        return rows[0]

    def predict_all(self, scans: Sequence[Paths], *, participants: Sequence[str] | None = None) -> list[Prediction]:
        """Rows of NIfTI files, folders, BIDS roots or tables; a scan that cannot be used has a row with its reason."""
        from ermoe.brain.data.cohort import open_scans
        from ermoe.brain.model import predict

        return list(predict(self.model, open_scans(scans, participants=participants).scans))


def load(place: Paths, *, device: str = "cpu") -> Estimator:
    """The estimator in a run folder of `ermoe brain train`, or in its model folder; ``device`` may be "auto"."""
    from ermoe.brain.model import BrainAgeModel
    from ermoe.train.compute import device_named

    return Estimator(BrainAgeModel.load(place, device_named(device)))


def train(data: Paths, folder: Paths, **options: Any) -> Estimator:
    """Trains on a BIDS root or a table; see `ermoe.brain.run.train` for the options."""
    from ermoe.brain.run import train as run

    return Estimator(run(data, folder, **options))


def report(run: Paths, out: Paths | None = None, **options: Any) -> Any:
    """Writes the HTML report of a run, inside a BIDS derivative; returns its path."""
    from ermoe.brain.reporting.page import report as write

    return write(run, out, **options)
