"""How good predicted ages are, with intervals from resampling people.

Every figure is a function of a few means over scans, so resampling people is a product: how often each scan was drawn,
and what is known of it.

Letters: N scans, P people, D draws.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ermoe.errors import UserError

Array = NDArray[np.float64]
_DRAWS = 2000
FEWEST = 4
"""People below which a group has no figures: those of one to three are anecdotes, and may tell who they are."""

LABELS = {
    "mae": "MAE",
    "rmse": "RMSE",
    "r2": "R²",
    "r": "r",
    "gap_age_r": "corr(gap, age)",
    "slope": "slope",
    "intercept": "intercept",
    "bias": "mean gap",
}
"""Figure → how tables call it."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure with the limits of its 95 % interval."""

    value: float
    low: float
    high: float

    def text(self, digits: int = 2) -> str:
        """
        >>> Figure(2.307, 2.1, 2.55).text()
        '2.31 [2.10, 2.55]'
        """
        if np.isnan(self.value):
            return "–"
        if np.isnan(self.low):
            return f"{self.value:.{digits}f}"
        return f"{self.value:.{digits}f} [{self.low:.{digits}f}, {self.high:.{digits}f}]"


def figures(age_N: ArrayLike, predicted_N: ArrayLike) -> dict[str, float]:
    """All figures of `LABELS`: errors in years, and the line predicted = intercept + slope · age.

    What has no meaning, such as a correlation with a constant, is NaN.

    >>> found = figures([50, 60, 70], [52, 60, 68])
    >>> round(found["mae"], 3), round(found["slope"], 3), round(found["gap_age_r"], 3)
    (1.333, 0.8, -1.0)
    """
    age_N, predicted_N = _as_array(age_N), _as_array(predicted_N)
    found = _figures(np.ones((1, len(age_N))), age_N, predicted_N)
    return {name: float(value[0]) for name, value in found.items()}


def bootstrap(
    people: Sequence[Hashable], age_N: ArrayLike, predicted_N: ArrayLike, *, draws: int = _DRAWS, seed: int = 0
) -> dict[str, Figure]:
    """The figures with percentile intervals over resampled people: all scans of a person are drawn together.

    >>> found = bootstrap(["a", "a", "b", "c"], [50, 51, 60, 70], [52, 52, 61, 66], seed=1)
    >>> found["mae"].low <= found["mae"].value <= found["mae"].high
    True
    """
    age_N, predicted_N = _as_array(age_N), _as_array(predicted_N)
    values = figures(age_N, predicted_N)
    if len(set(people)) < 2:
        return {name: Figure(value, np.nan, np.nan) for name, value in values.items()}
    drawn = _figures(_times_drawn(people, draws, seed), age_N, predicted_N)
    return {name: Figure(values[name], *_limits(drawn[name])) for name in values}


def paired_difference(
    people: Sequence[Hashable], error_a_N: ArrayLike, error_b_N: ArrayLike, *, draws: int = _DRAWS, seed: int = 0
) -> Figure:
    """Mean absolute error of a minus that of b, over the same scans, with an interval over resampled people.

    >>> paired_difference(["x", "y", "z"], [1, 1, 1], [-2, 2, 2]).text()
    '-1.00 [-1.00, -1.00]'
    """
    difference_N = np.abs(_as_array(error_a_N)) - np.abs(_as_array(error_b_N))
    times_DN = _times_drawn(people, draws, seed)
    return Figure(float(difference_N.mean()), *_limits(times_DN @ difference_N / times_DN.sum(1)))


def decade(age: float) -> str:
    """
    >>> decade(64.3)
    '60–69'
    """
    first = 10 * int(age // 10)
    return f"{first}–{first + 9}"


def _figures(times_DN: Array, age_N: Array, predicted_N: Array) -> dict[str, Array]:
    """Every figure of D samples that hold each scan so many times.

    All are functions of means. Ages need not be centred, since float64 has digits enough for them.
    """
    gap_N, total_D = predicted_N - age_N, times_DN.sum(1)

    def mean(value_N: Array) -> Array:
        return times_DN @ value_N / total_D

    def covariance(a_N: Array, b_N: Array) -> Array:
        return mean(a_N * b_N) - mean(a_N) * mean(b_N)

    age_variance, predicted_variance, gap_variance = (
        np.maximum(covariance(value_N, value_N), 0) for value_N in (age_N, predicted_N, gap_N)
    )
    slope = _ratio(covariance(age_N, predicted_N), age_variance)
    return {
        "mae": mean(np.abs(gap_N)),
        "rmse": np.sqrt(mean(gap_N**2)),
        "r2": 1 - _ratio(mean(gap_N**2), age_variance),
        "r": _ratio(covariance(age_N, predicted_N), np.sqrt(age_variance * predicted_variance)),
        "gap_age_r": _ratio(covariance(age_N, gap_N), np.sqrt(age_variance * gap_variance)),
        "slope": slope,
        "intercept": mean(predicted_N) - slope * mean(age_N),
        "bias": mean(gap_N),
    }


def _ratio(above: Array, below: Array) -> Array:
    return np.divide(above, below, out=np.full_like(above, np.nan), where=below > 1e-9)


def _times_drawn(people: Sequence[Hashable], draws: int, seed: int) -> Array:
    """How often each draw of people holds each scan, (D, N): all scans of a person are drawn together."""
    number = {person: place for place, person in enumerate(dict.fromkeys(people))}
    equal = np.full(len(number), 1 / len(number))
    times_DP = np.random.default_rng(seed).multinomial(len(number), equal, size=draws).astype(np.float64)
    return times_DP[:, [number[person] for person in people]]


def _limits(drawn_D: Array) -> tuple[float, float]:
    known = drawn_D[~np.isnan(drawn_D)]
    if not len(known):
        return np.nan, np.nan
    low, high = np.quantile(known, [0.025, 0.975])
    return float(low), float(high)


def _as_array(values: ArrayLike) -> Array:
    array = np.asarray(values, dtype=np.float64)
    if not np.isfinite(array).all():
        raise UserError("ages and predictions must be finite numbers: leave out scans that have none")
    return array


_MOST_YEARS = 1.0


@dataclass(frozen=True, slots=True)
class Retest:
    """ICC(1) of the gap, and the standard deviation within a person in years, over people with several scans."""

    num_people: int
    num_scans: int
    icc: float
    within_sd: float


def retest(people: Sequence[str], age_N: ArrayLike, predicted_N: ArrayLike) -> Retest | None:
    """Of the gaps (predicted − age), so that growing older between two scans counts as no error.

    A person's scans count from the first one on until a year after it. ICC(1) = (MSB − MSW) / (MSB + (k₀ − 1) MSW)
    of a one-way analysis of variance with unequal numbers of scans. None if fewer than four people have two such
    scans.

    >>> age = [60, 60.5, 70, 70.5, 50, 50.5, 80, 80.5, 40]
    >>> found = retest([*"aabbccdde"], age, [62, 62.5, 69, 69.7, 50, 50.3, 79, 79.4, 41])
    >>> found.num_people, round(found.icc, 3), round(found.within_sd, 3)
    (4, 0.994, 0.106)
    """
    age, predicted = np.asarray(age_N, dtype=np.float64), np.asarray(predicted_N, dtype=np.float64)
    groups = []
    for person in dict.fromkeys(people):
        rows = np.array([other == person for other in people])
        near = rows & (age - age[rows].min() < _MOST_YEARS)
        if near.sum() >= 2:
            groups.append((predicted - age)[near])
    if len(groups) < FEWEST:
        return None
    size = np.array([len(group) for group in groups], dtype=np.float64)
    total, count = size.sum(), len(groups)
    within = sum(float(((group - group.mean()) ** 2).sum()) for group in groups) / (total - count)
    grand = np.concatenate(groups).mean()
    between = sum(len(group) * float((group.mean() - grand) ** 2) for group in groups) / (count - 1)
    usual = (total - (size**2).sum() / total) / (count - 1)
    below = between + (usual - 1) * within
    icc = (between - within) / below if below > 0 else float("nan")
    return Retest(count, int(total), float(icc), float(np.sqrt(within)))
