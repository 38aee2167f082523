"""From the outputs of a network to ages: bins with an expectation, or a plain regression; and their calibration.

A head has no parameters of its own. It says how many outputs the network needs, what its loss is, and how its outputs
are read; its numbers are stored beside the weights, since without them the weights mean nothing.

Calibration is linear: predicted = a + b · age is fitted where ages may be used, and undone where they may not. A
calibrated prediction is (predicted − a) / b. It never sees the age it is to predict, keeps the order of predictions
and so their correlation with age, and multiplies their noise by 1 / b: noise cannot be calibrated into accuracy. The
other practice, subtracting α · age + β, uses the age of the very scan and makes any model look good; here it exists
only as the age-residualised gap, a column for association tests, never a score.

Letters: B and N scans, K bins, Q quantiles.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from ermoe.errors import UserError
from ermoe.files import Json, from_json

POOLED = "pooled"
_LEVEL = 0.9  # of the prediction intervals
_LEAST_MASS = 1e-4  # of a bin, so that no age is impossible
_SMALLEST_SLOPE = 0.2
_SMALLEST_GROUP = 10
"""People below which a sex has no line of its own and takes the pooled one."""


@dataclass(frozen=True, slots=True)
class AgeBins:
    """Logits over bins of equal width; the age is their expectation, Σ a_b softmax(g / τ)_b (Eq. 9).

    Args:
        low, high: range of the bins in years; the last bin may reach beyond ``high``.
        step: width of a bin in years.
        labels: "soft" spreads an age over the bins as a normal distribution of width ``sigma``, and the loss is the
            Kullback–Leibler divergence from it; "cut" does so without renormalising what the ends of the bins cut off,
            as SFCN's authors; "hard" is the cross-entropy of the one bin that holds the age.
        sigma: years.
        l1: weight of |age − expectation| in years, beside the loss of the bins.
        temperature: τ of the expectation; 1 is how the network was trained.

    >>> bins = AgeBins(40, 80, sigma=1.0)
    >>> bins.num_outputs, bins.centres()[:2].tolist()
    (40, [40.5, 41.5])
    >>> target_BK = bins.soft_labels(torch.tensor([60.25]))
    >>> round(float(target_BK.sum()), 5), round(float(target_BK @ bins.centres()), 3)
    (1.0, 60.25)
    """

    low: float
    high: float
    step: float = 1.0
    labels: str = "soft"
    sigma: float = 1.0
    l1: float = 0.0
    temperature: float = 1.0
    kind: Literal["bins"] = "bins"

    def __post_init__(self) -> None:
        if not (self.step > 0 and self.high > self.low):
            raise UserError(
                f"age bins from {self.low:g} to {self.high:g} by {self.step:g}: need low < high and step > 0"
            )
        if self.labels not in ("soft", "cut", "hard"):
            raise UserError(
                f"labels={self.labels!r}: use 'soft' (Kullback–Leibler), 'cut' at the ends, or 'hard' (cross-entropy)"
            )
        if not (self.sigma > 0 and self.temperature > 0 and self.l1 >= 0):
            raise UserError("age bins need sigma > 0, temperature > 0 and l1 >= 0")

    @property
    def num_outputs(self) -> int:
        """Bins, K."""
        return math.ceil((self.high - self.low) / self.step - 1e-9)

    def edges(self) -> Tensor:
        """Where bins begin, and where the last one ends, (K + 1,)."""
        return self.low + self.step * torch.arange(self.num_outputs + 1, dtype=torch.float32)

    def centres(self) -> Tensor:
        """The ages a_b that bins stand for."""
        return self.edges()[:-1] + self.step / 2

    def soft_labels(self, age_B: Tensor) -> Tensor:
        """Probabilities (B, K); an age beyond the bins counts as their end. With "cut" they may sum to less than 1."""
        edge_K = self.edges().to(age_B)
        if self.labels == "cut":
            return torch.special.ndtr((edge_K - age_B.unsqueeze(1)) / self.sigma).diff(dim=1)
        age_B1 = age_B.clamp(self.low, self.low + self.step * self.num_outputs).unsqueeze(1)
        mass_BK = torch.special.ndtr((edge_K - age_B1) / self.sigma).diff(dim=1)
        return mass_BK / mass_BK.sum(1, keepdim=True)

    def prior(self, age_N: Tensor) -> Tensor:
        """Outputs (K,) that know nothing of a scan: normal around the median of the ages, and as wide as they are.

        >>> bins = AgeBins(10, 110)
        >>> round(float(bins.age(bins.prior(torch.tensor([30.0, 60.0, 65.0])).unsqueeze(0))), 1)
        60.0
        """
        wide = replace(self, sigma=max(self.sigma, float(age_N.std(correction=0))))
        return torch.log(wide.soft_labels(age_N.median().unsqueeze(0)).squeeze(0) + _LEAST_MASS)

    def bin_of(self, age_B: Tensor) -> Tensor:
        """The bin that holds each age."""
        return ((age_B - self.low) / self.step).floor().long().clamp(0, self.num_outputs - 1)

    def loss(self, output_BK: Tensor, age_B: Tensor) -> Tensor:
        """The mean over scans."""
        if self.labels != "hard":
            loss = F.kl_div(output_BK.log_softmax(-1), self.soft_labels(age_B), reduction="batchmean")
        else:
            loss = F.cross_entropy(output_BK, self.bin_of(age_B))
        if self.l1:
            loss = loss + self.l1 * (self.expectation(output_BK.softmax(-1)) - age_B).abs().mean()
        return loss

    def probability(self, output_BK: Tensor, temperature: float | None = None) -> Tensor:
        """softmax(g / τ), (B, K)."""
        return (output_BK.float() / (self.temperature if temperature is None else temperature)).softmax(-1)

    def expectation(self, probability_BK: Tensor) -> Tensor:
        """Σ a_b p_b, (B,)."""
        return probability_BK @ self.centres().to(probability_BK)

    def age(self, output_BK: Tensor) -> Tensor:
        """Predicted ages (B,)."""
        return self.expectation(self.probability(output_BK))

    def quantiles(self, probability_BK: Tensor, levels: Sequence[float]) -> Tensor:
        """Ages below which the given shares of the probability lie, (B, Q); within a bin it is spread evenly.

        >>> bins = AgeBins(50, 54)
        >>> bins.quantiles(torch.tensor([[0.0, 0.5, 0.5, 0.0]]), [0.25, 0.5]).tolist()
        [[51.5, 52.0]]
        """
        cumulative_BK = F.pad(probability_BK.double().cumsum(1), (1, 0))
        cumulative_BK = cumulative_BK / cumulative_BK[:, -1:]
        rows = [np.interp(levels, cumulative_K, self.edges()) for cumulative_K in cumulative_BK.numpy()]
        return torch.tensor(np.stack(rows)).float()

    def interval(self, probability_BK: Tensor) -> Tensor:
        """Lower and upper limits (B, 2) between which 90 % of the probability lies, as much beyond either."""
        return self.quantiles(probability_BK, [(1 - _LEVEL) / 2, (1 + _LEVEL) / 2])


@dataclass(frozen=True, slots=True)
class AgeRegression:
    """One output in units of ``scale`` years around ``mean``, trained with the absolute error (Alg. 2).

    >>> AgeRegression(mean=60.0, scale=10.0).age(torch.tensor([[0.5]])).tolist()
    [65.0]
    """

    mean: float
    scale: float
    kind: Literal["regression"] = "regression"

    num_outputs = 1

    def __post_init__(self) -> None:
        if not self.scale > 0:
            raise UserError(f"scale={self.scale}: a regression of ages needs a positive scale in years")

    def age(self, output_B1: Tensor) -> Tensor:
        """Predicted ages (B,)."""
        return self.mean + self.scale * output_B1.float().squeeze(-1)

    def loss(self, output_B1: Tensor, age_B: Tensor) -> Tensor:
        """The mean absolute error, in units of ``scale``."""
        return (self.age(output_B1) - age_B).abs().mean() / self.scale

    def prior(self, age_N: Tensor) -> Tensor:
        """The output (1,) for the median age, the best guess without a scan."""
        return (age_N.median().unsqueeze(0) - self.mean) / self.scale


AgeHead = AgeBins | AgeRegression


def stored_head(stored: Json, *, where: str) -> AgeHead:
    """The head that `ermoe.files.to_json` wrote.

    >>> from ermoe.files import to_json
    >>> stored_head(to_json(AgeBins(40, 80)), where="brain_age.json") == AgeBins(40, 80)
    True
    """
    if stored["kind"] == "regression":
        return from_json(AgeRegression, stored, where=where)
    return from_json(AgeBins, stored, where=where)


def fit_temperature(bins: AgeBins, output_BK: Tensor, age_B: Tensor) -> float:
    """τ that makes known ages most probable, −mean log p(bin of age) least, by trying 81 values from 0.2 to 20.

    >>> bins = AgeBins(50, 60)
    >>> sure = 20 * F.one_hot(torch.tensor([2, 3, 4]), 10).float()
    >>> fit_temperature(bins, sure, torch.tensor([52.5, 56.5, 59.5])) > 2  # sure of itself, and often wrong
    True
    """
    density = output_BK.double()
    candidates = torch.logspace(math.log10(0.2), math.log10(20), 81, dtype=torch.float64)
    losses = [F.cross_entropy(density / tau, bins.bin_of(age_B)) for tau in candidates]
    return float(candidates[int(torch.stack(losses).argmin())])


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
