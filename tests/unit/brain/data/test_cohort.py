"""Finding scans, joining them with their tables, and saying what is uncertain."""

import json

import pytest

pytest.importorskip("nibabel")

from ermoe.brain.data.cohort import open_cohort, open_scans
from ermoe.brain.data.scans import ProbabilityMaps, Segmentation
from ermoe.errors import UserError
from support.scans import DSEG_TSV, bids_set, head, save


def sentences(cohort, severity=None):
    return [str(problem) for problem in cohort.problems if severity in (None, problem.severity)]


def table(*rows, columns="participant_id\tage\tsex"):
    return "\n".join([columns, *rows]) + "\n"


def test_a_part_of_a_cohort_is_named_by_its_columns(tmp_path):
    rows = [f"sub-{n}\t{n}.nii.gz\t{40 + n}\t{'control' if n % 2 else 'depr'}" for n in range(1, 5)]
    table = tmp_path / "people.tsv"
    table.write_text("\n".join(["participant_id\tt1\tage\tgroup", *rows]) + "\n")
    found = open_cohort(table, where=("group=Control",))
    assert [scan.participant_id for scan in found.scans] == ["sub-1", "sub-3"]
    assert found.notes[-1] == "2 of 4 scans are used, those with group=Control"
    with pytest.raises(UserError, match="holds for no scan: the columns are group, sex, site"):
        open_cohort(table, where=("arm=1",))
    with pytest.raises(UserError, match="as in group=control"):
        open_cohort(table, where=("control",))


def test_a_clean_set(tmp_path):
    cohort = open_cohort(bids_set(tmp_path / "set"))
    assert [scan.key for scan in cohort.scans] == [f"sub-{i:02d}" for i in range(1, 7)]
    assert not cohort.problems
    first = cohort.scans[0]
    assert (first.age, first.sex, first.site, first.columns["batch"]) == (43.0, "F", "X", "B")
    assert isinstance(first.tissue, Segmentation)
    assert first.tissue.codes == {"wm": (3,), "gm": (2,), "csf": (1,)}
    assert first.labels == first.tissue.path


def test_a_brain_mask_and_probability_maps_are_preferred(tmp_path):
    root = bids_set(tmp_path / "set", people=1)
    _t1, labels, affine = head(1)
    folder = root / "derivatives" / "tool" / "sub-01" / "anat"
    mask = save(folder / "sub-01_desc-brain_mask.nii.gz", (labels > 0).astype("u1"), affine)
    save(folder / "sub-01_space-MNI_desc-brain_mask.nii.gz", labels, affine)
    for label in ("GM", "WM", "CSF"):
        save(folder / f"sub-01_label-{label}_probseg.nii.gz", (labels == 1).astype("f4"), affine)
    scan = open_cohort(root).scans[0]
    assert scan.mask == mask
    assert isinstance(scan.tissue, ProbabilityMaps)
    assert isinstance(open_cohort(root, tissue_from="dseg").scans[0].tissue, Segmentation)
    assert open_cohort(root, tissue_from="none").scans[0].tissue is None


def test_the_twins_that_macos_leaves_are_no_scans(tmp_path):
    root = bids_set(tmp_path / "set", people=2)
    for path in [*root.rglob("*.nii.gz"), *root.rglob("*.tsv")]:
        path.with_name(f"._{path.name}").write_bytes(b"\0\5\x16\7")
    cohort = open_cohort(root)
    assert not cohort.problems
    assert [scan.t1.name for scan in cohort.scans] == ["sub-01_T1w.nii.gz", "sub-02_T1w.nii.gz"]
    assert isinstance(cohort.scans[0].tissue, Segmentation)
    names = [scan.t1.name for scan in open_scans([root / "sub-01"]).scans]
    assert names == ["sub-01_T1w.nii.gz"]


def test_a_segmentation_without_its_table_stops(tmp_path):
    root = bids_set(tmp_path / "set", people=1)
    (root / "derivatives" / "tool" / "dseg.tsv").unlink()
    (error,) = sentences(open_cohort(root), "error")
    assert "sub-01" in error
    assert "sub-01_dseg.nii.gz has no dseg.tsv that says which number is which tissue" in error
    assert not open_cohort(root, tissue_from="none").problems


def test_freesurfer_is_tissue_only_when_asked(tmp_path):
    root = bids_set(tmp_path / "set", people=1, labels=False)
    _t1, labels, affine = head(1)
    folder = root / "derivatives" / "tool" / "sub-01" / "anat"
    (root / "derivatives" / "tool" / "dseg.tsv").unlink()
    aseg = save(folder / "sub-01_desc-aseg_dseg.nii.gz", labels.astype("i2") + 1, affine)
    quiet = open_cohort(root).scans[0]
    assert quiet.tissue is None
    assert quiet.labels is None
    asked = open_cohort(root, tissue_from="aseg").scans[0].tissue
    assert asked.path == aseg
    assert 41 in asked.codes["wm"]
    assert 1035 in asked.codes["gm"]
    assert 4 in asked.codes["csf"]


def test_a_table_of_freesurfer_labels_is_not_taken_for_tissue(tmp_path):
    root = bids_set(tmp_path / "set", people=1)
    (root / "derivatives" / "tool" / "dseg.tsv").write_text("index\tname\n2\tLeft-Cerebral-White-Matter\n")
    (error,) = sentences(open_cohort(root), "error")
    assert "no row for wm, gm, csf" in error
    assert "--tissue-from aseg" in error


@pytest.mark.parametrize(
    ("cell", "severity", "words"),
    [
        ("n/a", "warning", "sub-01: .*participants.tsv gives no age"),
        ("89+", "warning", "sub-01: .*'89\\+', which is a limit"),
        ("21185", "error", "sub-01: .*participants.tsv gives the age 21185.*days.*58.0 years"),
        ("700", "error", "if these are months"),
        ("-3", "error", "not between 0 and 120"),
        ("forty", "error", "'forty', which is not a number"),
    ],
)
def test_ages_that_are_not_ages(tmp_path, cell, severity, words):
    import re

    root = bids_set(tmp_path / "set", people=1, table=table(f"sub-01\t{cell}\tM"))
    cohort = open_cohort(root)
    (sentence,) = sentences(cohort, severity)
    assert re.search(words, sentence)
    assert cohort.scans[0].age is None
    assert not cohort.with_age


def test_ages_declared_in_days_stop(tmp_path):
    root = bids_set(tmp_path / "set", people=1)
    (root / "participants.json").write_text(json.dumps({"age": {"Units": "days"}}))
    assert "says that ages are in days" in sentences(open_cohort(root), "error")[0]


def test_a_table_that_was_written_for_another_folder(tmp_path):
    rows = "".join(f"{number},scans/{number}.nii,50\n" for number in range(101))
    (tmp_path / "people.csv").write_text("participant_id,t1,age\n" + rows)
    with pytest.raises(UserError, match=r"names 101 scans, and none of them exists, scans/0.nii for one: paths count"):
        open_cohort(tmp_path / "people.csv")


def test_a_table_without_ids_is_refused(tmp_path):
    root = bids_set(tmp_path / "set", people=1, table="id\tage\nsub-01\t50\n")
    with pytest.raises(UserError, match=r"participants.tsv has no column participant_id"):
        open_cohort(root)


def test_duplicate_rows_are_named(tmp_path):
    rows = table("sub-01\t50\tM", "sub-01\t50\tM")
    (error,) = sentences(open_cohort(bids_set(tmp_path / "set", people=1, table=rows)), "error")
    assert "sub-01" in error
    assert "participants.tsv has more than one row" in error


@pytest.mark.parametrize("spelling", ["sub-1", "SUB-01", "sub-001"])
def test_one_person_with_two_spellings_is_named(tmp_path, spelling):
    root = bids_set(tmp_path / "set", people=2, table=table(f"{spelling}\t50\tM", "sub-02\t60\tF"))
    errors = sentences(open_cohort(root), "error")
    assert any(spelling in error and "sub-01" in error for error in errors)


def test_two_folders_for_one_person_are_named(tmp_path):
    root = bids_set(tmp_path / "set", people=2)
    (root / "sub-02").rename(root / "sub-1")
    errors = sentences(open_cohort(root), "error")
    assert any("'sub-01', 'sub-1'" in error for error in errors)


def test_who_is_excluded_stops_nobody(tmp_path):
    rows = table("sub-01\t50\tM", "sub-02\t60\tF", "sub-2\t60\tF", "sub-03\t9999\tF", "sub-03\t50\tF")
    root = bids_set(tmp_path / "set", people=3, table=rows)
    assert sentences(open_cohort(root), "error")
    assert not open_cohort(root, exclude=["02", "2", "03"]).problems
    assert not open_cohort(root, participants=["01"]).problems


def test_a_row_without_scan_and_a_scan_without_row(tmp_path):
    root = bids_set(tmp_path / "set", people=2, table=table("sub-01\t50\tM", "sub-09\t60\tF"))
    warnings = sentences(open_cohort(root), "warning")
    assert any(w.startswith("sub-09") and "no T1w scan" in w for w in warnings)
    assert any(w.startswith("sub-02") and "no row" in w for w in warnings)


def test_sex_in_words_and_numbers(tmp_path):
    cells = ["male", "f", "O", "n/a"]
    rows = table(*(f"sub-{i:02d}\t50\t{cell}" for i, cell in enumerate(cells, start=1)))
    cohort = open_cohort(bids_set(tmp_path / "words", people=4, table=rows))
    assert [scan.sex for scan in cohort.scans] == ["M", "F", "other", None]

    rows = table("sub-01\t50\t1", "sub-02\t50\t2")
    root = bids_set(tmp_path / "numbers", people=2, table=rows)
    assert "--sex-coding 1=M 2=F" in sentences(open_cohort(root), "error")[0]
    cohort = open_cohort(root, sex_coding={"1": "F", "2": "M"})
    assert [scan.sex for scan in cohort.scans] == ["F", "M"]
    (root / "participants.json").write_text(json.dumps({"sex": {"Levels": {"1": "male", "2": "female"}}}))
    assert [scan.sex for scan in open_cohort(root).scans] == ["M", "F"]


def test_several_sessions_need_their_own_ages(tmp_path):
    root = bids_set(tmp_path / "set", people=1, sessions=("ses-1", "ses-2"))
    (error,) = sentences(open_cohort(root), "error")
    assert "sub-01" in error
    assert "one age for 2 sessions" in error
    assert "--age-is-baseline" in error

    baseline = open_cohort(root, age_is_baseline=True)
    assert [scan.age for scan in baseline.scans] == [43.0, None]

    sessions = root / "sub-01" / "sub-01_sessions.tsv"
    sessions.write_text("session_id\tacq_time\nses-1\t2001-01-01T00:00:00\nses-2\t2003-01-01T12:00:00\n")
    dated = open_cohort(root, age_is_baseline=True)
    assert [round(scan.age, 2) for scan in dated.scans] == [43.0, 45.0]

    sessions.write_text("session_id\tage\nses-1\t43.5\nses-2\t45.1\n")
    own = open_cohort(root)
    assert [scan.age for scan in own.scans] == [43.5, 45.1]
    assert not own.problems


def test_a_later_scan_does_not_get_the_age_of_an_earlier_visit(tmp_path):
    root = bids_set(tmp_path / "set", people=1, sessions=("ses-1", "ses-2"))
    (root / "sub-01" / "ses-1" / "anat" / "sub-01_ses-1_T1w.nii.gz").unlink()
    cohort = open_cohort(root)
    assert [scan.age for scan in cohort.scans] == [None]
    assert "gives one age for 2 sessions, ses-2, ses-1" in sentences(cohort, "error")[0]
    times = "session_id\tacq_time\nses-1\t2001-01-01T00:00:00\nses-2\t2011-01-01T00:00:00\n"
    (root / "sub-01" / "sub-01_sessions.tsv").write_text(times)
    assert [round(scan.age) for scan in open_cohort(root, age_is_baseline=True).scans] == [53]


def test_the_first_visit_is_the_earliest_not_the_first_in_the_alphabet(tmp_path):
    root = bids_set(tmp_path / "set", people=1, sessions=("ses-pre", "ses-post"))
    unclear = open_cohort(root, age_is_baseline=True)
    assert "neither times nor numbers say which that is" in sentences(unclear, "error")[0]
    times = "session_id\tacq_time\nses-post\t2006-01-01T00:00:00\nses-pre\t2001-01-01T00:00:00\n"
    (root / "sub-01" / "sub-01_sessions.tsv").write_text(times)
    ages = {scan.session_id: round(scan.age) for scan in open_cohort(root, age_is_baseline=True).scans}
    assert ages == {"ses-pre": 43, "ses-post": 48}
    root = bids_set(tmp_path / "numbers", people=1, sessions=("ses-10", "ses-9"))
    ages = {scan.session_id: scan.age for scan in open_cohort(root, age_is_baseline=True).scans}
    assert ages == {"ses-9": 43.0, "ses-10": None}


def test_a_wrong_age_is_blamed_on_the_file_that_gives_it(tmp_path):
    root = bids_set(tmp_path / "set", people=1, sessions=("ses-1",))
    (root / "sub-01" / "sub-01_sessions.tsv").write_text("session_id\tage\nses-1\t15000\n")
    (error,) = sentences(open_cohort(root), "error")
    assert "sub-01_sessions.tsv gives the age 15000" in error
    (root / "sessions.json").write_text(json.dumps({"age": {"Units": "months"}}))
    assert any("sessions.json says that ages are in months" in said for said in sentences(open_cohort(root)))


def test_a_flat_table_may_say_its_unit_and_name_its_labels_freely(tmp_path):
    t1, labels, affine = head(1)
    save(tmp_path / "t1.nii.gz", t1, affine)
    save(tmp_path / "labels.nii.gz", labels, affine)
    (tmp_path / "dseg.tsv").write_text(DSEG_TSV)
    rows = table("sub-01\t96\tt1.nii.gz\tlabels.nii.gz", columns="participant_id\tage\tt1\tdseg")
    (tmp_path / "people.tsv").write_text(rows)
    cohort = open_cohort(tmp_path / "people.tsv")
    assert isinstance(cohort.scans[0].tissue, Segmentation)
    assert not cohort.problems
    (tmp_path / "people.json").write_text(json.dumps({"age": {"Units": "months"}}))
    assert "says that ages are in months" in sentences(open_cohort(tmp_path / "people.tsv"), "error")[0]


def test_a_segmentation_of_a_part_is_no_brain(tmp_path):
    root = bids_set(tmp_path / "set", people=1, labels=False)
    _, labels, affine = head(1)
    folder = root / "derivatives" / "lesions" / "sub-01" / "anat"
    save(folder / "sub-01_desc-lesion_dseg.nii.gz", labels, affine)
    (scan,) = open_cohort(root).scans
    assert (scan.labels, scan.tissue) == (None, None)
    named = save(folder / "sub-01_desc-tissue_dseg.nii.gz", labels, affine)
    named.with_name("sub-01_desc-tissue_dseg.tsv").write_text(DSEG_TSV)
    (scan,) = open_cohort(root).scans
    assert scan.labels == named


def test_a_linked_file_brings_the_derivatives_of_its_place(tmp_path):
    root = bids_set(tmp_path / "set", people=1)
    t1 = root / "sub-01" / "anat" / "sub-01_T1w.nii.gz"
    t1.rename(tmp_path / "object")
    t1.symlink_to(tmp_path / "object")
    (scan,) = open_scans([t1]).scans
    assert scan.labels is not None
    save(tmp_path / "loose" / "A.NII", *head(1)[::2])
    assert len(open_scans([tmp_path / "loose"]).scans) == 1


def test_one_rule_for_several_scans(tmp_path):
    root = bids_set(tmp_path / "set", people=1)
    t1, _, affine = head(1)
    anat = root / "sub-01" / "anat"
    (anat / "sub-01_T1w.nii.gz").rename(anat / "sub-01_run-2_T1w.nii.gz")
    save(anat / "sub-01_run-1_T1w.nii.gz", t1, affine)
    save(anat / "sub-01_acq-fast_run-1_T1w.nii.gz", t1, affine)
    save(anat / "sub-01_ce-gad_T1w.nii.gz", t1, affine)
    cohort = open_cohort(root)
    assert cohort.scans[0].t1.name == "sub-01_run-1_T1w.nii.gz"
    assert "the rule is 'first'" in cohort.notes[0]
    assert "1 T1w scans with contrast agent (ce-) are left out" in cohort.notes
    assert open_cohort(root, t1_rule="last").scans[0].t1.name == "sub-01_run-2_T1w.nii.gz"
    assert "acq-fast" in open_cohort(root, t1_rule="*acq-fast*").scans[0].t1.name


def test_a_flat_table(tmp_path):
    root = bids_set(tmp_path / "set", people=2)
    t1 = [f"sub-{i:02d}/anat/sub-{i:02d}_T1w.nii.gz" for i in (1, 2)]
    dseg = [f"derivatives/tool/sub-{i:02d}/anat/sub-{i:02d}_dseg.nii.gz" for i in (1, 2)]
    flat = root / "people.csv"
    flat.write_text(
        f"participant_id;Age;sex;site;t1;dseg;batch\n01;50,5;M;X;{t1[0]};{dseg[0]};A\n02;60;F;Y;{t1[1]};{dseg[1]};B\n"
    )
    cohort = open_cohort(flat)
    assert [scan.participant_id for scan in cohort.scans] == ["sub-01", "sub-02"]
    assert cohort.scans[1].columns == {"batch": "B"}
    errors = sentences(cohort, "error")
    assert any("'50,5', which is not a number" in error for error in errors)
    assert any("no dseg.tsv that says" in error for error in errors)
    (root / "dseg.tsv").write_text(DSEG_TSV)
    assert isinstance(open_cohort(flat).scans[1].tissue, Segmentation)


def test_a_scan_given_to_two_people_is_named(tmp_path):
    flat = tmp_path / "people.tsv"
    flat.write_text(table("sub-01\t50\ta.nii", "sub-02\t60\ta.nii", columns="participant_id\tage\tt1"))
    assert "to several people, sub-01, sub-02" in sentences(open_cohort(flat), "error")[0]


def test_scans_to_predict(tmp_path):
    root = bids_set(tmp_path / "set", people=3)
    (root / "participants.tsv").unlink()
    t1, _, affine = head()
    lone = save(tmp_path / "loose" / "patient 7.nii.gz", t1, affine)
    assert [scan.key for scan in open_scans([lone]).scans] == ["patient 7"]
    assert len(open_scans([tmp_path / "loose", lone]).scans) == 2
    for place in ("one/T1.nii.gz", "two/T1.nii.gz", "v1.5.nii.gz", "v1.6.nii.gz"):
        save(tmp_path / "many" / place, t1, affine)
    assert [scan.key for scan in open_scans([tmp_path / "many"]).scans] == ["one/T1", "two/T1", "v1.5", "v1.6"]
    found = open_scans([root], participants=["02"])
    assert [scan.key for scan in found.scans] == ["sub-02"]
    assert found.scans[0].labels is not None
    assert {problem.severity for problem in found.problems} == {"warning"}
    # A file inside a BIDS root finds what the root has for it.
    assert open_scans([root / "sub-02" / "anat" / "sub-02_T1w.nii.gz"]).scans[0].labels == found.scans[0].labels


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: folder / "nowhere", "does not exist"),
        (lambda folder: folder, "has no sub-"),
        (lambda folder: _written(folder / "a.tsv", ""), "is empty"),
        (lambda folder: _written(folder / "a.tsv", "participant_id\tage\n"), "needs the columns"),
        (lambda folder: _written(folder / "a.tsv", "participant_id\tt1\nsub-01\n"), "1 cells in line 2"),
        (lambda folder: _written(folder / "a.docx", "x"), "no BIDS root and no table"),
    ],
)
def test_what_is_no_cohort(tmp_path, make, message):
    with pytest.raises(UserError, match=message):
        open_cohort(make(tmp_path))


def _written(path, text):
    path.write_text(text)
    return path
