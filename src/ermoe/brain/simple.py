"""Estimates that need no network: what any network has to be compared with.

All are fitted on the training people of a fold and read on the others, over the very same folds.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from ermoe.brain.data.cache import VolumeCache
from ermoe.brain.data.scans import Scan
from ermoe.brain.data.splits import Splits

Estimate = Callable[[Sequence[Scan], Sequence[Scan]], list[float]]
"""(training scans, other scans) → ages of the others."""

_MOST_LEVELS = 12
"""Levels above which a column of the table is no label of a batch but a measurement."""


def over_folds(estimate: Estimate, scans: Sequence[Scan], splits: Splits) -> NDArray[np.float64]:
    """An estimate for every scan from the folds that test it; NaN for those nobody tests."""
    position = {scan.key: number for number, scan in enumerate(scans)}
    found = np.full((splits.num_folds, len(scans)), np.nan)
    for fold in range(splits.num_folds):
        train, test = splits.select(scans, fold, "train"), splits.select(scans, fold, "test")
        for scan, age in zip(test, estimate(train, test), strict=True):
            found[fold, position[scan.key]] = age
    known = ~np.isnan(found)
    return np.where(known.any(0), np.nansum(found, axis=0) / np.maximum(known.sum(0), 1), np.nan)


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


def tissue_ridge(cache: VolumeCache) -> Estimate:
    """Ridge regression on the volumes of white matter, grey matter and fluid, absolute and as shares of the brain."""

    def estimate(train: Sequence[Scan], test: Sequence[Scan]) -> list[float]:
        from sklearn.linear_model import RidgeCV
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler

        model = make_pipeline(StandardScaler(), RidgeCV(alphas=np.logspace(-2, 3, 26)))
        model.fit(_features(cache, train), [scan.age for scan in train])
        return [float(age) for age in model.predict(_features(cache, test))]

    return estimate


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


def _features(cache: VolumeCache, scans: Sequence[Scan]) -> NDArray[np.float64]:
    rows = []
    for scan in scans:
        tissue = cache.volume(scan, with_tissue=True).tissue_3XYZ
        assert tissue is not None
        litres = np.asarray(tissue, dtype=np.float64).sum((1, 2, 3)) * cache.preprocessing.spacing_mm**3 / 1e6
        rows.append([*litres, *(litres / litres.sum())])
    return np.array(rows)


def _mean(scans: Sequence[Scan]) -> float:
    return statistics.fmean(scan.age for scan in scans if scan.age is not None)
