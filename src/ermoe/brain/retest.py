"""Test–retest: how far apart the predictions of one person are when scanned twice within a year."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

MOST_YEARS = 1.0


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
    of a one-way analysis of variance with unequal numbers of scans. None if nobody has two such scans.

    >>> found = retest(["a", "a", "b", "b", "c"], [60, 60.5, 70, 70.5, 50], [62, 62.5, 69, 69.7, 50])
    >>> found.num_people, round(found.icc, 3), round(found.within_sd, 3)
    (2, 0.998, 0.1)
    """
    age, predicted = np.asarray(age_N, dtype=np.float64), np.asarray(predicted_N, dtype=np.float64)
    groups = []
    for person in dict.fromkeys(people):
        rows = np.array([other == person for other in people])
        near = rows & (age - age[rows].min() < MOST_YEARS)
        if near.sum() >= 2:
            groups.append((predicted - age)[near])
    if not groups:
        return None
    size = np.array([len(group) for group in groups], dtype=np.float64)
    total, count = size.sum(), len(groups)
    within = sum(float(((group - group.mean()) ** 2).sum()) for group in groups) / (total - count)
    if count < 2:
        return Retest(count, int(total), float("nan"), float(np.sqrt(within)))
    grand = np.concatenate(groups).mean()
    between = sum(len(group) * float((group.mean() - grand) ** 2) for group in groups) / (count - 1)
    usual = (total - (size**2).sum() / total) / (count - 1)
    below = between + (usual - 1) * within
    icc = (between - within) / below if below > 0 else float("nan")
    return Retest(count, int(total), float(icc), float(np.sqrt(within)))
