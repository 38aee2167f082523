"""AgeCalibration: the paper's own figures, what it refuses, and what it cannot do."""

import json

import numpy as np
import pytest

from ermoe.brain.ages import POOLED, AgeCalibration, Line, age_residualised_gap
from ermoe.brain.metrics import figures
from ermoe.errors import UserError
from ermoe.files import from_json, to_json


def test_the_figures_of_the_paper():
    slope, intercept = Line(intercept=5.081, slope=0.9347).applied_to(slope=0.887, intercept=9.026)
    assert (round(slope, 3), round(intercept, 3)) == (0.949, 4.221)


def test_applying_a_line_does_to_predictions_what_it_says():
    random = np.random.default_rng(0)
    age = random.uniform(45, 90, 500)
    predicted = 9.026 + 0.887 * age + random.normal(0, 3, 500)
    line, raw = Line(5.081, 0.9347), figures(age, predicted)
    calibrated = figures(age, line.undo(predicted))
    expected = line.applied_to(slope=raw["slope"], intercept=raw["intercept"])
    assert (calibrated["slope"], calibrated["intercept"]) == (pytest.approx(expected[0]), pytest.approx(expected[1]))
    assert calibrated["r"] == pytest.approx(raw["r"])


def test_a_fitted_line_gives_unit_slope_on_its_own_people():
    random = np.random.default_rng(1)
    age = random.uniform(45, 90, 200)
    predicted = 30 + 0.5 * age + random.normal(0, 3, 200)
    found = figures(age, AgeCalibration.fit(age, predicted, [None] * 200).pooled(predicted))
    assert (found["slope"], found["bias"]) == (pytest.approx(1), pytest.approx(0))


def test_noise_cannot_be_calibrated_into_accuracy():
    random = np.random.default_rng(0)
    age, test_age = random.uniform(45, 90, 3000), random.uniform(45, 90, 800)
    noise = {"train": random.normal(67, 4, 3000), "test": random.normal(67, 4, 800)}
    with pytest.raises(UserError, match="refused"):
        Line.fit(age, noise["train"])
    weak, weak_test = noise["train"] + 0.25 * (age - 67), noise["test"] + 0.25 * (test_age - 67)
    line = Line.fit(age, weak)
    raw, calibrated = figures(test_age, weak_test), figures(test_age, line.undo(weak_test))
    assert calibrated["r"] == pytest.approx(raw["r"])
    assert calibrated["mae"] > raw["mae"]
    assert abs(calibrated["slope"] - 1) < 0.1


@pytest.mark.parametrize("slope", [0.19, 0.0, -0.5])
def test_flat_lines_are_refused(slope):
    age = np.linspace(50, 80, 40)
    with pytest.raises(UserError, match=r"below 0\.2"):
        Line.fit(age, 60 + slope * (age - 65))


def test_each_sex_has_its_own_line_if_it_has_people_enough():
    random = np.random.default_rng(0)
    age = random.uniform(50, 80, 100)
    sex = ["M"] * 60 + ["F"] * 35 + ["other"] * 5
    predicted = np.where(np.array(sex) == "M", 10 + 0.8 * age, 25 + 0.6 * age)
    calibration = AgeCalibration.fit(age, predicted, sex)
    assert set(calibration.lines) == {POOLED, "M", "F"}
    found = calibration.by_sex(predicted, sex)
    np.testing.assert_allclose(found[:95], age[:95])
    np.testing.assert_allclose(found[95:], calibration.pooled(predicted)[95:])
    stored = json.loads(json.dumps(to_json(calibration.lines)))
    assert {name: from_json(Line, line, where="brain_age.json") for name, line in stored.items()} == calibration.lines


def test_the_residualised_gap_is_free_of_age():
    random = np.random.default_rng(0)
    age = random.uniform(50, 80, 100)
    gap = age_residualised_gap(age, 30 + 0.5 * age + random.normal(0, 2, 100))
    assert abs(np.corrcoef(age, gap)[0, 1]) < 1e-9


def test_too_few_people():
    with pytest.raises(UserError, match="at least three"):
        Line.fit([50, 60], [50, 60])
