"""Scans that are no T1 of an adult's whole, upright brain are told from those that are."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import ndimage

from ermoe.brain.data.cohort import open_cohort
from ermoe.brain.data.preprocess import normalise, prepare
from ermoe.brain.data.scans import Preprocessing
from ermoe.brain.likeness import SIGNS, Likeness, signs_of
from ermoe.errors import UserError

COARSE = Preprocessing(spacing_mm=4.0, shape=(48, 56, 48))


@pytest.fixture(scope="module")
def volumes():
    for package in ("nibabel", "nilearn"):
        pytest.importorskip(package)
    data = os.environ.get("ERMOE_DATA")
    if not data or not Path(data, "ixi50").is_dir():
        pytest.skip("ERMOE_DATA names no folder with ixi50")
    return [prepare(scan, COARSE) for scan in open_cohort(Path(data, "ixi50")).scans[::4]]


@pytest.fixture(scope="module")
def signs(volumes):
    return np.array([signs_of(volume, 4.0) for volume in volumes])


@pytest.fixture(scope="module")
def known(signs):
    return Likeness.fit(signs)


def shown(volume, t1):
    return replace(volume, t1_XYZ=normalise(np.asarray(t1, dtype=np.float32), volume.mask_XYZ))


def turned(volume, y, z):
    return replace(volume, t1_XYZ=volume.t1_XYZ[:, ::y, ::z].copy(), mask_XYZ=volume.mask_XYZ[:, ::y, ::z].copy())


def shrunk(volume, factor):
    t1, mask = (ndimage.zoom(part.astype("f4"), factor, order=1) for part in (volume.t1_XYZ, volume.mask_XYZ))
    return replace(volume, t1_XYZ=t1, mask_XYZ=mask > 0.5)


def without(volume, axis, first):
    mask = volume.mask_XYZ.copy()
    middle = round(ndimage.center_of_mass(mask)[axis])
    np.moveaxis(mask, axis, 0)[slice(0, middle) if first else slice(middle, None)] = False
    return replace(volume, t1_XYZ=volume.t1_XYZ * mask, mask_XYZ=mask)


def box(volume):
    mask = np.zeros_like(volume.mask_XYZ)
    mask[7:41, 10:46, 9:39] = True
    blobs = ndimage.gaussian_filter(np.random.default_rng(0).normal(size=mask.shape), 2)
    return shown(replace(volume, mask_XYZ=mask), blobs)


def noise(volume):
    return shown(volume, np.random.default_rng(0).normal(size=volume.t1_XYZ.shape))


def ct(volume):
    near_bone = ndimage.distance_transform_edt(volume.mask_XYZ) < 2
    return shown(volume, np.random.default_rng(0).normal(35, 4, volume.t1_XYZ.shape) + 20 * near_bone)


def smeared(volume):
    return shown(volume, -ndimage.gaussian_filter(volume.t1_XYZ, 1.0))


BAD = {
    "negative": lambda volume: shown(volume, -volume.t1_XYZ),
    "fluid bright, as in PD and T2": lambda volume: shown(volume, np.exp(-volume.t1_XYZ)),
    "mean of a functional series": smeared,
    "newborn's size": lambda volume: shrunk(volume, 0.68),
    "upside down": lambda volume: turned(volume, 1, -1),
    "lying the other way": lambda volume: turned(volume, -1, -1),
    "back to front": lambda volume: turned(volume, -1, 1),
    "noise": noise,
    "left half": lambda volume: without(volume, 0, False),
    "no front": lambda volume: without(volume, 1, False),
    "top only": lambda volume: without(volume, 2, True),
    "CT": ct,
    "another organ's box": box,
}


def test_people_left_out_are_taken_for_people(signs):
    for row in range(len(signs)):
        assert Likeness.fit(np.delete(signs, row, axis=0)).oddities(signs[row]) == []


@pytest.mark.parametrize("kind", BAD)
def test_what_is_no_adult_t1_is_said(kind, volumes, known):
    for volume in volumes[1::6]:
        try:
            sign = signs_of(BAD[kind](volume), 4.0)
        except UserError:
            continue
        assert known.oddities(sign), dict(zip(SIGNS, sign.round(2), strict=True))


def test_intervals_widen_with_the_distance(signs, known):
    middle = np.array(known.mean)
    assert known.widening(middle) == 1
    assert known.widening(middle + 80 * (signs[0] - middle)) > 5
