"""What labs have on their disks instead of a clean BIDS set: every mistake gets the remedy that mends it."""

import gzip
import os
import shutil

import numpy as np
import pytest

pytest.importorskip("nibabel")

from ermoe.brain.data.cohort import open_cohort, open_scans
from ermoe.brain.data.preprocess import prepare
from ermoe.brain.data.quality import examine, in_words
from ermoe.brain.data.scans import Preprocessing, Scan, stop_at_errors
from ermoe.errors import UserError
from support.scans import bids_set, rewrite, save, unpacked

DICOM = b"\0" * 128 + b"DICM" + b"\0" * 300


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    return bids_set(tmp_path_factory.mktemp("cohort") / "set", people=2)


@pytest.fixture
def root(tmp_path, healthy):
    return shutil.copytree(healthy, tmp_path / "set")


def t1_of(root, person="sub-02"):
    return root / person / "anat" / f"{person}_T1w.nii.gz"


def linked(path):
    path.unlink()
    path.symlink_to("../../.git/annex/objects/a/b/MD5E-s9--0.nii.gz/MD5E-s9--0.nii.gz")


def test_a_header_that_nibabel_would_mend_gets_our_sentence_alone(root, caplog):
    data = bytearray(unpacked(t1_of(root)))
    data[76:108] = bytes(32)  # voxels of no size
    t1_of(root).write_bytes(gzip.compress(bytes(data)))
    assert len(examine(open_cohort(root)).errors) == 1
    assert not caplog.records


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (linked, "is a link of git-annex whose content is not here: fetch it with `datalad get FILE`"),
        (lambda path: path.write_text("/annex/objects/MD5E-s9--0.nii.gz\n"), "is a pointer of git-annex, not the scan"),
        (
            lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
            "is a pointer of Git LFS, not the scan: fetch it with `git lfs pull`",
        ),
        (lambda path: path.write_bytes(DICOM), "is a DICOM file: convert its folder with `dcm2niix -z y FOLDER`"),
        (
            lambda path: path.write_bytes(unpacked(path)),
            "is not packed by gzip, as its name says: let its name end in .nii, or pack it with gzip",
        ),
    ],
)
def test_a_file_that_is_something_else(root, damage, sentence):
    damage(t1_of(root))
    (error,) = map(str, examine(open_cohort(root)).errors)
    assert error.startswith("sub-02: ")
    assert sentence in error


def test_a_packed_file_that_does_not_say_so(tmp_path, healthy):
    path = tmp_path / "head.nii"
    path.write_bytes(gzip.compress(unpacked(t1_of(healthy))))
    with pytest.raises(
        UserError, match=r"is packed by gzip and its name does not say so: let its name end in \.nii\.gz"
    ):
        prepare(Scan("head", None, path), Preprocessing())


def test_a_series_is_no_scan(root):
    rewrite(t1_of(root), lambda data, affine: (np.stack([data] * 3, -1), affine))
    (error,) = map(str, examine(open_cohort(root)).errors)
    assert "has 4 axes" in error
    assert "where a volume has three: choose one volume of it" in error


def test_a_mask_of_no_brains_size(root):
    labels = root / "derivatives" / "tool" / "sub-02" / "anat" / "sub-02_dseg.nii.gz"
    rewrite(
        labels, lambda data, affine: (np.where(np.arange(data.size).reshape(data.shape) == 9000, data.max(), 0), affine)
    )
    (scan,) = [scan for scan in open_cohort(root).scans if scan.participant_id == "sub-02"]
    with pytest.raises(UserError, match=r"marks 0 mL as brain, and no brain is of that size: make the mask again"):
        prepare(scan, Preprocessing())


def test_people_who_are_not_there(root):
    with pytest.raises(UserError, match="has no T1w scan of sub-nobody: check the labels"):
        open_cohort(root, participants=["nobody"])


def test_where_names_the_values_of_a_column(root):
    with pytest.raises(UserError, match="--where sex=X holds for no scan: sex is F, M"):
        open_cohort(root, where=["sex=X"])


@pytest.mark.parametrize("look", [lambda folder: open_scans([folder]), open_cohort])
def test_a_folder_of_dicom(tmp_path, look):
    (tmp_path / "IM0001").write_bytes(DICOM)
    with pytest.raises(UserError, match=r"holds DICOM files, IM0001 for one: convert them with `dcm2niix -z y"):
        look(tmp_path)


def test_links_of_git_annex_in_a_folder_are_not_overlooked(root):
    linked(t1_of(root))
    (scan,) = open_scans([root / "sub-02"]).scans
    with pytest.raises(UserError, match="datalad get"):
        prepare(scan, Preprocessing())


def test_commas_in_a_tsv(root):
    table = root / "participants.tsv"
    table.write_text(table.read_text().replace("\t", ","))
    with pytest.raises(UserError, match=r"has ',' between its columns, where a .tsv has tabs: save it again separated"):
        open_cohort(root)


def test_other_names_of_columns_are_listed(root):
    table = root / "participants.tsv"
    text = table.read_text()
    table.write_text(text.replace("age", "age_at_scan", 1))
    (problem,) = open_cohort(root).problems
    assert "has no column age; it has participant_id, age_at_scan, sex, site, batch: rename the one" in str(problem)
    assert problem.severity == "error"
    assert [scan.severity for scan in open_scans([root]).problems] == ["warning"]
    table.write_text(text.replace("participant_id", "subject", 1))
    with pytest.raises(UserError, match="it has subject, age, sex, site, batch: rename the one with the ids"):
        open_cohort(root)


def test_scans_whose_names_lack_a_letter(root):
    path = t1_of(root)
    path.rename(path.with_name("sub-02_T1.nii.gz"))
    assert (
        "1 images end in _T1 and are left out: rename them to _T1w if they are T1-weighted" in open_cohort(root).notes
    )
    shutil.rmtree(root / "sub-01")
    with pytest.raises(UserError, match=r"has no \*_T1w.nii\[.gz\] but sub-02_T1.nii.gz: rename _T1 to _T1w"):
        open_cohort(root)


def test_what_is_skipped_is_counted(root):
    for path in list(root.rglob("*_T1w.nii.gz")):
        path.with_name(f"._{path.name}").write_bytes(b"\0\5\x16\7")
        path.with_name(path.name.replace("T1w", "T2w")).write_bytes(b"")
    told = ("2 other images are skipped: T2w 2", "2 files that macOS leaves (._…) are ignored")
    assert open_cohort(root).notes == told
    plain = root.parent / "plain"
    shutil.copytree(root / "sub-01", plain)
    assert open_scans([plain]).notes == tuple(note.replace("2 ", "1 ", 1).replace(" 2", " 1") for note in told)


def test_equal_errors_are_one_line(root):
    for person in ("sub-01", "sub-02"):
        t1_of(root, person).write_bytes(b"")
    cohort = open_cohort(root)
    examination = examine(cohort)
    with pytest.raises(UserError, match=r"2 errors in the data.*\n.*is empty: copy it again.*\(and 1 more: sub-02\)$"):
        stop_at_errors(examination.problems)
    assert sum("is empty" in line for line in in_words(cohort, examination) if isinstance(line, str)) == 1


@pytest.mark.parametrize("name", ["scans", "sessions"])
def test_ages_of_scans_and_of_sessions(tmp_path, name):
    root = bids_set(tmp_path / "set", people=1, sessions=("ses-1", "ses-2"), table="participant_id\tsex\nsub-01\tF\n")
    if name == "sessions":
        rows = "session_id\tage\nses-1\t50.5\nses-2\t52\n"
        (root / "sub-01" / "sub-01_sessions.tsv").write_text(rows)
    else:
        for session, age in (("ses-1", 50.5), ("ses-2", 52)):
            rows = f"filename\tage\nanat/sub-01_{session}_T1w.nii.gz\t{age}\nfunc/x.nii.gz\tn/a\n"
            (root / "sub-01" / session / f"sub-01_{session}_scans.tsv").write_text(rows)
    cohort = open_cohort(root)
    assert [scan.age for scan in cohort.scans] == [50.5, 52.0]
    assert not cohort.problems
    os.remove(root / "participants.tsv")
    assert not open_cohort(root).problems


def test_a_head_upside_down(tmp_path):
    datasets = pytest.importorskip("nilearn.datasets")
    image = datasets.load_mni152_template(resolution=4)
    brain = np.asarray(image.dataobj, dtype="f4")
    path = save(tmp_path / "sub-01_T1w.nii.gz", np.pad(np.where(brain > 0.1, brain, 0), 3), image.affine)
    said = "lies upside down or back to front, by the axes of its header: look at it; convert it again"
    assert not any(said in str(problem) for problem in examine(open_scans([path])).problems)
    for axes in (2, 1, (1, 2)):
        rewrite(path, lambda data, affine, axes=axes: (np.flip(data, axes), affine))
        assert any(said in str(problem) for problem in examine(open_scans([path])).warnings)
        rewrite(path, lambda data, affine, axes=axes: (np.flip(data, axes), affine))
