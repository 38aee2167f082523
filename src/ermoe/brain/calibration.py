"""Linear calibration: predicted = a + b · age is fitted where ages may be used, and undone where they may not.

A calibrated prediction is (predicted − a) / b. It never sees the age it is to predict, keeps the order of predictions
and so their correlation with age, and multiplies their noise by 1 / b: noise cannot be calibrated into accuracy. The
other practice, subtracting α · age + β, uses the age of the very scan and makes any model look good; here it exists
only as the age-residualised gap, a column for association tests, never a score.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ermoe.errors import UserError

_SMALLEST_SLOPE = 0.2
_SMALLEST_GROUP = 10
"""People below which a sex has no line of its own and takes the pooled one."""
POOLED = "pooled"


@dataclass(frozen=True, slots=True)
class Line:
    """predicted = intercept + slope · age, as fitted on ``num_scans`` scans of ages ``lowest_age`` to
    ``highest_age``.

    The paper's own figures: its test predictions had slope .887 and intercept 9.026, its calibration b = .9347 and
    a = 5.081.

    >>> tuple(round(value, 3) for value in Line(5.081, 0.9347).applied_to(slope=0.887, intercept=9.026))
    (0.949, 4.221)
    """

    intercept: float
    slope: float
    num_scans: int = 0
    lowest_age: float = math.nan
    highest_age: float = math.nan

    @classmethod
    def fit(cls, age_N: ArrayLike, predicted_N: ArrayLike) -> Line:
        """Least squares; refuses a line so flat that undoing it would blow noise up more than five times."""
        age = np.asarray(age_N, dtype=np.float64)
        if len(age) < 3 or np.ptp(age) == 0:
            raise UserError(f"a calibration needs at least three scans of different ages, not {len(age)}")
        slope, intercept = np.polyfit(age, np.asarray(predicted_N, dtype=np.float64), 1)
        if not slope >= _SMALLEST_SLOPE:
            raise UserError(
                f"calibration refused: predictions rise by {slope:.2f} years a year of age, and undoing a slope below "
                f"{_SMALLEST_SLOPE} only multiplies noise; read the raw predictions"
            )
        return cls(float(intercept), float(slope), len(age), float(age.min()), float(age.max()))

    def undo(self, predicted: ArrayLike) -> NDArray[np.float64]:
        """(predicted − a) / b."""
        return (np.asarray(predicted, dtype=np.float64) - self.intercept) / self.slope

    def applied_to(self, *, slope: float, intercept: float) -> tuple[float, float]:
        """What calibration makes of the slope and intercept of a set of predictions."""
        return slope / self.slope, (intercept - self.intercept) / self.slope


@dataclass(frozen=True, slots=True)
class AgeCalibration:
    """One pooled line and, where a sex has people enough, one for it."""

    lines: Mapping[str, Line]

    @classmethod
    def fit(cls, age_N: ArrayLike, predicted_N: ArrayLike, sex_N: Sequence[str | None]) -> AgeCalibration:
        """On predictions of scans whose ages may be used: of held-out folds, or of a validation split."""
        age, predicted = np.asarray(age_N, dtype=np.float64), np.asarray(predicted_N, dtype=np.float64)
        lines = {POOLED: Line.fit(age, predicted)}
        for sex in sorted({sex for sex in sex_N if sex is not None}):
            rows = np.array([other == sex for other in sex_N])
            if rows.sum() >= _SMALLEST_GROUP:
                try:
                    lines[sex] = Line.fit(age[rows], predicted[rows])
                except UserError:
                    continue  # a sex whose own line is too flat keeps the pooled one
        return cls(lines)

    def pooled(self, predicted_N: ArrayLike) -> NDArray[np.float64]:
        """With one line for all."""
        return self.lines[POOLED].undo(predicted_N)

    def by_sex(self, predicted_N: ArrayLike, sex_N: Sequence[str | None]) -> NDArray[np.float64]:
        """With the line of each one's sex, or the pooled one."""
        predicted = np.asarray(predicted_N, dtype=np.float64)
        chosen = [self.lines.get(sex or POOLED, self.lines[POOLED]) for sex in sex_N]
        return np.array([float(line.undo(value)) for line, value in zip(chosen, predicted, strict=True)])


def age_residualised_gap(age_N: ArrayLike, predicted_N: ArrayLike) -> NDArray[np.float64]:
    """The gap with its own straight trend over age removed: uncorrelated with age by construction, and no score.

    >>> age_residualised_gap([50, 60, 70], [55, 60, 65]).round(6).tolist()
    [0.0, 0.0, 0.0]
    """
    age, predicted = np.asarray(age_N, dtype=np.float64), np.asarray(predicted_N, dtype=np.float64)
    gap = predicted - age
    if len(age) < 3 or np.ptp(age) == 0:
        return np.full_like(gap, np.nan)
    slope, intercept = np.polyfit(age, gap, 1)
    return gap - (intercept + slope * age)
