"""Who is in a phantom cohort: ages, gaps, sites and the course of ageing, all drawn from a seed.

Sizes are in per cent of the intracranial volume. The course of each with age follows published centiles of healthy
people and the IXI data set; the spread between people is kept small enough for a network to learn from some hundred.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

Ageing = Literal["everywhere", "frontal"]
"""Where age shows: in ventricles, cortex, lesions and contrast; or in how grey matter is shared out between the front
of the brain and the rest, while its shares of tissue follow nothing but chance."""
_SITES = ("A", "B", "C")

_MIDDLE_AGE = 55.0
_GAP_YEARS = 3.0
_GAP_YEARS_BETWEEN_VISITS = 0.5
_ICV_ML = {"M": 1499.0, "F": 1297.0}
_ICV_SPREAD_ML = 115.0


@dataclass(frozen=True, slots=True)
class Visit:
    """What a scan of a person should show. ``brain_age`` drives everything that ageing changes."""

    session_id: str | None
    age: float
    brain_age: float
    ventricle_percent: float
    grey_percent: float
    lesion_ml: float
    grey_intensity: float
    """Relative to white matter."""
    csf_intensity: float
    frontal_percent: float = 0.0
    """Grey matter that the front has less than usual and the rest has more."""


@dataclass(frozen=True, slots=True)
class Person:
    participant_id: str
    sex: Literal["M", "F"]
    site: str
    icv_ml: float
    visits: tuple[Visit, ...]
    seed: tuple[int, int]
    """Of the person's anatomy."""


def draw_person(
    index: int,
    seed: int,
    *,
    ages: tuple[float, float],
    sessions: Sequence[int],
    confounded: bool,
    ageing: Ageing = "everywhere",
) -> Person:
    """The person with this number: the same whoever else is in the cohort.

    >>> draw_person(3, 0, ages=(45, 90), sessions=(1,), confounded=False).participant_id
    'sub-0004'
    """
    rng = np.random.default_rng([seed, index])
    age = float(rng.uniform(*ages))
    sex: Literal["M", "F"] = "M" if rng.random() < 0.5 else "F"
    gap = float(rng.normal(0, _GAP_YEARS))
    icv_ml = float(rng.normal(_ICV_ML[sex], _ICV_SPREAD_ML))
    chance = int(rng.integers(len(_SITES)))
    third = min(int(len(_SITES) * (age - ages[0]) / max(ages[1] - ages[0], 1e-9)), len(_SITES) - 1)
    number = int(rng.choice(list(sessions)))
    traits = rng.normal(size=4)
    tone = float(rng.uniform(0.28, 0.40))
    later = np.cumsum([0.0, *rng.uniform(1.0, 2.0, size=number - 1)])
    drift = rng.normal(0, _GAP_YEARS_BETWEEN_VISITS, size=number)
    front = None if ageing == "everywhere" else float(rng.normal())
    visits = tuple(
        _visit(
            None if len(sessions) == 1 and sessions[0] == 1 else f"ses-{visit + 1}",
            round(age + float(later[visit]), 2),
            gap + (float(drift[visit]) if visit else 0.0),
            traits,
            tone,
            front,
        )
        for visit in range(number)
    )
    return Person(f"sub-{index + 1:04d}", sex, _SITES[third if confounded else chance], icv_ml, visits, (seed, index))


def _visit(
    session_id: str | None, age: float, gap: float, traits: np.ndarray, tone: float, front: float | None
) -> Visit:
    """A visit; with the trait ``front``, age shows there alone, and all else is as in the middle of life."""
    brain_age = age + gap
    shown_age = brain_age if front is None else _MIDDLE_AGE
    since_40 = shown_age - 40
    # The front, a third of the grey matter, loses 0.5 % of its own a year; people differ as by three years.
    frontal_percent = 0.0 if front is None else 0.09 * (brain_age - _MIDDLE_AGE) + 0.28 * front
    return Visit(
        session_id,
        age,
        brain_age,
        ventricle_percent=math.exp(math.log(1.12) + 0.0262 * since_40 + 0.15 * traits[0]),
        grey_percent=50.0 - 0.155 * since_40 + 0.6 * traits[1],
        lesion_ml=math.exp(math.log(0.4) + 0.07 * (shown_age - 45) + 0.8 * traits[2]),
        grey_intensity=0.70 + 0.0006 * (shown_age - 60) + 0.015 * traits[3],
        csf_intensity=tone,
        frontal_percent=frontal_percent,
    )
