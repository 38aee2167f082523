"""Thirty scans that are no adult T1 brains, and fifty that are, each compared with the others."""

import os
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("nibabel")

from ermoe.brain.data.cohort import open_cohort
from ermoe.brain.data.preprocess import prepare
from ermoe.brain.data.scans import Preprocessing
from ermoe.brain.likeness import Likeness, signs_of
from ermoe.errors import UserError
from support.odd_scans import ODD

USUAL = Preprocessing()
MM = USUAL.spacing_mm


@pytest.fixture(scope="module")
def volumes():
    data = os.environ.get("ERMOE_DATA")
    if not data or not Path(data, "ixi50").is_dir():
        pytest.skip("the environment variable ERMOE_DATA does not lead to a folder with ixi50")
    return [prepare(scan, USUAL) for scan in open_cohort(Path(data, "ixi50")).scans]


@pytest.fixture(scope="module")
def signs(volumes):
    return np.array([signs_of(volume, MM) for volume in volumes])


def is_flagged(known, volume):
    try:
        return bool(known.oddities(signs_of(volume, MM)))
    except UserError:
        return True


def test_at_least_27_of_30_odd_scans_are_flagged_or_refused(volumes, signs):
    passed = []
    for number, kind in zip(range(30), cycle(ODD), strict=False):
        row = number * 7 % len(volumes)
        known = Likeness.fit(np.delete(signs, row, axis=0))
        if not is_flagged(known, ODD[kind](volumes[row], MM)):
            passed.append(kind)
    print(f"{30 - len(passed)} of 30 odd scans flagged or refused")
    assert len(passed) <= 3, passed


def test_at_most_2_of_50_good_scans_are_flagged(signs):
    flagged = [row for row in range(len(signs)) if Likeness.fit(np.delete(signs, row, 0)).oddities(signs[row])]
    print(f"{len(flagged)} of {len(signs)} good scans flagged")
    assert len(signs) == 50
    assert len(flagged) <= 2, flagged
