"""Phantoms have the volumes they were given, age as designed, and come as a valid BIDS set."""

import json

import numpy as np
import pytest

pytest.importorskip("nibabel")
pytest.importorskip("nilearn")

import nibabel

from ermoe.brain.data.cohort import open_cohort
from ermoe.brain.data.phantom import synthesize
from ermoe.brain.data.phantom.anatomy import atlas, grow, smooth_field
from ermoe.brain.data.phantom.people import draw_person
from ermoe.brain.data.preprocess import Preprocessing, prepare
from ermoe.brain.data.quality import examine
from ermoe.errors import UserError
from support.bids import bids_errors

COARSE = {"spacing_mm": 4.0}


@pytest.fixture(scope="module")
def cohort(tmp_path_factory):
    return synthesize(tmp_path_factory.mktemp("phantoms") / "set", 4, seed=1, sessions=(1, 2), **COARSE)


def grown(age, spacing_mm=3.0, ageing="everywhere"):
    """The anatomy of one and the same person at an age."""
    person = draw_person(0, 7, ages=(age, age), sessions=(1,), confounded=False, ageing=ageing)
    shape = tuple(round(edge / spacing_mm) for edge in (182, 218, 182))
    return person, grow(atlas(), person, person.visits[0], shape=shape, spacing_mm=spacing_mm)


def test_a_phantom_has_the_volumes_it_was_given():
    person, anatomy = grown(70.0)
    voxel_ml = 3.0**3 / 1000
    brain_ml = anatomy.brain().sum() * voxel_ml
    assert brain_ml == pytest.approx(person.icv_ml, rel=0.04)
    assert anatomy.grey_XYZ.sum() * voxel_ml / brain_ml == pytest.approx(
        1.047 * person.visits[0].grey_percent / 100, rel=0.02
    )
    inside = anatomy.ventricle_distance_XYZ < 0
    ventricle_ml = (inside * anatomy.csf_XYZ).sum() * voxel_ml
    assert ventricle_ml / brain_ml == pytest.approx(person.visits[0].ventricle_percent / 100, rel=0.15)


def test_brains_shrink_with_age():
    young, old = grown(50.0)[1], grown(85.0)[1]
    share = [part.grey_XYZ.sum() / part.brain().sum() for part in (young, old)]
    assert share[0] - share[1] > 0.04
    ventricles = [(part.ventricle_distance_XYZ < 0).sum() for part in (young, old)]
    assert ventricles[1] > 1.8 * ventricles[0]
    white = [part.white_XYZ.sum() / part.brain().sum() for part in (young, old)]
    assert abs(white[0] - white[1]) < 0.03


def test_age_can_show_in_the_front_alone_at_equal_shares():
    young, old = grown(25.0, ageing="frontal")[1], grown(85.0, ageing="frontal")[1]
    for tissue, share in young.tissues().items():
        assert share.mean() == pytest.approx(old.tissues()[tissue].mean(), rel=0.01)
    middle = young.grey_XYZ.shape[1] // 2 + 8
    front = [part.grey_XYZ[:, middle:].sum() for part in (young, old)]
    assert front[1] < 0.9 * front[0]
    with pytest.raises(UserError, match="ageing='nowhere': use one of everywhere, frontal"):
        synthesize("unused", 1, ageing="nowhere")


def test_shares_are_shares():
    _, anatomy = grown(60.0)
    for share in (anatomy.white_XYZ, anatomy.grey_XYZ, anatomy.csf_XYZ, anatomy.brain()):
        assert share.min() > -1e-5
        assert share.max() < 1 + 1e-3


def test_smooth_fields_have_unit_deviation():
    fields = [smooth_field((40, 44, 40), 4.0, 30.0, np.random.default_rng(seed)) for seed in range(12)]
    assert np.std(fields) == pytest.approx(1, abs=0.2)
    assert np.abs(np.diff(fields[0], axis=0)).max() < 1.0


def test_the_cohort_can_be_used(cohort):
    found = open_cohort(cohort)
    assert not found.problems
    assert len({scan.participant_id for scan in found.scans}) == 4
    assert all(scan.age and scan.sex and scan.site and scan.mask and scan.tissue for scan in found.scans)
    volume = prepare(found.scans[0], Preprocessing(4.0, (48, 56, 48)), with_tissue=True)
    assert volume.mask_source == "derivative"
    levels = [np.median(volume.t1_XYZ[share > 0.8]) for share in volume.tissue_3XYZ]
    assert levels[0] > levels[1] > levels[2]
    assert not examine(found).errors


def test_sessions_have_their_own_ages(cohort):
    ages = {}
    for scan in open_cohort(cohort).scans:
        ages.setdefault(scan.participant_id, []).append(scan.age)
    several = [visits for visits in ages.values() if len(visits) > 1]
    assert several
    assert all(0.9 < later - first < 2.1 for first, later in several)


def test_it_is_marked_synthetic_and_keeps_its_truth_apart(cohort):
    assert "ynthetic" in json.loads((cohort / "dataset_description.json").read_text())["Name"]
    assert "Nobody was scanned" in (cohort / "README").read_text()
    assert "gap" not in (cohort / "participants.tsv").read_text()
    truth = list((cohort / "derivatives" / "truth").rglob("*.tsv"))
    assert any("gap" in path.read_text().splitlines()[0] for path in truth)


def test_a_larger_cohort_keeps_the_smaller_one(tmp_path):
    one = synthesize(tmp_path / "a", 1, seed=3, spacing_mm=8.0)
    image = (one / "sub-0001" / "anat" / "sub-0001_T1w.nii.gz").read_bytes()
    stamp = (one / "sub-0001" / "anat" / "sub-0001_T1w.nii.gz").stat().st_mtime_ns
    seen = []
    synthesize(tmp_path / "a", 2, seed=3, spacing_mm=8.0, on_subject=lambda *count: seen.append(count))
    assert (one / "sub-0001" / "anat" / "sub-0001_T1w.nii.gz").stat().st_mtime_ns == stamp
    assert seen == [(1, 2), (2, 2)]
    again = synthesize(tmp_path / "b", 1, seed=3, spacing_mm=8.0)
    assert (again / "sub-0001" / "anat" / "sub-0001_T1w.nii.gz").read_bytes() == image


def test_another_recipe_or_a_used_folder_is_refused(tmp_path):
    synthesize(tmp_path / "a", 1, seed=3, spacing_mm=8.0)
    with pytest.raises(UserError, match="another recipe"):
        synthesize(tmp_path / "a", 1, seed=4, spacing_mm=8.0)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "thesis.txt").write_text("precious")
    with pytest.raises(UserError, match="not empty"):
        synthesize(tmp_path / "b", 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"subjects": 0}, "subjects=0"),
        ({"sessions": 0}, "at least one visit"),
        ({"ages": (5, 90)}, "between 18 and 95"),
        ({"spacing_mm": 0.2}, "1 to 8 mm"),
    ],
)
def test_nonsense_is_refused(tmp_path, options, message):
    with pytest.raises(UserError, match=message):
        synthesize(tmp_path / "a", **{"subjects": 1} | options)


def test_a_confounded_cohort_makes_doctor_warn(tmp_path):
    found = {}
    for confounded in (False, True):
        root = synthesize(tmp_path / str(confounded), 18, seed=2, confounded=confounded, spacing_mm=8.0)
        found[confounded] = examine(open_cohort(root)).confounded_by
    assert {"site", "intensity scale"} <= set(found[True])
    assert "site" not in found[False]


def test_the_bids_validator_finds_no_error(cohort, tmp_path):
    once = synthesize(tmp_path / "once", 1, spacing_mm=8.0)
    folders = [cohort, once, *(root / "derivatives" / name for root in (cohort, once) for name in ("synth", "truth"))]
    for folder in folders:
        assert bids_errors(folder) == [], folder
    assert nibabel.load(next(cohort.rglob("*_T1w.nii.gz"))).get_data_dtype() == np.int16
