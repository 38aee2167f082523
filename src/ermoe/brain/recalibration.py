"""A model for another site, from people of known age scanned there: one intercept and one slope, with their intervals.

age = a + b · predicted is fitted to the new people. Unlike undoing predicted = a + b · age, it cannot blow noise up. A
slope told by few people of similar ages is mostly noise, so it is drawn to 1, by how uncertain it is:
b = (b̂ / s² + 1 / s₀²) / (1 / s² + 1 / s₀²) with s the standard error of b̂ and s₀ = 0.25. The intercept then makes the
mean right. Nothing is applied unless a recalibrated model is asked to predict, and then it says so.

Letters: N people.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from ermoe.brain.measures import Double
from ermoe.errors import UserError

_FEWEST_PEOPLE = 5
_SLOPE_SPREAD = 0.25  # between sites
_DRAWS = 2000
_NARROW_YEARS = 10.0


@dataclass(frozen=True, slots=True)
class Recalibration:
    """age = intercept + slope · predicted at a site, from ``num_people`` of it, aged ``lowest_age`` to ``highest_age``.

    ``shift`` is the mean of predicted − age among them, with its 95 % interval, and ``where`` who they were.
    """

    intercept: float
    slope: float
    num_people: int
    lowest_age: float
    highest_age: float
    shift: float
    shift_low: float
    shift_high: float
    where: str = ""

    @classmethod
    def fit(cls, age_N: ArrayLike, predicted_N: ArrayLike, *, where: str = "", seed: int = 0) -> Recalibration:
        """From people of the site, one scan each.

        >>> found = Recalibration.fit([30, 40, 50, 60, 70], [36, 45, 54, 66, 74])
        >>> round(found.shift, 1), round(found.applied(54), 0)
        (5.0, 49.0)
        """
        age, predicted = np.asarray(age_N, dtype=np.float64), np.asarray(predicted_N, dtype=np.float64)
        if len(age) < _FEWEST_PEOPLE:
            raise UserError(f"{len(age)} people with an age and a prediction: recalibrating needs {_FEWEST_PEOPLE}")
        slope = _drawn_slope(age, predicted)
        gap = predicted - age
        drawn = np.random.default_rng(seed).integers(len(gap), size=(_DRAWS, len(gap)))
        low, high = np.quantile(gap[drawn].mean(1), [0.025, 0.975])
        intercept = float(age.mean() - slope * predicted.mean())
        ages = float(age.min()), float(age.max())
        return cls(intercept, slope, len(age), *ages, float(gap.mean()), float(low), float(high), where)

    def applied(self, predicted: float) -> float:
        """a + b · predicted."""
        return self.intercept + self.slope * predicted

    def in_words(self) -> str:
        """What was done and from how little, in one or two sentences."""
        who = f" ({self.where})" if self.where else ""
        said = (
            f"recalibrated on {self.num_people} people{who} of {self.lowest_age:.0f} to {self.highest_age:.0f} years, "
            f"whose predictions were {self.shift:+.1f} years off [{self.shift_low:+.1f}, {self.shift_high:+.1f}]: "
            f"age = {self.intercept:.2f} + {self.slope:.3f} · predicted"
        )
        narrow = self.highest_age - self.lowest_age < _NARROW_YEARS
        return said + ("; their ages are too alike to tell a slope" if narrow else "")


def _drawn_slope(age_N: Double, predicted_N: Double) -> float:
    """The slope of the new people, drawn to 1 by how uncertain it is."""
    x_N, y_N = predicted_N - predicted_N.mean(), age_N - age_N.mean()
    power = float(x_N @ x_N)
    if power < 1e-9:
        return 1.0
    own = float(x_N @ y_N) / power
    rest_N = y_N - own * x_N
    variance = max(float(rest_N @ rest_N) / (len(x_N) - 2) / power, 1e-9)
    return (own / variance + 1 / _SLOPE_SPREAD**2) / (1 / variance + 1 / _SLOPE_SPREAD**2)
