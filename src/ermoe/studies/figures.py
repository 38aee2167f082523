"""What the figures of several seeds say together: means, spreads, and whether a difference is more than noise."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ermoe.studies.record import Record


def mean(values: Sequence[float]) -> float:
    """The mean; NaN of nothing."""
    return statistics.fmean(values) if values else math.nan


def deviation(values: Sequence[float]) -> float:
    """The standard deviation; 0 of fewer than two values."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def cell(values: Sequence[float], style: str = ".2%") -> str:
    """Mean ± standard deviation over seeds.

    >>> cell([0.5, 0.6]), cell([]), cell([3.25], ".1f")
    ('55.00% ± 7.07%', '–', '3.2')
    """
    if not values:
        return "–"
    spread = f" ± {deviation(values):{style}}" if len(values) > 1 else ""
    return f"{mean(values):{style}}{spread}"


def verdict(
    ours: Sequence[float], theirs: Sequence[float], *, larger: str, smaller: str, what: str, form: str = ".3g"
) -> str:
    """A sentence on a difference: which way it goes, and whether its 95 % interval over seeds excludes zero.

    >>> verdict([0.90, 0.91, 0.90], [0.50, 0.52, 0.51], larger="A", smaller="B", what="accuracy")
    'accuracy: A is above B by 0.393, more than the noise of 3 seeds (95 % interval ± 0.0205).'
    """
    if not ours or not theirs:
        return f"{what}: nothing to compare."
    gap = mean(ours) - mean(theirs)
    if float(format(abs(gap), form).rstrip("%")) == 0:
        return f"{what}: {larger} and {smaller} are equal."
    first, second = (larger, smaller) if gap >= 0 else (smaller, larger)
    count = min(len(ours), len(theirs))
    if count < 2:
        return f"{what}: {first} is above {second} by {abs(gap):{form}}; one seed says nothing about noise."
    margin = _welch_margin(ours, theirs)
    size = "more than" if abs(gap) > margin else "inside"
    noise = f"{size} the noise of {count} seeds (95 % interval ± {margin:{form}})"
    return f"{what}: {first} is above {second} by {abs(gap):{form}}, {noise}."


def _welch_margin(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Half of the 95 % interval of the difference of two means, by Welch's t: three seeds know little of their spread.

    >>> round(_welch_margin([1.0, 2.0, 3.0], [1.0, 2.0, 3.0]), 2)
    2.27
    """
    from scipy.stats import ttest_ind  # a second to import

    if deviation(ours) == deviation(theirs) == 0:
        return 0.0
    low, high = ttest_ind(ours, theirs, equal_var=False).confidence_interval(0.95)
    return float(high - low) / 2


@dataclass(frozen=True, slots=True)
class Runs:
    """The records of a study, asked by the name of a run and the path to one of its figures.

    >>> runs = Runs([{"name": "a", "figures": {"x": {"y": 1.0}}}, {"name": "a", "figures": {"x": {"y": 2.0}}}])
    >>> runs.mean("a", "x", "y"), runs.cell("a", "x", "y", style=".1f")
    (1.5, '1.5 ± 0.7')
    """

    records: Sequence[Record]

    def of(self, name: str, *path: str) -> list[float]:
        """One value a seed; what is not known is left out."""
        values = []
        for record in self.records:
            if record["name"] == name:
                value: Any = record["figures"]
                for key in path:
                    value = value.get(key) if isinstance(value, dict) else None
                if value is not None:
                    values.append(value)
        return values

    def mean(self, name: str, *path: str) -> float:
        """Their mean."""
        return mean(self.of(name, *path))

    def cell(self, name: str, *path: str, style: str = ".2%") -> str:
        """Their mean ± standard deviation."""
        return cell(self.of(name, *path), style)

    def verdict(
        self, larger: tuple[str, str], smaller: tuple[str, str], *path: str, what: str, form: str = ".3g"
    ) -> str:
        """The sentence on two runs, each given by its name and by what the sentence calls it."""
        (ours, one), (theirs, other) = larger, smaller
        return verdict(self.of(ours, *path), self.of(theirs, *path), larger=one, smaller=other, what=what, form=form)
