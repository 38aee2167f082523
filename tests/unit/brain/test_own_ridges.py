"""A ridge for every scanner, believed as far as its people say."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from ermoe.brain.data.scans import Scan
from ermoe.brain.own_ridges import OwnRidges, scanner_columns
from ermoe.brain.ridge import Ridge
from ermoe.errors import UserError


def cohort(number=80, *, shift=12.0, seed=0):
    """Two batches whose scanner shifts the one measure that follows age by so many years, and their measures."""
    random = np.random.default_rng(seed)
    batch_N, age_N = np.arange(number) % 2, random.uniform(30, 80, number)
    measure_NF = (age_N + shift * batch_N + random.normal(0, 3, number))[:, None]
    columns = [{"batch": "AB"[batch], "group": "patient"} for batch in batch_N]
    scans = [
        Scan(f"sub-{n}", None, Path(f"{n}.nii"), age=age, columns=own)
        for n, (age, own) in enumerate(zip(age_N.tolist(), columns, strict=True))
    ]
    return scans, measure_NF


def fitted(scans, measure_NF):
    ridge = Ridge.fit(measure_NF, [scan.age for scan in scans], [scan.participant_id for scan in scans])
    return ridge, OwnRidges.fit(ridge, measure_NF, scans, scanner_columns(scans, "auto"))


def mean_error(said_N, scans):
    return np.abs(said_N - [scan.age for scan in scans]).mean()


def test_people_of_a_known_scanner_gain_and_strangers_keep_the_ridge_over_all():
    ridge, own = fitted(*cohort())
    assert own.columns == ("batch",)
    assert min(one.worth for one in own.own.values()) > 0.7
    others, measure_NF = cohort(seed=1)
    plain_N = ridge.ages(measure_NF)
    assert mean_error(plain_N + own.added(ridge, measure_NF, others), others) < 0.7 * mean_error(plain_N, others)
    strangers = [dataclasses.replace(scan, columns={"batch": "C"}) for scan in others]
    assert not own.added(ridge, measure_NF, strangers).any()
    assert own.knows(others[0])
    assert not own.knows(strangers[0])


def test_scanners_that_do_not_differ_change_next_to_nothing():
    ridge, own = fitted(*cohort(shift=0.0))
    others, measure_NF = cohort(shift=0.0, seed=1)
    assert np.abs(own.added(ridge, measure_NF, others)).mean() < 0.5


def test_those_it_was_fitted_on_are_told_by_ridges_without_them():
    scans, measure_NF = cohort()
    ridge, own = fitted(scans, measure_NF)
    known_N = ridge.ages(measure_NF) + own.added(ridge, measure_NF, scans)
    assert mean_error(own.left_out(ridge, measure_NF, scans), scans) > mean_error(known_N, scans)


def test_only_what_says_where_a_scan_comes_from_sorts_people_unasked():
    scans, measure_NF = cohort()
    assert scanner_columns(scans, "none") == ()
    assert scanner_columns(scans, "group") == ("group",)
    ridge, _ = fitted(scans, measure_NF)
    assert not OwnRidges.fit(ridge, measure_NF, scans, ("group",)).own  # all are of one
    with pytest.raises(
        UserError, match="--own-ridges clinic: there is no such column; use auto, none, or one of batch"
    ):
        scanner_columns(scans, "clinic")
