"""Held-out predictions: whose ages correct whom."""

import dataclasses

import numpy as np
import pytest
import torch

from ermoe.brain.ages import AgeBins, AgeRegression
from ermoe.brain.data.splits import Splits
from ermoe.brain.evaluation import by_label, labels, mean_age, over_folds
from ermoe.brain.metrics import retest
from ermoe.brain.results import Outputs, for_new_people, held_out
from ermoe.brain.ridge import MIDDLE
from ermoe.brain.run import _splits
from ermoe.errors import UserError
from support.tiny_brains import people

HEAD = AgeBins(20, 100, 2.0)


def folds(scans, num=4, validation=False):
    """Person i is tested in fold i mod num, and in the next fold validated if asked."""
    parts = {}
    for number, scan in enumerate(scans):
        own = ["train"] * num
        own[number % num] = "test"
        if validation:
            own[(number + 1) % num] = "validation"
        parts[scan.participant_id] = tuple(own)
    return Splits("k-fold", parts, tuple(f"fold-{fold}" for fold in range(num)))


def outputs(scans, *, slope=0.7, noise=3.0, head=HEAD, validation=False, seed=0):
    """Networks that are a little wrong, each in its own way."""
    random = np.random.default_rng(seed)
    age = np.array([scan.age for scan in scans])
    found = []
    for _ in range(4):
        predicted = 65 + slope * (age - 65) + random.normal(0, noise, len(age))
        if isinstance(head, AgeRegression):
            found.append(torch.tensor((predicted - head.mean) / head.scale).float().unsqueeze(1))
        else:
            distance = (head.centres() - torch.tensor(predicted).float().unsqueeze(1)) / 2.0
            found.append(-0.5 * distance.square())
    return Outputs(scans, folds(scans, validation=validation), head, torch.stack(found))


def test_a_scan_is_judged_by_the_fold_that_tests_it():
    scans = people(40)
    given = outputs(scans)
    found = held_out(given)
    assert found.row_N.tolist() == list(range(40))
    for row in range(40):
        assert found.raw_N[row] == pytest.approx(float(HEAD.age(given.output_FNK[row % 4, row : row + 1])[0]))


@pytest.mark.parametrize("validation", [False, True])
@pytest.mark.parametrize("fit", ["held-out", "train"])
def test_no_correction_uses_the_ages_it_is_applied_to(validation, fit):
    scans = people(60)
    given = outputs(scans, validation=validation)
    before = held_out(given, fit=fit)
    rows = given.rows(1, "test")
    changed = [
        dataclasses.replace(scan, age=30.0 + number % 7) if number in rows else scan
        for number, scan in enumerate(scans)
    ]
    after = held_out(dataclasses.replace(given, scans=changed), fit=fit)
    for column in ("raw_N", "pooled_N", "by_sex_N", "low_N", "high_N"):
        np.testing.assert_array_equal(getattr(after, column)[rows], getattr(before, column)[rows])
    assert not np.isnan(before.pooled_N).any()


def blended(scans, *, knows=0.0, seed=0):
    """Ridges that are off by 5 years, and networks that add noise of 3 years and this share of the ridge's error."""
    random = np.random.default_rng(seed)
    age = np.array([scan.age for scan in scans])
    ridge = age + random.normal(0, 5, (4, len(age)))
    added = knows * (age - ridge) + random.normal(0, 3, ridge.shape)
    head = AgeRegression(MIDDLE, 1.0)
    output = torch.tensor(added).float().unsqueeze(-1)
    width = torch.ones(ridge.shape).double()
    return Outputs(scans, folds(scans), head, output, torch.tensor(ridge), width)


@pytest.mark.parametrize("seed", range(3))
def test_a_network_that_knows_nothing_changes_next_to_nothing(seed):
    given = blended(people(60), seed=seed)
    found = held_out(given)
    ridge = np.array([float(given.ridge_FN[row % 4, row]) for row in range(60)])
    assert np.abs(found.raw_N - ridge).mean() < 0.5
    assert 0.8 < found.coverage <= 1.0


def test_a_network_that_knows_is_believed():
    given = blended(people(60), knows=0.9)
    ridge = np.array([float(given.ridge_FN[row % 4, row]) for row in range(60)])
    found = held_out(given)
    assert np.abs(found.raw_N - found.age_N).mean() < 0.8 * np.abs(ridge - found.age_N).mean()
    assert 0.5 < for_new_people(given).blend.worth <= 1


def test_what_a_network_is_worth_is_told_without_the_ages_it_serves():
    scans, given = people(60), blended(people(60), knows=0.5)
    before, rows = held_out(given), given.rows(1, "test")
    changed = [dataclasses.replace(scan, age=30.0) if n in rows else scan for n, scan in enumerate(scans)]
    after = held_out(dataclasses.replace(given, scans=changed))
    for column in ("raw_N", "pooled_N", "low_N", "high_N"):
        np.testing.assert_array_equal(getattr(after, column)[rows], getattr(before, column)[rows])


def test_calibration_turns_the_line_and_intervals_cover():
    scans = people(200)
    found = held_out(outputs(scans))
    assert np.polyfit(found.age_N, found.raw_N, 1)[0] == pytest.approx(0.7, abs=0.05)
    assert np.polyfit(found.age_N, found.pooled_N, 1)[0] == pytest.approx(1.0, abs=0.08)
    assert 0.8 < found.coverage <= 0.97


def test_flat_predictions_are_left_raw_with_a_reason():
    found = held_out(outputs(people(40), slope=0.0))
    assert np.isnan(found.pooled_N).all()
    assert len(found.refusals) == 4
    assert "refused" in found.refusals[0]
    assert for_new_people(outputs(people(40), slope=0.0)).calibration is None


def test_a_regression_has_no_intervals():
    found = held_out(outputs(people(40), head=AgeRegression(60.0, 10.0)))
    assert np.isnan(found.low_N).all()
    assert np.isnan(found.coverage)
    assert not np.isnan(found.pooled_N).any()


def test_outputs_survive_the_disk_and_know_their_scans(tmp_path):
    scans = people(12)
    given = outputs(scans)
    given.save(tmp_path / "outputs.safetensors")
    again = Outputs.load(tmp_path / "outputs.safetensors", list(reversed(scans)), given.splits, HEAD)
    assert again.keys == given.keys
    torch.testing.assert_close(again.output_FNK, given.output_FNK)
    with pytest.raises(UserError, match="no longer in the data"):
        Outputs.load(tmp_path / "outputs.safetensors", scans[1:], given.splits, HEAD)
    with pytest.raises(UserError, match="not finished"):
        Outputs.load(tmp_path / "nothing.safetensors", scans, given.splits, HEAD)


def test_simple_estimates_learn_from_training_people_alone():
    scans = people(24)
    splits = folds(scans)
    found = over_folds(mean_age, scans, splits)
    age = np.array([scan.age for scan in scans])
    for row in range(24):
        others = [n for n in range(24) if n % 4 != row % 4]
        assert found[row] == pytest.approx(age[others].mean())
    found_labels = labels(scans)
    assert set(found_labels) == {"site", "batch"}
    by_batch = over_folds(by_label(found_labels["batch"]), scans, splits)
    others = [n for n in range(24) if n % 4 != 0 and scans[n].columns["batch"] == scans[0].columns["batch"]]
    assert by_batch[0] == pytest.approx(age[others].mean())


def test_sites_are_left_out_by_default_where_they_are_large_enough(tmp_path):
    few, enough = people(28), people(30)
    assert _splits(tmp_path / "few.tsv", few, "auto", 5, 0).kind == "k-fold"
    assert _splits(tmp_path / "enough.tsv", enough, "auto", 5, 0).fold_names == ("site-a", "site-b")
    assert _splits(tmp_path / "asked.tsv", enough, "k-fold", 5, 0).kind == "k-fold"
    unknown = [dataclasses.replace(enough[0], site=None), *enough[1:]]
    assert _splits(tmp_path / "unknown.tsv", unknown, "auto", 5, 0).kind == "k-fold"


def test_retest_is_a_one_way_analysis_of_variance():
    random = np.random.default_rng(0)
    person_gap = random.normal(0, 4, 300)
    names = [f"sub-{i}" for i in range(300) for _ in range(2)]
    age = np.repeat(random.uniform(50, 80, 300), 2) + np.tile([0.0, 0.5], 300)
    predicted = age + np.repeat(person_gap, 2) + random.normal(0, 1, 600)
    found = retest(names, age, predicted)
    assert found.icc == pytest.approx(16 / 17, abs=0.02)
    assert found.within_sd == pytest.approx(1.0, abs=0.08)
    assert retest(names[::2], age[::2], predicted[::2]) is None
    assert retest(["a", "a"], [60.0, 62.0], [60.0, 62.0]) is None
