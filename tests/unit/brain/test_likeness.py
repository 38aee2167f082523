"""Scans that are no T1 of an adult's whole, upright brain are told from those that are."""

import os
from pathlib import Path

import numpy as np
import pytest

from ermoe.brain.data.cohort import open_cohort
from ermoe.brain.data.preprocess import prepare
from ermoe.brain.data.scans import Preprocessing
from ermoe.brain.likeness import SIGNS, Likeness, signs_of
from ermoe.errors import UserError
from support.odd_scans import ODD

MM = 4.0
COARSE = Preprocessing(spacing_mm=MM, shape=(48, 56, 48))


@pytest.fixture(scope="module")
def volumes():
    for package in ("nibabel", "nilearn"):
        pytest.importorskip(package)
    data = os.environ.get("ERMOE_DATA")
    if not data or not Path(data, "ixi50").is_dir():
        pytest.skip("ERMOE_DATA names no folder with ixi50")
    return [prepare(scan, COARSE) for scan in open_cohort(Path(data, "ixi50")).scans[::6]]


@pytest.fixture(scope="module")
def signs(volumes):
    return np.array([signs_of(volume, MM) for volume in volumes])


@pytest.fixture(scope="module")
def known(signs):
    return Likeness.fit(signs)


def test_a_person_left_out_is_taken_for_a_person(signs):
    for row in range(len(signs)):
        assert Likeness.fit(np.delete(signs, row, axis=0)).oddities(signs[row]) == []


@pytest.mark.parametrize("kind", ODD)
def test_what_is_no_adult_t1_is_said(kind, volumes, known):
    try:
        sign = signs_of(ODD[kind](volumes[1], MM), MM)
    except UserError:
        return
    assert known.oddities(sign), dict(zip(SIGNS, sign.round(2), strict=True))


def test_intervals_widen_with_the_distance(signs, known):
    middle = np.array(known.mean)
    assert known.widening(middle) == 1
    assert known.widening(middle + 80 * (signs[0] - middle)) > 5
