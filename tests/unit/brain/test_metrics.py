"""Figures beside the obvious way to compute them."""

from types import SimpleNamespace

import numpy as np
import pytest
from scipy.stats import pearsonr
from sklearn.metrics import mean_absolute_error, r2_score, root_mean_squared_error

from ermoe.brain.metrics import bootstrap, decade, figures, paired_difference
from ermoe.brain.reporting.page import _by_group
from ermoe.errors import UserError


def cohort(seed=0, num=60):
    random = np.random.default_rng(seed)
    people = [f"sub-{i // 2}" for i in range(num)]
    age = random.uniform(45, 90, num)
    return people, age, 10 + 0.8 * age + random.normal(0, 4, num)


def test_figures_are_those_of_scikit_learn_and_scipy():
    _, age, predicted = cohort()
    found = figures(age, predicted)
    assert found["mae"] == pytest.approx(mean_absolute_error(age, predicted))
    assert found["rmse"] == pytest.approx(root_mean_squared_error(age, predicted))
    assert found["r2"] == pytest.approx(r2_score(age, predicted))
    assert found["r"] == pytest.approx(pearsonr(age, predicted).statistic)
    assert found["gap_age_r"] == pytest.approx(pearsonr(age, predicted - age).statistic)
    slope, intercept = np.polyfit(age, predicted, 1)
    assert (found["slope"], found["intercept"]) == (pytest.approx(slope), pytest.approx(intercept))
    assert found["bias"] == pytest.approx((predicted - age).mean())


def test_the_bootstrap_draws_people_not_scans():
    people, age, predicted = cohort()
    random = np.random.default_rng(3)
    rows_of = {person: [n for n, other in enumerate(people) if other == person] for person in dict.fromkeys(people)}
    draws = random.multinomial(len(rows_of), np.full(len(rows_of), 1 / len(rows_of)), size=200)
    slow = []
    for counts in draws:
        rows = [row for own, count in zip(rows_of.values(), counts, strict=True) for row in own * int(count)]
        slow.append(figures(age[rows], predicted[rows]))
    fast = bootstrap(people, age, predicted, draws=200, seed=3)
    for name, found in fast.items():
        low, high = np.quantile([one[name] for one in slow], [0.025, 0.975])
        assert (found.low, found.high) == (pytest.approx(low), pytest.approx(high)), name


def test_scans_of_one_person_do_not_narrow_the_interval():
    random = np.random.default_rng(0)
    age, predicted = random.uniform(50, 80, 30), random.uniform(50, 80, 30)
    single = bootstrap([str(i) for i in range(30)], age, predicted)["mae"]
    tripled = bootstrap([str(i) for i in range(30)] * 3, np.tile(age, 3), np.tile(predicted, 3))["mae"]
    assert tripled.high - tripled.low == pytest.approx(single.high - single.low)


def test_a_paired_difference_is_narrower_than_two_intervals():
    people, age, predicted = cohort()
    found = paired_difference(people, predicted - age, 1.02 * (predicted - age))
    alone = bootstrap(people, age, predicted)["mae"]
    assert found.high < 0
    assert found.high - found.low < 0.1 * (alone.high - alone.low)


def test_those_without_a_group_are_one():
    people, _, predicted = cohort()
    scans = [SimpleNamespace(sex=sex, site=None) for sex in ["M", "F", None] * 20]
    tested = SimpleNamespace(age_N=np.full(60, 50.0))
    shown = SimpleNamespace(scans=scans, people=people, held_out=tested, figures=lambda predicted_N, rows: rows)
    found = _by_group(shown, predicted)
    assert list(found) == ["sex F", "sex M", "sex n/a", "age 50–59"]
    assert found["sex n/a"][:2] == (20, 20)
    assert found["sex F"][2].tolist() == [scan.sex == "F" for scan in scans]


def test_a_constant_prediction_has_no_correlation():
    found = figures([50, 60, 70], [60, 60, 60])
    assert np.isnan(found["r"])
    assert found["gap_age_r"] == pytest.approx(-1)
    assert found["r2"] == pytest.approx(0)


def test_refusals_and_decades():
    assert (decade(60.0), decade(59.99)) == ("60–69", "50–59")
    with pytest.raises(UserError, match="finite"):
        figures([50, 60], [np.nan, 1])
