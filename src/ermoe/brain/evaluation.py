"""A finished run read back, and its figures beside those of estimates that need no network.

Any network has to be compared with those: they are fitted on the training people of a fold and read on the others, over
the very same folds.
"""

from __future__ import annotations

import math
import os
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from ermoe.brain.data.cache import Archive, VolumeCache
from ermoe.brain.data.cohort import open_cohort, state_of
from ermoe.brain.data.scans import CohortOptions, Scan
from ermoe.brain.data.splits import Splits
from ermoe.brain.learning import looked_at
from ermoe.brain.measures import MEASURES
from ermoe.brain.metrics import Array, Figure, Retest, bootstrap, paired_difference, retest
from ermoe.brain.model import BrainAgeModel
from ermoe.brain.results import OUTPUTS, HeldOut, Outputs, held_out, mean_of_known
from ermoe.brain.ridge import Ridge
from ermoe.errors import UserError
from ermoe.files import Json, from_json, read_json
from ermoe.train.run_folder import read_lines

Estimate = Callable[[Sequence[Scan], Sequence[Scan]], list[float]]
"""(training scans, other scans) → ages of the others."""
_MOST_LEVELS = 12
"""Levels above which a column of the table is no label of a batch but a measurement."""
_SMALLEST_LEVEL = 8
"""Scans below which a level of a label gets no column of its own."""
_MEAN = "predict the mean"
_ALONE = " only"
"""How estimates from a label alone are called, after its name."""
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
        options = from_json(CohortOptions, data, where=str(folder / "config.json"))
        scans = open_cohort(path, options).with_age
        if state_of(scans) != config["scans_and_ages"]:
            raise UserError(
                f"people, ages or images of {path} have changed since {folder} learnt from them "
                f"({config['scans_and_ages']} then, {state_of(scans)} now): restore them, or train again"
            )
        model = BrainAgeModel.load(folder, device)
        splits = Splits.load(folder / "splits.tsv", scans)
        outputs = Outputs.load(folder / OUTPUTS, scans, splits, model.head)
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
        """Predictions by name: the method first, then what needs no network.

        "ridge" is the linear estimate on measures of the scan; "ridge over all" leaves out the ridges of scanners' own;
        "ridge + whole network" believes all the network adds;
        "ridge inside batch" was fitted on the training people of the same batch alone, where these are enough.
        """
        found = {self.method: self.held_out.raw_N}
        if self.outputs.ridge_FN is not None and self.model.networks:
            found["ridge"] = self._as_tested(self.outputs.by_ridge)
            found["ridge + whole network"] = self._as_tested(self.outputs.predicted)
        if self.outputs.over_all_FN is not None:
            found["ridge over all"] = self._as_tested(self.outputs.over_all)
        methods: dict[str, Estimate] = {}
        measure = {scan.key: row for scan, row in zip(self.outputs.scans, self.measures, strict=True)}
        if self.outputs.ridge_FN is None:
            methods["ridge"] = by_ridge(measure)
        for name, label in labels(self.outputs.scans).items():
            methods[f"ridge inside {name}"] = inside(label, by_ridge(measure))
        methods |= {"tissue ridge": _tissue_ridge(self.cache)} if self.has_tissue else {}
        methods[_MEAN] = mean_age
        methods |= {f"{name}{_ALONE}": by_label(label) for name, label in labels(self.outputs.scans).items()}
        for name, estimate in methods.items():
            everybody = over_folds(estimate, self.outputs.scans, self.outputs.splits)
            found[name] = everybody[self.held_out.row_N]
        return found

    @cached_property
    def measures(self) -> Array:
        """Of all scans of the run, (N, F)."""
        return looked_at(self.cache, self.outputs.scans)[:, : len(MEASURES)]

    def _as_tested(self, predicted: Callable[[int, NDArray[np.int64]], Array]) -> Array:
        """What certain predictions of folds are for the people they test, in the order of `held_out`."""
        found = np.full((self.outputs.splits.num_folds, len(self.outputs.scans)), np.nan)
        for fold in self.outputs.tested():
            rows = self.outputs.rows(fold, "test")
            found[fold, rows] = predicted(fold, rows)
        return mean_of_known(found)[self.held_out.row_N]

    @cached_property
    def levels(self) -> dict[str, NDArray[np.bool_]]:
        """Groups of scans to judge within: all, and every level of a label that has scans enough.

        Levels of labels that tell age by themselves come first: over all scans such a label is part of every figure.
        """
        everybody = {"all": np.ones(len(self.scans), dtype=bool)}
        telling: dict[str, NDArray[np.bool_]] = {}
        others: dict[str, NDArray[np.bool_]] = {}
        for name, label in labels(self.outputs.scans).items():
            for level in sorted({value for value in map(label, self.scans) if value is not None}):
                rows = np.array([label(scan) == level for scan in self.scans])
                if rows.sum() >= _SMALLEST_LEVEL:
                    (telling if name in self.confounders else others)[f"{name} {level}"] = rows
        return telling | everybody | others

    @property
    def leading(self) -> dict[str, NDArray[np.bool_]]:
        """The groups whose figures come first: all scans, or those within a label that tells age by itself."""
        before = list(self.levels).index("all")
        return dict(list(self.levels.items())[: before or 1])

    @cached_property
    def is_synthetic(self) -> bool:
        """Whether the data set's description says that its brains were made up."""
        path = Path(self.config["data"]["path"]) / "dataset_description.json"
        return path.is_file() and "synthetic" in str(read_json(path, "mend it").get("Name", "")).casefold()

    def figures(self, predicted_N: Array, rows: NDArray[np.bool_] | None = None) -> dict[str, Figure]:
        """Figures of predictions, over some of the scans."""
        rows = np.ones(len(self.scans), dtype=bool) if rows is None else rows
        return bootstrap(np.array(self.people)[rows].tolist(), self.held_out.age_N[rows], predicted_N[rows])

    def difference(self, other: str, rows: NDArray[np.bool_]) -> Figure:
        """The method's mean absolute error minus that of another estimate, over the same people."""
        predictions = (self.held_out.raw_N, self.estimates[other])
        own_N, other_N = (predicted_N[rows] - self.held_out.age_N[rows] for predicted_N in predictions)
        return paired_difference(np.array(self.people)[rows].tolist(), own_N, other_N)

    @cached_property
    def _error(self) -> dict[str, float]:
        """Mean absolute error of every estimate."""
        return {name: float(np.abs(ages_N - self.held_out.age_N).mean()) for name, ages_N in self.estimates.items()}

    @cached_property
    def confounders(self) -> list[str]:
        """Labels that by themselves tell age better than predicting the mean."""
        return _telling(self._error)

    @cached_property
    def confounds(self) -> list[str]:
        """A sentence for every one of them."""
        return _confounds_in_words(self._error)

    @cached_property
    def retest(self) -> Retest | None:
        """Of people scanned twice within a year."""
        return retest(self.people, self.held_out.age_N, self.held_out.raw_N)

    def judgements(self, fold: str) -> list[Json]:
        """What was written down of a fold's network whenever it was judged, while it learnt."""
        path = self.folder / "folds" / fold / "metrics.jsonl"
        return [line for line in read_lines(path) if line["kind"] == "test"] if path.is_file() else []

    def corrected(self) -> dict[str, Array]:
        """Raw predictions and those of the calibrations that were not refused."""
        known = {"raw": self.held_out.raw_N, "pooled": self.held_out.pooled_N, "sex-specific": self.held_out.by_sex_N}
        return {name: values for name, values in known.items() if not np.isnan(values).any()}


def _config(folder: Path) -> Json:
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"{folder} is no run folder: name one that `ermoe brain train` wrote")
    config: Json = read_json(path, "train again in another folder")
    if config.get("task") != "brain age":
        raise UserError(f"{folder} is a run of another task: name one that `ermoe brain train` wrote")
    return config


def over_folds(estimate: Estimate, scans: Sequence[Scan], splits: Splits) -> Array:
    """An estimate for every scan from the folds that test it; NaN for those nobody tests."""
    position = {scan.key: number for number, scan in enumerate(scans)}
    found = np.full((splits.num_folds, len(scans)), np.nan)
    for fold in range(splits.num_folds):
        train, test = splits.select(scans, fold, "train"), splits.select(scans, fold, "test")
        for scan, age in zip(test, estimate(train, test), strict=True):
            found[fold, position[scan.key]] = age
    return mean_of_known(found)


def mean_age(train: Sequence[Scan], test: Sequence[Scan]) -> list[float]:
    """Everybody is as old as the training people on average."""
    return [_mean(train)] * len(test)


def by_label(label: Callable[[Scan], str | None]) -> Estimate:
    """Everybody is as old as the training people of the same label; an unknown label means all of them."""

    def estimate(train: Sequence[Scan], test: Sequence[Scan]) -> list[float]:
        own: dict[str | None, list[Scan]] = {}
        for scan in train:
            own.setdefault(label(scan), []).append(scan)
        return [_mean(own.get(label(scan)) or train) for scan in test]

    return estimate


def by_ridge(measure: Mapping[str, Array]) -> Estimate:
    """Ridge regression on the measures of scans, by their keys."""

    def estimate(train: Sequence[Scan], test: Sequence[Scan]) -> list[float]:
        rows, ages = np.array([measure[scan.key] for scan in train]), np.array([scan.age for scan in train], float)
        ridge = Ridge.fit(rows, ages, [scan.participant_id for scan in train])
        return [float(age) for age in ridge.ages([measure[scan.key] for scan in test])]

    return estimate


def inside(label: Callable[[Scan], str | None], estimate: Estimate) -> Estimate:
    """An estimate fitted on the training people of the same label; on all of them where those are too few."""

    def found(train: Sequence[Scan], test: Sequence[Scan]) -> list[float]:
        ages: dict[str, float] = {}
        for level in dict.fromkeys(map(label, test)):
            own = [scan for scan in train if label(scan) == level]
            asked = [scan for scan in test if label(scan) == level]
            enough = level is not None and len({scan.participant_id for scan in own}) >= _SMALLEST_LEVEL
            ages |= zip([scan.key for scan in asked], estimate(own if enough else train, asked), strict=True)
        return [ages[scan.key] for scan in test]

    return found


def _tissue_ridge(cache: VolumeCache) -> Estimate:
    """Ridge regression on the volumes of white matter, grey matter and fluid, absolute and as shares of the brain."""

    def estimate(train: Sequence[Scan], test: Sequence[Scan]) -> list[float]:
        from sklearn.linear_model import RidgeCV
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler

        model = make_pipeline(StandardScaler(), RidgeCV(alphas=np.logspace(-2, 3, 26)))
        model.fit(_features(cache, train), [scan.age for scan in train])
        return [float(age) for age in model.predict(_features(cache, test))]

    return estimate


def confounds_among(scans: Sequence[Scan], splits: Splits) -> list[str]:
    """A sentence for every label of the scans that by itself tells age better than predicting the mean."""
    estimates = {f"{name}{_ALONE}": by_label(label) for name, label in labels(scans).items()}
    age_N = np.array([math.nan if scan.age is None else scan.age for scan in scans])
    error = {
        name: float(np.nanmean(np.abs(over_folds(estimate, scans, splits) - age_N)))
        for name, estimate in {_MEAN: mean_age, **estimates}.items()
    }
    return _confounds_in_words(error)


def _telling(error: Mapping[str, float]) -> list[str]:
    """Labels whose error alone is below that of the mean, by the errors of all estimates."""
    told = [name for name in error if name.endswith(_ALONE) and error[name] < _TELLTALE * error[_MEAN]]
    return [name.removesuffix(_ALONE) for name in told]


def _confounds_in_words(error: Mapping[str, float]) -> list[str]:
    return [
        f"{name} alone predicts age with an error of {error[name + _ALONE]:.1f} years (predicting the mean: "
        f"{error[_MEAN]:.1f}): figures over all scans are confounded with it; read those within one level of it"
        for name in _telling(error)
    ]


def labels(scans: Sequence[Scan]) -> dict[str, Callable[[Scan], str | None]]:
    """What could stand for a scanner or a batch: the site, and every column of the table with a few levels.

    Columns that begin with "age" are left out: a group of ages predicts age because it is one.

    >>> from pathlib import Path
    >>> scans = [Scan(f"sub-{i}", None, Path(), columns={"batch": "AB"[i % 2], "id": str(i)}) for i in range(8)]
    >>> list(labels(scans))
    ['batch']
    >>> list(labels([*scans, Scan("sub-9", None, Path(), site="one"), Scan("sub-10", None, Path(), site="other")]))
    ['site', 'batch']
    """
    found: dict[str, Callable[[Scan], str | None]] = {}
    if len({scan.site for scan in scans if scan.site is not None}) > 1:
        found["site"] = lambda scan: scan.site
    for column in dict.fromkeys(name for scan in scans for name in scan.columns):
        if not column.casefold().startswith("age") and _is_label([scan.columns.get(column) for scan in scans]):
            found[column] = lambda scan, column=column: scan.columns.get(column)  # type: ignore[misc]
    return found


def _is_label(values: Sequence[str | None]) -> bool:
    """At least two levels that several scans have, and not too many levels."""
    counts = Counter(value for value in values if value is not None)
    return sum(count > 1 for count in counts.values()) >= 2 and len(counts) <= _MOST_LEVELS


def _features(cache: VolumeCache, scans: Sequence[Scan]) -> Array:
    rows = []
    for scan in scans:
        tissue = cache.volume(scan, with_tissue=True).tissue_3XYZ
        assert tissue is not None
        litres = np.asarray(tissue, dtype=np.float64).sum((1, 2, 3)) * cache.preprocessing.spacing_mm**3 / 1e6
        rows.append([*litres, *(litres / litres.sum())])
    return np.array(rows)


def _mean(scans: Sequence[Scan]) -> float:
    return statistics.fmean(scan.age for scan in scans if scan.age is not None)
