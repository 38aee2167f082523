"""Nobody is trained on and tested, whatever the table says."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ermoe.brain.data.scans import Scan
from ermoe.brain.data.splits import Splits, holdout, k_folds, leave_site_out
from ermoe.errors import UserError


def people(number=100, sessions=1, seed=0):
    rng = np.random.default_rng(seed)
    scans = []
    for i in range(number):
        age, sex = float(rng.uniform(20, 90)), "MF"[int(rng.random() < 0.3)]
        for session in range(sessions):
            scans.append(
                Scan(
                    f"sub-{i:03d}",
                    f"ses-{session}" if sessions > 1 else None,
                    Path(f"{i}-{session}.nii"),
                    age=age + session,
                    sex=sex,
                    site="ABC"[i % 3],
                )
            )
    return scans


@pytest.mark.parametrize("make", [lambda s: k_folds(s, 5, 1), lambda s: holdout(s, 1), leave_site_out])
def test_sessions_stay_together_and_everybody_has_a_part(make):
    scans = people(60, sessions=3)
    splits = make(scans)
    splits.check(scans)
    for fold in range(splits.num_folds):
        parts = [splits.select(scans, fold, part) for part in ("train", "validation", "test")]
        assert sum(map(len, parts)) == len(scans)
        ids = [{scan.participant_id for scan in part} for part in parts]
        assert not (ids[0] & ids[2])
        assert not (ids[0] & ids[1])
        assert not (ids[1] & ids[2])


def test_everybody_is_tested_once():
    scans = people(53)
    splits = k_folds(scans, 5, seed=3)
    tested = [scan.participant_id for fold in range(5) for scan in splits.select(scans, fold, "test")]
    assert sorted(tested) == sorted(scan.participant_id for scan in scans)
    sizes = [len(splits.select(scans, fold, "test")) for fold in range(5)]
    assert max(sizes) - min(sizes) <= 1


def test_folds_are_alike_in_age_and_sex():
    scans = people(200)
    splits = k_folds(scans, 5, seed=0)
    ages, women = [], []
    for fold in range(5):
        test = splits.select(scans, fold, "test")
        ages.append(np.mean([scan.age for scan in test]))
        women.append(sum(scan.sex == "F" for scan in test))
    assert max(ages) - min(ages) < 3  # by lot it would be about 10
    assert max(women) - min(women) <= 1


def test_seeds_matter_and_repeat():
    scans = people(40)
    assert k_folds(scans, 5, seed=1) == k_folds(scans, 5, seed=1)
    assert k_folds(scans, 5, seed=1) != k_folds(scans, 5, seed=2)


def test_sites_are_left_out():
    scans = people(30)
    splits = leave_site_out(scans)
    assert splits.fold_names == ("site-a", "site-b", "site-c")
    assert {scan.site for scan in splits.select(scans, 1, "test")} == {"B"}
    assert {scan.site for scan in splits.select(scans, 1, "train")} == {"A", "C"}


def test_sites_that_look_alike_are_refused():
    """Their folds would share a name, and the second would find the network of the first."""
    scans = [replace(scan, site="Guys" if scan.site == "A" else "guys") for scan in people(12)]
    with pytest.raises(UserError, match="'Guys' = 'guys'"):
        leave_site_out(scans)


def test_round_trip(tmp_path):
    scans = people(30)
    for splits in (k_folds(scans, 3, 0), holdout(scans, 0), leave_site_out(scans)):
        splits.save(tmp_path / "splits.tsv")
        assert Splits.load(tmp_path / "splits.tsv", scans) == splits


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        (["sub-01\ttrain", "SUB-01\ttest", "sub-02\ttrain"], ["'SUB-01'", "'sub-01'"]),
        (["sub-01\ttrain", "sub-1\ttest", "sub-02\ttrain"], ["'sub-01'", "'sub-1'"]),
        (["sub-01\ttrain", "sub-01\ttest", "sub-02\ttrain"], ["sub-01"]),
        (["sub-001\ttrain", "sub-02\ttrain"], ["'sub-001'", "'sub-01'"]),
        (["sub-02\ttrain"], ["sub-01"]),
        (["sub-01\tlearn", "sub-02\ttrain"], ["sub-01", "'learn'"]),
    ],
)
def test_a_hostile_table_is_refused(tmp_path, rows, named):
    scans = [Scan(f"sub-{i:02d}", None, Path("a.nii"), age=50.0) for i in (1, 2)]
    path = tmp_path / "splits.tsv"
    path.write_text("\n".join(["participant_id\tfold-0", *rows]) + "\n")
    with pytest.raises(UserError) as refusal:
        Splits.load(path, scans)
    assert all(name in str(refusal.value) for name in named)


def test_sessions_in_two_parts_are_refused(tmp_path):
    scans = people(12, sessions=2)
    path = tmp_path / "splits.tsv"
    rows = [f"{s.participant_id}\t{s.session_id}\t{'train' if s.session_id == 'ses-0' else 'test'}" for s in scans[:2]]
    path.write_text("\n".join(["participant_id\tsession_id\tfold-0", *rows]) + "\n")
    with pytest.raises(UserError, match=r"sub-000 in two parts.*sessions of a person stay together"):
        Splits.load(path, scans[:2])


def test_one_person_with_two_ids_is_refused_when_splitting():
    scans = [*people(12), Scan("sub-5", None, Path("x.nii"), age=50.0)]
    with pytest.raises(UserError, match="'sub-005' = 'sub-5'"):
        k_folds(scans, 3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: k_folds(people(3), 5), "3 people cannot be shared out to 5 groups"),
        (lambda: k_folds(people(10), 1), "need at least 2 folds"),
        (lambda: holdout(people(5), 0), "use fewer folds"),
        (lambda: leave_site_out([Scan("sub-1", None, Path("a.nii"))]), "missing for sub-1"),
        (lambda: leave_site_out([Scan("sub-1", None, Path("a.nii"), site="A")]), "two sites or more"),
    ],
)
def test_impossible_splits(make, message):
    with pytest.raises(UserError, match=message):
        make()


def test_a_site_that_leads_elsewhere_is_no_fold():
    with pytest.raises(UserError, match=r"the fold 'site-\.\./\.\./a' cannot be the name of a folder"):
        leave_site_out([replace(scan, site=f"../../{scan.site}") for scan in people(6)])
