"""Measures of a scan without labels, and the line through them."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import ndimage

from ermoe.brain.measures import MEASURES, measures_among, tissues_of
from ermoe.brain.ridge import Ridge, left_out
from ermoe.errors import UserError
from support.tiny_brains import BRIGHTNESS, tissue_maps

SHAPE, SPACING = (36, 36, 36), 4.0


def brain(age=60.0, *, seed=0):
    """A ball of three tissues that is dark outside of its mask."""
    tissue = tissue_maps(age, SHAPE, seed)
    mask = tissue.sum(0) > 0
    noise = np.random.default_rng(seed).normal(0, 0.03, mask.shape)
    t1 = sum(value * share for value, share in zip(BRIGHTNESS, tissue, strict=True)) + noise
    return SimpleNamespace(t1_XYZ=np.where(mask, t1, 0).astype(np.float32), mask_XYZ=mask, tissue=tissue)


def measures_of(own, spacing):
    return measures_among(tissues_of(own.t1_XYZ, own.mask_XYZ, spacing), spacing)


def test_tissues_are_told_apart_whatever_the_scale_and_the_shading():
    own = brain()
    slope = np.linspace(0.8, 1.25, SHAPE[0])[:, None, None]
    for t1 in (own.t1_XYZ, 200 * own.t1_XYZ * slope.astype(np.float32)):
        found = tissues_of(t1, own.mask_XYZ, SPACING)
        truth = own.tissue[:, own.mask_XYZ]
        np.testing.assert_allclose(found.share_MN.sum(0), 1)
        np.testing.assert_allclose(found.share_MN.mean(1), truth.mean(1), atol=0.03)


def test_measures_follow_age_and_not_the_scale():
    young, old = (measures_of(brain(age), SPACING) for age in (45.0, 85.0))
    assert len(young) == len(MEASURES)
    ventricles = MEASURES.index("log_ventricles")
    assert old[ventricles] > young[ventricles] + 0.5
    own = brain()
    scaled = SimpleNamespace(t1_XYZ=317 * own.t1_XYZ - 5, mask_XYZ=own.mask_XYZ)
    np.testing.assert_allclose(measures_of(scaled, SPACING), measures_of(own, SPACING), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("t1", "mask", "said"),
    [
        (lambda own: np.ones_like(own.t1_XYZ), lambda own: own.mask_XYZ, "all equal"),
        (lambda own: own.t1_XYZ, lambda own: ndimage.binary_erosion(own.mask_XYZ, iterations=14), "too small"),
        (lambda own: own.t1_XYZ[:, :, :6], lambda own: own.mask_XYZ[:, :, 15:21], "deeper than 16 mm"),
    ],
)
def test_what_cannot_be_measured_is_said(t1, mask, said):
    own = brain()
    with pytest.raises(UserError, match=said):
        measures_of(SimpleNamespace(t1_XYZ=t1(own), mask_XYZ=mask(own)), SPACING)


def made(num=60, seed=0):
    random = np.random.default_rng(seed)
    age = random.uniform(20, 80, num)
    measure = np.stack([age + random.normal(0, 6, num), random.normal(0, 1, num)], axis=1)
    return measure, age, [f"sub-{n}" for n in range(num)]


def test_a_ridge_goes_on_beyond_its_training_ages_and_knows_that_it_does():
    measure, age, people = made()
    middle = (age > 40) & (age < 60)
    ridge = Ridge.fit(measure[middle], age[middle], [people[n] for n in np.flatnonzero(middle)])
    assert ridge.ages([[100.0, 0.0]])[0] - ridge.ages([[70.0, 0.0]])[0] > 10
    assert ridge.width([[100.0, 0.0]])[0] > 1.1 * ridge.width([[50.0, 0.0]])[0]


def test_nobody_has_a_say_in_their_own_residual():
    measure, age, people = made()
    before = left_out(measure, age, people, 1.0)
    changed = age.copy()
    changed[5] += 0.01  # not enough to change its place in the line
    assert left_out(measure, changed, people, 1.0)[5] == before[5]
    twins = [people[n // 2] for n in range(len(people))]
    assert np.isfinite(left_out(measure, age, twins, 1.0)).all()


def test_noise_is_given_no_weight():
    measure, age, people = made()
    ridge = Ridge.fit(measure, np.random.default_rng(1).permutation(age), people)
    assert np.std(ridge.ages(measure)) < 0.3 * age.std()
    with pytest.raises(UserError, match="too few to fit a ridge"):
        Ridge.fit(measure[:2], age[:2], people[:2])
    assert dataclasses.asdict(ridge)["num_scans"] == 60
