"""Ridge regression of age on the measures of a scan, and how far to believe what a network adds to it.

age = b + Σ wᶠ zᶠ with standardised measures z, and w the least squares that pay α |w|² beside their errors. A linear
estimate does not saturate: a brain that differs twice as much gets twice the difference in age.

How far a prediction may be off grows with how far its scan lies from the training scans. The variance of a linear
prediction is σ² (1 + h), with the leverage h = 1/N + zᵀ (ZᵀZ + αI)⁻¹ z.

Letters: N scans, F measures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ermoe.errors import UserError

Double = NDArray[np.float64]

_STRENGTHS = tuple(np.logspace(-1, 2.5, 15))
_NUM_PARTS = 5
_FEWEST_PEOPLE = 3
_SURE = 1.645  # standard errors below which what is added is worth nothing
_FEWEST_JUDGES = 5  # people, to say what it is worth
MIDDLE = 50.0
"""What a network answers that agrees with the ridge: residuals are learnt around the middle of the bins."""


@dataclass(frozen=True, slots=True)
class Ridge:
    """A fitted line through measures.

    Args:
        mean, scale: of each measure among the training scans.
        weight: years a deviation of each measure.
        intercept: the mean age.
        strength: α.
        inverse: (ZᵀZ + αI)⁻¹, (F, F), for the leverage.
        num_scans: N.
        offsets: what sites add to measures, which has been taken off; none unless it was asked for.

    >>> x_NF, age_N = np.array([[1.0], [2.0], [3.0], [4.0]]), np.array([40.0, 50.0, 60.0, 70.0])
    >>> Ridge.fit(x_NF, age_N, ["a", "b", "c", "d"], strengths=[1e-9]).ages([[6.0]]).round(3).tolist()
    [90.0]
    """

    mean: tuple[float, ...]
    scale: tuple[float, ...]
    weight: tuple[float, ...]
    intercept: float
    strength: float
    inverse: tuple[tuple[float, ...], ...]
    num_scans: int
    offsets: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    @classmethod
    def fit(
        cls, measure_NF: Double, age_N: ArrayLike, people: Sequence[str], *, strengths: Sequence[float] = _STRENGTHS
    ) -> Ridge:
        """With the strength whose predictions of people left out are the least wrong (mean absolute error)."""
        age = np.asarray(age_N, dtype=np.float64)
        if len(set(people)) < _FEWEST_PEOPLE:
            raise UserError(f"{len(set(people))} people are too few to fit a ridge: use fewer folds, or more people")
        errors = [np.abs(left_out(measure_NF, age, people, strength) - age).mean() for strength in strengths]
        return cls.with_strength(measure_NF, age, float(strengths[int(np.argmin(errors))]))

    @classmethod
    def with_strength(cls, measure_NF: Double, age_N: Double, strength: float) -> Ridge:
        """With a strength that was chosen already."""
        mean_F, scale_F = measure_NF.mean(0), np.maximum(measure_NF.std(0), 1e-9)
        z_NF = (measure_NF - mean_F) / scale_F
        inverse_FF = np.linalg.inv(z_NF.T @ z_NF + strength * np.eye(z_NF.shape[1]))
        weight_F = inverse_FF @ z_NF.T @ (age_N - age_N.mean())
        rows = tuple(tuple(row) for row in inverse_FF.tolist())
        mean, scale, weight = (tuple(values.tolist()) for values in (mean_F, scale_F, weight_F))
        return cls(mean, scale, weight, float(age_N.mean()), strength, rows, len(age_N))

    def ages(self, measure_NF: ArrayLike) -> Double:
        """Predicted ages, (N,)."""
        return self.intercept + self._standardised(measure_NF) @ np.array(self.weight)

    def width(self, measure_NF: ArrayLike) -> Double:
        """√(1 + h): how much wider than usual the error of each prediction is spread, (N,)."""
        z_NF = self._standardised(measure_NF)
        return np.sqrt(1 + 1 / self.num_scans + ((z_NF @ np.array(self.inverse)) * z_NF).sum(1))

    def _standardised(self, measure_NF: ArrayLike) -> Double:
        return (np.asarray(measure_NF, dtype=np.float64) - self.mean) / self.scale


def left_out(measure_NF: Double, age_N: Double, people: Sequence[str], strength: float) -> Double:
    """Ages of everybody by ridges that were fitted without them, people in five parts, (N,)."""
    part_N = parts(age_N, people)
    found_N = np.empty(len(age_N))
    for part in np.unique(part_N):
        rest_N = part_N != part
        found_N[~rest_N] = Ridge.with_strength(measure_NF[rest_N], age_N[rest_N], strength).ages(measure_NF[~rest_N])
    return found_N


def parts(age_N: Double, people: Sequence[str]) -> NDArray[np.int64]:
    """The part of each scan, (N,), all scans of a person in one of five.

    Neighbours in age go to different parts, so that the parts are alike and nothing depends on the order of scans.
    """
    first_age: dict[str, float] = {}
    for who, age in zip(people, age_N.tolist(), strict=True):
        first_age[who] = min(age, first_age.get(who, age))
    line = sorted(first_age, key=lambda who: (first_age[who], who))
    part_of = {who: place % min(_NUM_PARTS, len(line)) for place, who in enumerate(line)}
    return np.array([part_of[who] for who in people])


@dataclass(frozen=True, slots=True)
class Blend:
    """What people held out say of a ridge and its network.

    Args:
        worth: share of what the network adds that is believed, 0 to 1.
        spread: years; 90 % of the ages lie within spread · width of their predictions. NaN if nobody says.
        num_people: how many said so.
        spread_of_strangers: the same without ridges of scanners' own, for people of other scanners; None if it is as
            wide.
    """

    worth: float = 0.0
    spread: float = float("nan")
    num_people: int = 0
    spread_of_strangers: float | None = None

    def reach(self, *, is_stranger: bool) -> float:
        """Half the width of an interval at a width of 1."""
        return self.spread if self.spread_of_strangers is None or not is_stranger else self.spread_of_strangers


def worth_of(added_N: Double, error_N: Double) -> float:
    """How much of what is added to an estimate is to be believed, 0 to 1, by how well it foretells the errors without.

    The slope b of error = b · added, shrunk by (1 − (1.645 / t)²) where t is b in standard errors: nothing where chance
    would do as well, nearly b where it is certain, and in between no jump.

    >>> added = np.array([2.0, -1.0, 3.0, -2.0, 1.0, -3.0])
    >>> worth_of(added, added * 0.8) > 0.75, worth_of(added, -added), worth_of(0 * added, added)
    (True, 0.0, 0.0)
    """
    power = float(added_N @ added_N)
    if len(added_N) < _FEWEST_JUDGES or power < 1e-9:
        return 0.0
    slope = float(added_N @ error_N) / power
    variance = float(((error_N - slope * added_N) ** 2).sum()) / (len(added_N) - 1)
    shrunk = slope * max(0.0, 1 - _SURE**2 * variance / power / slope**2) if slope > 0 else 0.0
    return min(1.0, shrunk)
