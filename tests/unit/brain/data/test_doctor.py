"""Every fault of a scan gets a sentence that names the person and the file; a confound gets a warning."""

import gzip
import io
import shutil

import numpy as np
import pytest
from rich.console import Console

pytest.importorskip("nibabel")

import nibabel
from nibabel.orientations import axcodes2ornt, io_orientation, ornt_transform

from ermoe.brain.commands import Check
from ermoe.brain.data import preprocess as masks
from ermoe.brain.data import quality
from ermoe.brain.data.cohort import open_cohort, open_scans
from ermoe.brain.data.preprocess import Preprocessing, looks_like_t1, prepare
from ermoe.brain.data.quality import confounds, examine, left_out_errors
from ermoe.brain.data.scans import CohortOptions, stop_at_errors
from ermoe.errors import UserError
from support.scans import bids_set, head, rewrite, save, truncate, unpacked


def sheared(data, affine):
    affine = affine.copy()
    affine[0, 1] += 0.5
    return data, affine


def with_nan(data, affine):
    data = data.astype("f4")
    data[3, 3, 3] = np.nan
    return data, affine


def mirrored_qform(path):
    image = nibabel.load(path)
    image.set_qform(np.diag([-1, 1, 1, 1]) @ image.affine, 1)
    nibabel.save(nibabel.Nifti1Image(np.asanyarray(image.dataobj), None, image.header), path)


def stored_as(axes):
    """Stores a T1 in another order of axes, and then cuts the file in the middle."""

    def damage(t1, _):
        image = nibabel.load(t1)
        turn = ornt_transform(io_orientation(image.affine), axcodes2ornt(axes))
        turned = image.as_reoriented(turn)
        truncate(save(t1, np.asanyarray(turned.dataobj), turned.affine))

    return damage


def with_fourth_axis(t1, _):
    truncate(rewrite(t1, lambda data, affine: (data[..., None], affine)))


def without_orientation(path):
    image = nibabel.load(path)
    image.set_sform(None, 0)
    image.set_qform(None, 0)
    nibabel.save(image, path)


def corner(labels):
    """Marks a small part of a brain."""
    part = np.zeros_like(labels)
    part[18:22, 22:26, 20:24] = 1
    return part


FAULTS = {
    "4-D": (lambda t1, _: rewrite(t1, lambda d, a: (np.stack([d, d], -1), a)), "T1w.nii.gz has 4 axes"),
    "NaN": (lambda t1, _: rewrite(t1, with_nan), "T1w.nii.gz has 1 voxels that are NaN"),
    "sheared": (lambda t1, _: save(t1, *sheared(*head()[::2]), qform=False), "T1w.nii.gz has a sheared affine"),
    "qform": (lambda t1, _: mirrored_qform(t1), "T1w.nii.gz has an sform and a qform"),
    "no orientation": (lambda t1, _: without_orientation(t1), "T1w.nii.gz says nothing about its orientation"),
    "truncated": (lambda t1, _: truncate(t1), "T1w.nii.gz ends before its voxels do"),
    "truncated, stored as LAS": (stored_as("LAS"), "T1w.nii.gz ends before its voxels do"),
    "truncated, stored as PSR": (stored_as("PSR"), "T1w.nii.gz ends before its voxels do"),
    "truncated, one volume of four axes": (with_fourth_axis, "T1w.nii.gz ends before its voxels do"),
    "a lesion": (lambda _, dseg: rewrite(dseg, lambda d, a: (d * corner(d), a)), "mL as brain, and no brain is"),
    "empty file": (lambda t1, _: t1.write_bytes(b""), "T1w.nii.gz is empty"),
    "no image": (lambda t1, _: t1.write_bytes(b"hello"), "T1w.nii.gz cannot be read as an image"),
    "constant": (lambda t1, _: rewrite(t1, lambda d, a: (0 * d, a)), "T1w.nii.gz is 0 everywhere"),
    "empty mask": (lambda _, dseg: rewrite(dseg, lambda d, a: (0 * d, a)), "dseg.nii.gz marks no voxel"),
    "other grid": (
        lambda _, dseg: rewrite(dseg, lambda d, a: (d[::2, ::2, ::2], a @ np.diag([2, 2, 2, 1]))),
        "dseg.nii.gz lies on another grid",
    ),
    "truncated mask": (lambda _, dseg: truncate(dseg), "dseg.nii.gz ends before"),
    "wrong labels": (
        lambda _, dseg: rewrite(dseg, lambda d, a: (np.uint8(9) * (d > 0), a)),
        "dseg.nii.gz has no voxel of wm",
    ),
}


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    return bids_set(tmp_path_factory.mktemp("cohort") / "set", people=2)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named(tmp_path, healthy, fault):
    damage, words = FAULTS[fault]
    root = shutil.copytree(healthy, tmp_path / "set")
    dseg = root / "derivatives" / "tool" / "sub-02" / "anat" / "sub-02_dseg.nii.gz"
    damage(root / "sub-02" / "anat" / "sub-02_T1w.nii.gz", dseg)
    cohort = open_cohort(root)
    examination = examine(cohort)
    (error,) = map(str, examination.errors)
    assert error.startswith("sub-02: ")
    assert words in error
    with pytest.raises(UserError, match="sub-02"):
        stop_at_errors(examination.problems)
    with pytest.raises(UserError, match="sub-02"):
        prepare(cohort.scans[1], Preprocessing(4.0, (40, 48, 40)), with_tissue=True)


def test_a_missing_file_is_named(tmp_path):
    flat = tmp_path / "people.tsv"
    flat.write_text("participant_id\tage\tt1\nsub-01\t50\tgone.nii.gz\n")
    (error,) = map(str, examine(open_cohort(flat)).errors)
    assert error.startswith("sub-01: ")
    assert "gone.nii.gz does not exist" in error


def test_analyze_files_cannot_say_how_a_head_lies(tmp_path):
    t1, _, affine = head()
    nibabel.save(nibabel.AnalyzeImage(t1, affine), tmp_path / "old.img")
    (error,) = map(str, examine(open_scans([tmp_path / "old.img"])).errors)
    assert "old.img is an Analyze file" in error
    nibabel.save(nibabel.Nifti1Pair(t1, affine), tmp_path / "pair.img")
    assert not examine(open_scans([tmp_path / "pair.img"])).errors


def test_a_brain_that_is_dark_inside_is_a_warning(tmp_path, healthy):
    root = shutil.copytree(healthy, tmp_path / "set")
    rewrite(root / "sub-02" / "anat" / "sub-02_T1w.nii.gz", lambda data, affine: (2000 - data, affine))
    assert [str(w).split(":")[0] for w in examine(open_cohort(root)).warnings if "no T1 of an adult" in str(w)] == [
        "sub-02"
    ]


@pytest.mark.parametrize("spacing", [1.0, 2.0, 6.0, (1.0, 1.0, 5.0)])
def test_brightness_inside_is_told_at_any_resolution(spacing):
    edge_mm = np.broadcast_to(spacing, 3)
    shape = np.ceil(150 / edge_mm).astype(int)
    place = (np.indices(shape).T * edge_mm).T - 75
    radius = np.linalg.norm(place, axis=0).astype("f4")
    brain = radius < 65
    assert looks_like_t1(100 - radius, brain, spacing)
    assert not looks_like_t1(radius, brain, spacing)
    assert looks_like_t1(radius, radius < 10, spacing)  # too small to have an inside: nothing is claimed


def test_a_quaternion_that_is_too_long_is_a_warning(tmp_path, healthy):
    root = shutil.copytree(healthy, tmp_path / "set")
    path = root / "sub-01" / "anat" / "sub-01_T1w.nii.gz"
    header = bytearray(unpacked(path))
    header[256:268] = np.array([0.8, 0.8, 0.0], "<f4").tobytes()  # quatern_b, c and d
    path.write_bytes(gzip.compress(bytes(header)))
    examination = examine(open_cohort(root))
    assert examination.errors == []
    assert "no rotation: the sform is used" in " ".join(map(str, examination.warnings))


def test_a_brain_larger_than_the_grid_is_an_error_before_training(healthy):
    (error, *_) = examine(open_cohort(healthy), Preprocessing(2.0, (32, 32, 32))).errors
    assert "and the grid holds 64 × 64 × 64 mm" in str(error)


def test_options_of_tables_are_not_forgotten(tmp_path, healthy):
    scans = sorted(map(str, healthy.glob("sub-*/anat/*_T1w.nii.gz")))
    assert "--exclude, --sex-coding and --age-is-baseline need" in run_doctor(*scans, exclude=("01",))
    rows = "\n".join(f"sub-0{n}\t15000\t{scan}" for n, scan in enumerate(scans))
    (tmp_path / "PEOPLE.TSV").write_text(f"participant_id\tage\tt1\n{rows}\n")
    assert "2 errors (see above)" in run_doctor(tmp_path / "PEOPLE.TSV")


def test_forms_that_are_only_shifted_are_a_warning(tmp_path, healthy):
    root = shutil.copytree(healthy, tmp_path / "set")
    path = root / "sub-01" / "anat" / "sub-01_T1w.nii.gz"
    image = nibabel.load(path)
    shifted = image.affine.copy()
    shifted[:3, 3] += [0, 12, 0]
    image.set_qform(shifted, 1)
    nibabel.save(nibabel.Nifti1Image(np.asanyarray(image.dataobj), None, image.header), path)
    examination = examine(open_cohort(root))
    assert not examination.errors
    assert "sform and a qform that are up to 12 mm apart" in str(examination.warnings[0])


def test_a_copy_under_another_name_is_found(tmp_path, healthy):
    root = shutil.copytree(healthy, tmp_path / "set")
    t1 = [root / f"sub-0{i}" / "anat" / f"sub-0{i}_T1w.nii.gz" for i in (1, 2)]
    image = nibabel.as_closest_canonical(nibabel.load(t1[0]))
    change = nibabel.orientations.axcodes2ornt("PSR")
    nibabel.save(image.as_reoriented(nibabel.orientations.ornt_transform([[0, 1], [1, 1], [2, 1]], change)), t1[1])
    errors = [str(error) for error in examine(open_cohort(root)).errors]
    assert any("sub-02" in error and "has the same voxels as" in error and "sub-01" in error for error in errors)


def test_a_cut_off_brain_is_a_warning(tmp_path):
    t1, labels, affine = head()
    save(tmp_path / "sub-01_T1w.nii.gz", t1[:, :, :-14], affine)
    save(tmp_path / "sub-01_dseg.nii.gz", labels[:, :, :-14], affine)
    warnings = examine(open_scans([tmp_path / "sub-01_T1w.nii.gz"], tissue_from="none")).warnings
    assert any("sub-01_T1w.nii.gz shows a brain that is cut off at the top" in str(warning) for warning in warnings)
    assert any("too coarse" in str(warning) for warning in warnings)


def test_masks_come_in_their_order(tmp_path, monkeypatch):
    t1, labels, affine = head()
    stripped, _, _ = head(skull=False)
    scan = open_scans([save(tmp_path / "a.nii.gz", t1, affine)]).scans[0]
    bare = open_scans([save(tmp_path / "b.nii.gz", stripped, affine)]).scans[0]
    grid = Preprocessing(4.0, (40, 48, 40))
    monkeypatch.setattr(masks, "has_deepbet", lambda: False)
    volume = prepare(bare, grid)
    assert volume.mask_source == "stripped"
    with pytest.raises(UserError, match=r"a: .*a.nii.gz has no brain mask.*ermoe\[brain-mask\]"):
        prepare(scan, grid)
    beside = save(tmp_path / "sub-1_T1w.nii.gz", t1, affine)
    save(tmp_path / "sub-1_dseg.nii.gz", labels, affine)
    assert prepare(open_scans([beside], tissue_from="none").scans[0], grid).mask_source == "dseg"
    save(tmp_path / "sub-1_desc-brain_mask.nii.gz", (labels > 0).astype("u1") * 255, affine)
    derivative = prepare(open_scans([beside], tissue_from="none").scans[0], grid)
    assert derivative.mask_source == "derivative"
    assert (derivative.mask_XYZ == volume.mask_XYZ).mean() > 0.99


def test_leaving_one_out_equals_fitting_n_times():
    rng = np.random.default_rng(0)
    age, value = rng.uniform(20, 80, 15), rng.normal(size=15)
    design = np.column_stack([np.ones(15), value])
    slow = []
    for i in range(15):
        others = np.arange(15) != i
        weights = np.linalg.lstsq(design[others], age[others], rcond=None)[0]
        slow.append(age[i] - design[i] @ weights)
    np.testing.assert_allclose(left_out_errors(design, age[:, None])[:, 0], slow, rtol=1e-9)


def test_the_only_one_of_a_group_is_predicted_by_the_mean():
    age = np.array([20.0, 30.0, 40.0, 80.0])
    design = np.array([[1, 0], [1, 0], [1, 0], [0, 1]], float)
    assert left_out_errors(design, age[:, None])[3, 0] == pytest.approx(80 - 30)


def test_only_what_predicts_age_is_called_a_confound():
    rng = np.random.default_rng(1)
    age = rng.uniform(20, 80, 60)
    found = confounds(
        age,
        {"scale": age / 50 + rng.normal(size=60) * 0.3, "noise": rng.normal(size=60), "voxel": np.ones(60)},
        {"batch": ["old" if a > 55 else "young" for a in age], "site": list("ABC" * 20), "id": list(map(str, age))},
    )
    assert [confound.name for confound in found if confound.predicts_age] == ["scale", "batch"]
    assert {confound.name for confound in found if confound.mae is None} == {"voxel", "id"}


def run_doctor(*scans, mask=False, **options):
    text = io.StringIO()
    try:
        Check(tuple(map(str, scans)), cohort=CohortOptions(**options), mask=mask)(Console(file=text, width=200))
    except UserError as refusal:
        text.write(f"ermoe: {refusal}")
    return text.getvalue()


def test_doctor_speaks(tmp_path):
    root = bids_set(tmp_path / "set", people=12, batch=lambda i: "A" if i < 6 else "B")
    said = run_doctor(root)
    assert "12 scans of 12 people, 43.0 to 76.0 years" in said
    assert "brain mask: dseg 12" in said
    assert "warning: batch alone predicts age" in said
    assert "warning: noise" not in said
    truncate(root / "sub-03" / "anat" / "sub-03_T1w.nii.gz")
    said = run_doctor(root)
    assert "error: sub-03: " in said
    assert "ermoe: 1 error (see above): mend the data before training" in said
    assert "sub-03" not in run_doctor(root, exclude=("03",))


def test_synthesize_and_doctor_from_the_command_line(tmp_path, capsys):
    pytest.importorskip("nilearn")
    from ermoe.cli.main import main

    assert main(["brain", "synthesize", "--out", str(tmp_path / "set"), "--subjects", "2", "--spacing-mm", "8"]) == 0
    assert "2 synthetic subjects" in capsys.readouterr().out
    assert main(["brain", "check", str(tmp_path / "set")]) == 0
    assert "0 errors" in capsys.readouterr().out
    assert main(["brain", "check", str(tmp_path / "nowhere")]) == 2
    assert "nowhere does not exist" in capsys.readouterr().err


def test_doctor_looks_at_single_files(tmp_path):
    t1, _, affine = head(skull=False)
    said = run_doctor(save(tmp_path / "a.nii.gz", t1, affine))
    assert "1 scan of 1 person" in said


def test_masks_are_made_or_missed(tmp_path, monkeypatch):
    t1, labels, affine = head()
    path = save(tmp_path / "a.nii.gz", t1, affine)
    monkeypatch.setattr(quality, "has_deepbet", lambda: True)
    monkeypatch.setattr(masks, "has_deepbet", lambda: True)
    monkeypatch.setattr(masks, "_deepbet_mask", lambda image: np.asarray(labels > 0))
    missed = (
        "1 mask not made, so these brains were not looked at: a; deepbet makes them in training, and here with --mask"
    )
    assert missed in run_doctor(path).replace("\n", " ")
    said = run_doctor(path, mask=True)
    assert "brain mask: deepbet 1" in said
    assert "not made" not in said
    monkeypatch.setattr(masks, "has_deepbet", lambda: False)
    assert "--mask makes masks with deepbet: pip install 'ermoe[brain-mask]'" in run_doctor(path, mask=True)
