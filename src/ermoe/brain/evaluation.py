"""A finished run read back, and its figures beside those of simple estimates over the same folds."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ermoe.brain import simple
from ermoe.brain.data.cache import Archive, VolumeCache
from ermoe.brain.data.cohort import open_cohort, state_of
from ermoe.brain.data.scans import CohortOptions, Scan
from ermoe.brain.data.splits import Splits
from ermoe.brain.metrics import Figure, Retest, bootstrap, paired_difference, retest
from ermoe.brain.model import BrainAgeModel
from ermoe.brain.results import HeldOut, Outputs, held_out
from ermoe.errors import UserError
from ermoe.files import read_json
from ermoe.plain import Json, from_json

Array = NDArray[np.float64]
_SMALLEST_LEVEL = 8
"""Scans below which a level of a label gets no column of its own."""
_TELLTALE = 0.9
"""A label that beats predict-the-mean by more than a tenth is called confounded with age."""


@dataclass(frozen=True)
class Evaluation:
    """Everything a report needs of a run."""

    folder: Path
    config: Json
    model: BrainAgeModel
    outputs: Outputs
    cache: VolumeCache
    calibration_fit: str = "held-out"

    @classmethod
    def read(
        cls,
        run: str | os.PathLike[str],
        *,
        cache: str | os.PathLike[str] | None = None,
        calibration_fit: str | None = None,
        device: torch.device | str = "cpu",
    ) -> Evaluation:
        """Reads a run folder and reopens its data."""
        folder = Path(run)
        config = _config(folder)
        data = dict(config["data"])
        path = data.pop("path")
        options = from_json(CohortOptions, data, source=str(folder / "config.json"))
        scans = open_cohort(path, options).with_age
        if state_of(scans) != config["scans_and_ages"]:
            raise UserError(
                f"people, ages or images of {path} have changed since {folder} learnt from them "
                f"({config['scans_and_ages']} then, {state_of(scans)} now): restore them, or train again"
            )
        model = BrainAgeModel.load(folder, device)
        splits = Splits.load(folder / "splits.tsv", scans)
        outputs = Outputs.load(folder / "outputs.safetensors", scans, splits, model.head)
        volumes = Archive.at(cache).volumes(model.preprocessing)
        return cls(folder, config, model, outputs, volumes, calibration_fit or config["calibration_fit"])

    @property
    def method(self) -> str:
        """The network's name."""
        return str(self.config["recipe"]["method"])

    @cached_property
    def held_out(self) -> HeldOut:
        """Predictions of tested people."""
        return held_out(self.outputs, fit=self.calibration_fit)

    @cached_property
    def scans(self) -> list[Scan]:
        """Those that were tested, in the order of `held_out`."""
        return [self.outputs.scans[int(row)] for row in self.held_out.row_N]

    @property
    def people(self) -> list[str]:
        """Their persons."""
        return [scan.participant_id for scan in self.scans]

    @cached_property
    def has_tissue(self) -> bool:
        """Whether every scan has tissue maps."""
        return all(scan.tissue is not None for scan in self.outputs.scans)

    @cached_property
    def estimates(self) -> dict[str, Array]:
        """Predictions by name: the method first, then what needs no network."""
        found = {self.method: self.held_out.raw_N}
        methods: dict[str, simple.Estimate] = {}
        if self.has_tissue:
            methods["tissue ridge"] = simple.tissue_ridge(self.cache)
        methods["predict the mean"] = simple.mean_age
        for name, label in simple.labels(self.outputs.scans).items():
            methods[f"{name} only"] = simple.by_label(label)
        for name, estimate in methods.items():
            everybody = simple.over_folds(estimate, self.outputs.scans, self.outputs.splits)
            found[name] = everybody[self.held_out.row_N]
        return found

    @cached_property
    def levels(self) -> dict[str, NDArray[np.bool_]]:
        """Groups of scans to judge within: all, then every level of a label that has scans enough."""
        found = {"all": np.ones(len(self.scans), dtype=bool)}
        for name, label in simple.labels(self.outputs.scans).items():
            for level in sorted({value for value in map(label, self.scans) if value is not None}):
                rows = np.array([label(scan) == level for scan in self.scans])
                if rows.sum() >= _SMALLEST_LEVEL:
                    found[f"{name} {level}"] = rows
        return found

    def figures(self, predicted_N: Array, rows: NDArray[np.bool_] | None = None) -> dict[str, Figure]:
        """Figures of predictions, over some of the scans."""
        rows = np.ones(len(self.scans), dtype=bool) if rows is None else rows
        people = [person for person, wanted in zip(self.people, rows, strict=True) if wanted]
        return bootstrap(people, self.held_out.age_N[rows], predicted_N[rows])

    def difference(self, other: str, rows: NDArray[np.bool_]) -> Figure:
        """The method's mean absolute error minus that of another estimate, over the same people."""
        age_N = self.held_out.age_N[rows]
        people = [person for person, wanted in zip(self.people, rows, strict=True) if wanted]
        return paired_difference(people, self.held_out.raw_N[rows] - age_N, self.estimates[other][rows] - age_N)

    @cached_property
    def confounds(self) -> list[str]:
        """A sentence for every label that by itself tells age better than predicting the mean."""
        age_N = self.held_out.age_N
        error = {name: float(np.abs(values - age_N).mean()) for name, values in self.estimates.items()}
        mean = error["predict the mean"]
        return [
            f"{name.removesuffix(' only')} alone predicts age with an error of {error[name]:.1f} years (predicting the "
            f"mean: {mean:.1f}): figures over all scans are confounded with it; read those within one level of it"
            for name in self.estimates
            if name.endswith(" only") and error[name] < _TELLTALE * mean
        ]

    @cached_property
    def retest(self) -> Retest | None:
        """Of people scanned twice within a year."""
        return retest(self.people, self.held_out.age_N, self.held_out.raw_N)

    def corrected(self) -> dict[str, Array]:
        """Raw predictions and those of the calibrations that were not refused."""
        known = {"raw": self.held_out.raw_N, "pooled": self.held_out.pooled_N, "sex-specific": self.held_out.by_sex_N}
        return {name: values for name, values in known.items() if not np.isnan(values).any()}

    def group(self, function: Callable[[Scan], Any]) -> list[Any]:
        """Something about every tested scan."""
        return [function(scan) for scan in self.scans]


def _config(folder: Path) -> Json:
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"{folder} is no run folder: name one that `ermoe brain train` wrote")
    config: Json = read_json(path, "train again in another folder")
    if config.get("task") != "brain age":
        raise UserError(f"{folder} is a run of another task: name one that `ermoe brain train` wrote")
    return config
