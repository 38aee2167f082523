"""From a data set to predictions and a report, on phantoms."""

import dataclasses
import io
import json
import math
import re
import shutil
import subprocess
import sys
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from rich.console import Console

import ermoe
from ermoe.brain.ages import AgeCalibration, Line
from ermoe.brain.commands import Train
from ermoe.brain.data.cache import Archive
from ermoe.brain.data.cohort import open_cohort
from ermoe.brain.data.phantom import synthesize
from ermoe.brain.data.preprocess import prepare
from ermoe.brain.data.scans import Preprocessing
from ermoe.brain.data.splits import Splits
from ermoe.brain.evaluation import Evaluation
from ermoe.brain.learning import age_head, build, learn_phantoms
from ermoe.brain.model import BrainAgeModel, Prediction, hashed_id, predict, recalibrated
from ermoe.brain.own_ridges import OwnRidge, OwnRidges
from ermoe.brain.recipes import METHODS, VolumeAugmentation, recipe
from ermoe.brain.reporting.page import _facts, _warnings, report
from ermoe.brain.results import held_out
from ermoe.brain.run import train
from ermoe.cli.main import main
from ermoe.console import parse_command
from ermoe.errors import UserError
from ermoe.train.compute import Compute, Processes
from ermoe.train.run_folder import RunFolder, read_lines
from support.bids import bids_errors
from support.browser import CHROMIUM, Browser

QUIET = Console(quiet=True)


def table(path):
    """Rows of a TSV."""
    header, *lines = path.read_text(encoding="utf-8").splitlines()
    return [dict(zip(header.split("\t"), line.split("\t"), strict=True)) for line in lines]


def complaints(*pages):
    """What a browser finds wrong with pages: errors, addresses they ask for, what is wider than the window."""
    found = []
    with Browser() if CHROMIUM else nullcontext() as browser:
        for page in pages if browser else ():
            browser.open(page)
            for width in (390, 1200, 1600):
                browser.resize(width, 900)
                if browser.evaluate("document.documentElement.scrollWidth") > width:
                    found.append(f"{page.name} is wider than {width}")
            inner = "[...document.querySelectorAll('.scroll')].filter(e => e.scrollWidth > e.clientWidth).length"
            found += [f"{page.name} has tables to scroll"] * bool(browser.evaluate(inner))
        if browser:
            found += browser.errors
            found += [address for address in browser.requests if not address.startswith(("file:", "data:", "about:"))]
    return found


def alone(root, number, folder, name):
    """A person's T1 under another name, with its brain mask beside it."""
    scan = open_cohort(root).scans[number]
    shutil.copy(scan.mask, folder / f"{name}_desc-brain_mask.nii.gz")
    return shutil.copy(scan.t1, folder / f"{name}_T1w.nii.gz")


def test_everybody_is_tested_once_by_a_network_that_never_saw_them(finished, cohort_root):
    scans = open_cohort(cohort_root).with_age
    splits = Splits.load(finished / "splits.tsv", scans)
    assert splits.num_folds == 3
    assert all(sorted(parts) == ["test", "train", "train"] for parts in splits.parts.values())
    evaluation = Evaluation.read(finished, cache=finished.parent / "none")
    assert len(evaluation.scans) == 12
    assert np.isfinite(evaluation.held_out.raw_N).all()


def test_a_run_writes_down_its_learning_curve_and_the_region_probe(finished):
    lines = [line for line in read_lines(finished / "folds" / "fold-0" / "metrics.jsonl") if line["kind"] == "test"]
    assert all(line["test_mae"] > 0 for line in lines)
    assert {"probe/wm/wm_expert", "probe/csf/free_expert4"} <= lines[0].keys()
    assert not (finished / "folds" / "fold-0" / "checkpoints" / "best").exists()  # held-out people choose nothing


def test_a_run_that_goes_on_ends_as_if_nothing_had_happened(finished, cohort_root, cache, tmp_path):
    again = tmp_path / "again"
    shutil.copytree(finished, again)
    shutil.rmtree(again / "model")
    shutil.rmtree(again / "folds" / "fold-1")
    (again / "outputs.safetensors").unlink()
    heard = Console(file=io.StringIO(), width=200)
    train(cohort_root, again, preset="tiny", folds=3, cache=cache, console=heard)
    said = heard.file.getvalue()
    assert "fold 1 of 3 (fold-0): learnt already" in said
    assert "fold 2 of 3 (fold-1): learns from 8 people, is tested on 4 others" in said
    assert said.index("phase 1 of 2: each region expert") < said.index("phase 2 of 2: the network learns from whole")
    before, after = BrainAgeModel.load(finished), BrainAgeModel.load(again)
    for name, network in before.networks.items():
        for key, value in network.state_dict().items():
            assert torch.equal(value, after.networks[name].state_dict()[key]), (name, key)
    with pytest.raises(UserError, match="another configuration"):
        train(cohort_root, again, preset="tiny", folds=3, cache=cache, console=QUIET, seed=5)
    heard.file.truncate(0)
    model = train(cohort_root, again, preset="tiny", folds=3, cache=tmp_path / "unused", console=heard)
    assert "is finished already" in heard.file.getvalue()
    assert "phase" not in heard.file.getvalue()
    assert model.facts == after.facts
    assert not (tmp_path / "unused").exists()


def test_the_model_keeps_no_readable_ids(finished):
    text = (finished / "model" / "brain_age.json").read_text()
    assert "sub-" not in text
    assert len(json.loads(text)["parts"]) == 12


def test_a_person_is_judged_by_folds_that_have_not_seen_them(finished, cohort_root):
    model = BrainAgeModel.load(finished)
    person = open_cohort(cohort_root).scans[0].participant_id
    folds, seen = model.folds_for(person)
    assert seen
    assert [model.parts[hashed_id(person)][list(model.networks).index(fold)] for fold in folds] == ["test"]
    assert model.folds_for(person.replace("sub-", "sub-0")) == (folds, True)  # other padding, the same person
    assert model.folds_for("sub-somebodyElse") == (["fold-0", "fold-1", "fold-2"], False)


def test_a_crash_is_a_row_too(finished, cohort_root):
    def read(scan):
        raise ZeroDivisionError("nobody thought of this")

    (row,) = predict(BrainAgeModel.load(finished), open_cohort(cohort_root).scans[:1], read=read)
    assert "ZeroDivisionError: nobody thought of this" in row.problem


def test_scans_that_are_read_ahead_get_the_same_rows(finished, cohort_root, tmp_path):
    (tmp_path / "broken_T1w.nii.gz").write_bytes(b"no image")
    model, good = BrainAgeModel.load(finished), open_cohort(cohort_root).scans[:2]
    scans = [good[0], dataclasses.replace(good[1], t1=tmp_path / "broken_T1w.nii.gz"), good[1]]
    alone, ahead = ([dataclasses.astuple(row) for row in predict(model, scans, workers=w)] for w in (0, 1))
    assert list(map(str, ahead)) == list(map(str, alone))  # as text, because NaN is not equal to itself


def test_a_run_that_an_earlier_version_began_goes_on(finished, tmp_path):
    """It had evaluate_every beside the training, and a fold wrote down its stage and training only."""
    asked = json.loads((finished / "config.json").read_text())
    earlier = json.loads((finished / "config.json").read_text())
    asked["recipe"]["training"]["evaluate_every"] = 4
    earlier["recipe"]["evaluate_every"] = 4
    del earlier["recipe"]["training"]["evaluate_every"]
    fold = json.loads((finished / "folds" / "fold-0" / "config.json").read_text())
    fold["training"]["evaluate_every"] = 4
    begun = {"stage": fold["stage"], "training": {k: v for k, v in fold["training"].items() if k != "evaluate_every"}}
    for name, before, now in (("run", earlier, asked), ("fold", begun, fold)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(before))
        RunFolder(folder).open(now, "auto", Processes())
    earlier["recipe"]["evaluate_every"] = 2
    (tmp_path / "run" / "config.json").write_text(json.dumps(earlier))
    with pytest.raises(UserError, match="evaluate_every: 2 there, 4 asked for"):
        RunFolder(tmp_path / "run").open(asked, "auto", Processes())


def test_prediction_repeats_the_held_out_prediction(finished, cohort_root):
    scan = open_cohort(cohort_root).scans[3]
    (row,) = ermoe.brain.load(finished).predict_all([cohort_root], participants=[scan.participant_id])
    evaluation = Evaluation.read(finished)
    expected = evaluation.held_out.raw_N[[s.key for s in evaluation.scans].index(scan.key)]
    assert isinstance(row, Prediction)
    assert row.brain_age == pytest.approx(expected, abs=1e-2)
    assert row.seen_in_training
    assert row.brain_age_low < row.brain_age_high


def test_a_known_person_is_corrected_by_lines_that_never_saw_their_age(finished, cohort_root, tmp_path):
    model = BrainAgeModel.load(finished)
    shifted = {fold: AgeCalibration({"pooled": Line(float(n), 1.0)}) for n, fold in enumerate(model.networks)}
    lines = {"calibration": AgeCalibration({"pooled": Line(100.0, 1.0)}), "calibration_of_fold": shifted}
    model = dataclasses.replace(model, **lines)
    scan = open_cohort(cohort_root).scans[3]
    (known,) = predict(model, [scan])
    ((fold,), _) = model.folds_for(scan.participant_id)
    assert known.brain_age - known.brain_age_calibrated == pytest.approx(list(model.networks).index(fold))
    (new,) = predict(model, [dataclasses.replace(scan, participant_id="sub-new")])
    assert new.brain_age - new.brain_age_calibrated == pytest.approx(100)


def test_a_new_person_is_judged_by_all_folds_and_flagged_if_unlike_training(finished, cohort_root, tmp_path):
    row = ermoe.brain.load(finished).predict(alone(cohort_root, 0, tmp_path, "sub-new"))
    assert row.num_folds == 3
    assert not row.seen_in_training
    assert not row.unusual_mask
    assert math.isnan(row.age)


def test_a_mask_from_elsewhere_is_flagged_with_a_warning(finished, cohort_root, caplog):
    model = dataclasses.replace(BrainAgeModel.load(finished), mask_sources=("deepbet",))
    rows = list(predict(model, open_cohort(cohort_root).scans[:2]))
    assert all(row.unusual_mask for row in rows)
    assert caplog.text.count("cut brains out differently") == 1


def test_a_scan_that_is_no_t1_is_flagged(finished, cohort_root):
    model, (scan, *_) = BrainAgeModel.load(finished), open_cohort(cohort_root).scans
    volume = prepare(scan, model.preprocessing)
    negative = dataclasses.replace(volume, t1_XYZ=-volume.t1_XYZ)
    rows = [next(predict(model, [scan], read=lambda _, own=own: own)) for own in (volume, negative)]
    assert [row.unlike_t1 for row in rows] == [False, True]


def test_ages_outside_of_training_are_flagged(finished, cohort_root):
    model = dataclasses.replace(BrainAgeModel.load(finished), age_range=(1.0, 2.0))
    (row,) = predict(model, open_cohort(cohort_root).scans[:1])
    assert row.outside_age_range


def test_a_scan_that_cannot_be_used_is_a_row_with_its_reason(finished, cohort_root, tmp_path, capsys):
    (tmp_path / "sub-x_T1w.nii.gz").write_bytes(b"no image")
    good = alone(cohort_root, 1, tmp_path, "sub-good")
    command = ["brain", "predict", str(finished), str(tmp_path / "sub-x_T1w.nii.gz"), str(good)]
    assert main([*command, "--out", str(tmp_path / "out"), "--cache", str(tmp_path / "kept"), "--no-pages"]) == 0
    assert not list((tmp_path / "out").glob("*.html"))
    assert "1 of 2 scans predicted" in capsys.readouterr().out
    rows = table(tmp_path / "out" / "desc-predictions_brainage.tsv")
    broken, usable = sorted(rows, key=lambda row: row["brain_age"] != "n/a")
    assert broken["problem"] != "n/a"
    assert float(usable["brain_age"]) > 0
    assert "Description" in json.loads((tmp_path / "out" / "desc-predictions_brainage.json").read_text())["gap"]
    assert bids_errors(tmp_path / "out") == []
    with pytest.raises(UserError, match="sub-x"):
        ermoe.brain.load(finished).predict(tmp_path / "sub-x_T1w.nii.gz")


def test_predict_a_whole_data_set_or_some_of_its_people(finished, cohort_root, cache, capsys):
    person = open_cohort(cohort_root).scans[2].participant_id
    command = ["brain", "predict", str(finished), str(cohort_root), "--cache", str(cache)]
    assert main([*command, "--participant-label", person]) == 0
    assert f"{person}: " in capsys.readouterr().out


def test_python_predicts_and_evaluates_like_the_commands(finished, cohort_root, cache, capsys):
    scans = open_cohort(cohort_root).scans
    (row,) = ermoe.brain.predict(finished, scans[0].t1, cache=cache)
    assert row.seen_in_training
    again = ermoe.brain.predict(ermoe.brain.load(finished), [scans[0].t1], cache=cache)
    assert [own.brain_age for own in again] == [row.brain_age]
    found = ermoe.brain.evaluate(finished, cohort_root, cache=cache)
    assert (found["scans"], found["left_out"]) == (len(scans), 0)
    assert main(["brain", "evaluate", str(finished), str(cohort_root), "--cache", str(cache)]) == 0
    assert f"{found['mae']:.2f}" in capsys.readouterr().out


def test_a_bids_app_judges_people_one_by_one_and_gathers_them(finished, cohort_root, tmp_path, capsys):
    people = [scan.participant_id for scan in open_cohort(cohort_root).scans[:4]]
    out, kept = tmp_path / "out", tmp_path / "kept"
    command = ["brain", "app", str(cohort_root), str(out)]
    options = ["--model", str(finished), "-w", str(kept), "--participant-label", *people]
    assert main([*command, "group", *options]) == 2
    assert "run the level participant first" in capsys.readouterr().err
    assert main([*command, "participant", *options]) == 0
    page = (out / f"{people[0]}.html").read_text(encoding="utf-8")
    assert "brainsprite" in page
    assert "favicon" not in page  # which would be asked for over the network
    assert re.search("explain(s this age|ed? nothing)|Colours: years", page)
    assert table(out / people[0] / f"{people[0]}_brainage.tsv")[0]["participant_id"] == people[0]
    assert main([*command, "group", *options]) == 0
    rows = table(out / "desc-predictions_brainage.tsv")
    assert [row["participant_id"] for row in rows] == people
    assert rows[0] == table(out / people[0] / f"{people[0]}_brainage.tsv")[0]
    report_of_all = (out / "report.html").read_text(encoding="utf-8")
    assert all(f'href="{who}.html"' in report_of_all for who in people)
    assert re.search(r"all 4 predictions lie within \d+\.\d years", report_of_all)
    assert "was fitted to 12 people" in (out / "logs" / "CITATION.md").read_text(encoding="utf-8")
    assert len(list((kept / "volumes").glob("*.t1.npy"))) == 4
    assert complaints(out / "report.html", out / f"{people[0]}.html") == []
    assert bids_errors(out) == []
    assert main(["brain", "app", str(tmp_path), str(out), "participant", "--model", str(finished)]) == 2
    assert "is no BIDS root" in capsys.readouterr().err


def test_a_bids_app_ends_with_1_if_a_scan_cannot_be_used(finished, cohort_root, tmp_path):
    broken = tmp_path / "bids"
    shutil.copytree(cohort_root, broken)
    scan = open_cohort(broken).scans[0]
    scan.t1.write_bytes(b"no image")
    options = ["--model", str(finished), "-w", str(tmp_path / "kept"), "--participant-label", scan.participant_id]
    with pytest.raises(SystemExit) as ended:
        main(["brain", "app", str(broken), str(tmp_path / "out"), "participant", *options])
    assert ended.value.code == 1
    (row,) = table(tmp_path / "out" / scan.participant_id / f"{scan.participant_id}_brainage.tsv")
    assert row["problem"] != "n/a"


def test_the_report_is_a_derivative_with_tables_pictures_and_a_card(finished, cache, tmp_path):
    page = report(finished, tmp_path, cache=cache, occlusion_scans=1)
    text = page.read_text(encoding="utf-8")
    for heading in ("How far off", "Predicted against chronological age", "Tissues and experts", "Where it looks",
                    "Scans, worst predictions first", "Training", "Model card"):  # fmt: skip
        assert heading in text
    assert re.search(r"<title>[^<]*, synthetic brains</title>", text)
    assert '<a href="#how-far-off">' in text
    assert text.index('id="read-this-first"') < text.index('aria-label="scatter"') < text.index('id="how-far-off"')
    assert "network&#x27;s worth" in text
    description = json.loads((tmp_path / "dataset_description.json").read_text())
    assert description["DatasetType"] == "derivative"
    rows = table(tmp_path / "desc-heldout_brainage.tsv")
    assert len(rows) == 12
    assert set(rows[0]) == set(json.loads((tmp_path / "desc-heldout_brainage.json").read_text()))
    metrics = table(tmp_path / "desc-metrics_brainage.tsv")
    assert {"all", "sex F", "sex M"} <= {row["group"] for row in metrics}
    assert all((row["mae"] == "n/a") == (int(row["num_people"]) < 4) for row in metrics)
    card = (tmp_path / "model-card.md").read_text()
    assert "Research use only" in card
    assert "## Do not\n\n- Do not diagnose" in card
    assert re.search(r"<h3>Do not</h3>\s*<ul><li>Do not diagnose", text)  # each line by itself: headings get lost
    assert len(list((tmp_path / "figures").glob("*.png"))) >= 6
    assert complaints(page) == []
    assert bids_errors(tmp_path) == []


def test_a_model_is_recalibrated_by_people_it_does_not_know(finished, cohort_root, tmp_path, capsys):
    model, scans = BrainAgeModel.load(finished), open_cohort(cohort_root).scans
    strangers = [dataclasses.replace(scan, participant_id=f"sub-x{n}") for n, scan in enumerate(scans[:6])]
    own = recalibrated(model, strangers, where="group=control")
    own.save(tmp_path / "new")
    again = BrainAgeModel.load(tmp_path / "new")
    assert again.recalibration == own.recalibration
    assert "recalibrated on 6 people (group=control)" in own.recalibration.in_words()
    rows = list(predict(again, strangers))
    mean = np.mean([row.brain_age_recalibrated - row.age for row in rows])
    assert mean == pytest.approx(0, abs=1e-6)
    assert rows[0].brain_age == next(predict(model, strangers[:1])).brain_age  # raw stays raw
    with pytest.raises(UserError, match=r"12 of these people have ids of the training set, .* or say --other-people"):
        recalibrated(model, scans)
    assert main(["brain", "recalibrate", str(finished), str(cohort_root), "--out", str(tmp_path / "new")]) == 2
    assert "is there already" in capsys.readouterr().err
    with pytest.raises(UserError, match="recalibrating needs 5"):
        recalibrated(model, strangers[:3])


def test_a_recalibrated_model_is_judged_by_its_recalibrated_ages(finished, cohort_root, cache, tmp_path, capsys):
    out = tmp_path / "new"
    assert main(["brain", "recalibrate", str(finished), str(cohort_root), "--other-people", "--out", str(out)]) == 0
    assert BrainAgeModel.load(out).parts == BrainAgeModel.load(finished).parts
    raw, own = (ermoe.brain.evaluate(model, cohort_root, cache=cache) for model in (finished, out))
    assert abs(own["bias"]) < abs(raw["bias"])
    scan = open_cohort(cohort_root).scans[0].t1
    assert main(["brain", "predict", str(out), str(scan), "--cache", str(cache), "--out", str(tmp_path / "told")]) == 0
    assert re.search(r"years.*, recalibrated \d+\.\d years", capsys.readouterr().out)
    page = (tmp_path / "told" / "report.html").read_text(encoding="utf-8")
    assert "this model was recalibrated on 12 people" in page[page.index("read-this-first") :]


def test_people_of_another_data_set_may_share_ids(finished, cohort_root, cache, capsys):
    scan = open_cohort(cohort_root).scans[0].t1
    command = ["brain", "predict", str(finished), str(scan), "--cache", str(cache)]
    assert main(command) == 0
    assert "seen in training" in capsys.readouterr().out
    assert main([*command, "--other-people"]) == 0
    assert "seen in training" not in capsys.readouterr().out


def test_results_never_replace_another_data_set(finished, cohort_root, cache, tmp_path, capsys):
    data = shutil.copytree(cohort_root, tmp_path / "bids")
    before = (data / "dataset_description.json").read_text()
    options = ["--model", str(finished), "-w", str(cache)]
    assert main(["brain", "app", str(data), str(data), "participant", *options]) == 2
    assert "is a data set of its own, which results would overwrite: name another folder" in capsys.readouterr().err
    assert (data / "dataset_description.json").read_text() == before
    assert not (data / ".bidsignore").exists()
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "README.md").write_text("my notes")
    scan = str(open_cohort(data).scans[0].t1)
    assert main(["brain", "predict", str(finished), scan, "--cache", str(cache), "--out", str(mine)]) == 2
    assert "has a README.md that would be overwritten: name a new folder" in capsys.readouterr().err
    assert (mine / "README.md").read_text() == "my notes"


def test_predictions_of_one_model_are_not_gathered_by_another(finished, cohort_root, cache, tmp_path, capsys):
    other = tmp_path / "other"
    model = BrainAgeModel.load(finished)
    dataclasses.replace(model, facts={**model.facts, "seed": 7}).save(other)
    person = open_cohort(cohort_root).scans[0].participant_id
    command = ["brain", "app", str(cohort_root), str(tmp_path / "out")]
    options = ["-w", str(cache), "--participant-label", person]
    assert main([*command, "participant", "--model", str(finished), *options]) == 0
    assert main([*command, "group", "--model", str(other), *options]) == 2
    known, own = re.search(
        r"holds predictions by (model \w+), this is (model \w+): name", capsys.readouterr().err
    ).groups()
    assert (known, own) == (model.name, BrainAgeModel.load(other).name)
    assert main([*command, "group", "--model", str(finished), *options, "nobody"]) == 2
    assert "there is no T1w scan of sub-nobody: check the labels" in capsys.readouterr().err


def test_simple_estimates_stand_beside_the_network(finished, cache):
    evaluation = Evaluation.read(finished, cache=cache)
    assert {"ermoe", "tissue ridge", "predict the mean"} <= evaluation.estimates.keys()
    assert all(np.isfinite(values).all() for values in evaluation.estimates.values())
    assert evaluation.difference("predict the mean", evaluation.levels["all"]).low < 100


def test_a_report_says_first_what_a_simple_estimate_does_better(finished, cache):
    evaluation = Evaluation.read(finished, cache=cache)
    age_N = evaluation.held_out.age_N
    young_N = age_N < np.median(age_N)
    vars(evaluation)["estimates"] = {
        "ermoe": evaluation.held_out.raw_N,
        "tissue ridge": age_N + 0.1,
        "predict the mean": np.full(len(age_N), age_N.mean()),
        "batch only": np.where(young_N, age_N[young_N].mean(), age_N[~young_N].mean()),
    }
    assert evaluation.confounders == ["batch"]
    vars(evaluation)["levels"] = {"batch young": young_N, "all": np.ones(len(age_N), dtype=bool)}
    said = "\n".join(_warnings(evaluation))
    assert "batch alone predicts age" in said
    assert re.search("tissue ridge beats ermoe by .* years, within batch young", said)
    assert "no better than the mean age" in said
    assert next(iter(_facts(evaluation))) == "raw MAE within batch young"


@pytest.mark.parametrize("method", [method for method in METHODS if method != "ermoe"])
def test_every_method_runs_in_the_same_pipeline(method, cohort_root, cache, tmp_path):
    model = train(
        cohort_root, tmp_path, preset="tiny", method=method, folds=2, cache=cache, console=QUIET, check=False, epochs=1
    )
    loaded = BrainAgeModel.load(tmp_path)
    assert loaded.folds == ["fold-0", "fold-1"]
    assert set(loaded.networks) == (set() if method == "ridge" else set(loaded.folds))
    (row,) = predict(loaded, open_cohort(cohort_root).scans[:1])
    assert row.brain_age_low < row.brain_age < row.brain_age_high
    assert (row.brain_age == row.brain_age_ridge) == (method == "ridge" or not model.blend.worth)
    assert math.isfinite(model.facts["raw"]["mae"])


def test_sites_are_harmonised_inside_folds_and_unknown_ones_left_alone(
    cohort_root, cache, tmp_path, caplog, monkeypatch
):
    monkeypatch.setattr("ermoe.brain.harmonise._FEWEST_PEOPLE", 2)
    asked = {"preset": "tiny", "method": "ridge", "harmonise": "site", "folds": 2, "split": "k-fold"}
    train(cohort_root, tmp_path, cache=cache, console=QUIET, check=False, **asked)
    model, tested = BrainAgeModel.load(tmp_path), Evaluation.read(tmp_path, cache=cache)
    assert all(ridge.offsets for ridge in model.ridges.values())
    rows = {row.participant_id: row.brain_age for row in predict(model, tested.scans)}
    np.testing.assert_allclose([rows[who] for who in tested.people], tested.held_out.raw_N, atol=1e-3)
    assert not caplog.records
    stranger = dataclasses.replace(tested.scans[0], participant_id="sub-new", site="Elsewhere")
    plain = {fold: dataclasses.replace(ridge, offsets={}) for fold, ridge in model.ridges.items()}
    (found,), (bare,) = (list(predict(own, [stranger])) for own in (model, dataclasses.replace(model, ridges=plain)))
    assert found.brain_age == bare.brain_age
    assert "site Elsewhere: not in training, so nothing is harmonised there; recalibrate" in caplog.text
    with pytest.raises(UserError, match="0 of its values have 2 people or more to learn from, and it takes two"):
        train(cohort_root, tmp_path / "no", cache=cache, console=QUIET, check=False, **(asked | {"harmonise": "arm"}))
    with pytest.raises(UserError, match="--harmonise site is about the ridge's measures"):
        recipe("tiny", "ermoe", harmonise="site", learns="age")


def test_a_known_scanner_gets_the_ridge_of_its_own_from_a_stored_model(cohort_root, cache, tmp_path, caplog):
    asked = {"preset": "tiny", "method": "ridge", "folds": 2, "split": "k-fold"}
    model = train(cohort_root, tmp_path / "run", cache=cache, console=QUIET, check=False, **asked)
    older = {
        fold: OwnRidges(("site",), ("North",), {"North": OwnRidge(dataclasses.replace(one, intercept=100.0), 0.5)})
        for fold, one in model.ridges.items()
    }
    blend = dataclasses.replace(model.blend, spread=5.0, spread_of_strangers=9.0)
    dataclasses.replace(model, own_ridges=older, blend=blend).save(tmp_path / "own")
    scan = dataclasses.replace(open_cohort(cohort_root).scans[0], participant_id="sub-new")
    known, stranger = (dataclasses.replace(scan, site=site) for site in ("North", "Elsewhere"))
    own, other = predict(BrainAgeModel.load(tmp_path / "own"), [known, stranger])
    (plain,) = predict(model, [known])
    intercept = np.mean([ridge.intercept for ridge in model.ridges.values()])
    assert own.brain_age - plain.brain_age == pytest.approx((100 - intercept) / 2, abs=1e-3)
    assert other.brain_age == pytest.approx(plain.brain_age)
    widths = [row.brain_age_high - row.brain_age_low for row in (own, other)]
    assert widths[1] == pytest.approx(9 / 5 * widths[0])
    assert "site North: in training, so the ridge of its own counts; --no-own-ridges if" in caplog.text


def typed(options, preset="small-ermoe"):
    """The recipe of a command line."""
    return parse_command(Train, [preset, "data", *options.split()], prog="ermoe brain train").chosen()


def test_the_grid_is_a_matter_of_options():
    chosen = typed("--spacing-mm 3 --patch-size 8 --normalisation mean --probe-epochs 2 4")
    assert chosen.preprocessing == Preprocessing(3.0, (64, 80, 64), "mean")  # 192 × 224 × 192 mm in whole cubes
    assert chosen.probe_epochs == (2, 4)
    assert build(chosen, age_head(chosen, [50.0])).pos_embed.shape[1:4] == (8, 10, 8)
    assert typed("") == recipe("small", "ermoe")
    assert typed("", "tiny-sfcn") == recipe("tiny", "sfcn")
    assert typed("--spacing-mm 3 --shape 96 112 96").preprocessing.shape == (96, 112, 96)
    for wrong in (6, 0, -8):
        with pytest.raises(UserError, match="blocks of 4 voxels must fill a cube"):
            typed(f"--patch-size {wrong}")


def test_volumes_are_augmented_if_asked_for():
    assert typed("").augmentation is None
    asked = typed("--augment yes --flip")
    assert (asked.augmentation, asked.variants) == (VolumeAugmentation(flip=True), 8)
    assert typed("--augment no", "paper-ermoe").augmentation is None
    with pytest.raises(UserError, match="add --augment yes"):
        typed("--flip")


def test_whole_scans_can_follow_a_warm_start_gently(cohort_root, cache, tmp_path):
    options = {"cache": cache, "console": QUIET, "check": False, "epochs": 1, "rate_after_warm_start": 0.5}
    train(cohort_root, tmp_path, preset="tiny", folds=2, **options)
    fold = tmp_path / "folds" / "fold-0"
    settings = [json.loads((stage / "config.json").read_text())["training"] for stage in (fold / "warm-start", fold)]
    assert [stage["base_lr"] for stage in settings] == pytest.approx([0.1, 0.05])


@pytest.mark.parametrize("head", ["bins-l1", "regression"])
@pytest.mark.parametrize("split", ["holdout", "leave-site-out"])
def test_other_heads_and_splits(head, split, cohort_root, cache, tmp_path):
    model = train(
        cohort_root, tmp_path, preset="tiny", head=head, split=split, cache=cache, console=QUIET, check=False,
        epochs=1, warm_start_epochs=0, input="t1", calibration_fit="train", learns="age",
    )  # fmt: skip
    evaluation = Evaluation.read(tmp_path, cache=cache)
    assert np.isfinite(held_out(evaluation.outputs).raw_N).all()
    assert (model.intervals(torch.zeros(1, 1, model.head.num_outputs)) is None) == (head == "regression")
    if split == "holdout":
        assert (tmp_path / "folds" / model.facts["split"]).exists() or len(model.networks) == 1


def test_what_phantoms_taught_is_kept(cache):
    chosen = recipe("tiny", "ermoe")
    head = age_head(chosen, [40.0, 80.0])
    place = (Archive(cache), Compute(console=QUIET))
    first = learn_phantoms(chosen, head, *place)
    made = sorted((cache / "pretrained").iterdir())
    second = learn_phantoms(chosen, head, *place)
    assert sorted((cache / "pretrained").iterdir()) == made
    fresh = build(chosen, head).state_dict()
    assert all(torch.equal(value, second.state_dict()[name]) for name, value in first.state_dict().items())
    assert any(not torch.equal(value, fresh[name]) for name, value in first.state_dict().items())


def test_a_model_can_start_from_another_that_does_not_know_its_test_people(finished, cohort_root, cache, tmp_path):
    options = {"preset": "tiny", "init": str(finished), "cache": cache, "console": QUIET, "check": False, "epochs": 1}
    model = train(cohort_root, tmp_path / "same", folds=3, **options)
    assert len(model.networks) == 3
    with pytest.raises(UserError, match="has learnt from people who are to be held out"):
        train(cohort_root, tmp_path / "other", folds=3, fold_seed=1, **options)
    others = synthesize(tmp_path / "bids", 6, seed=5, spacing_mm=6.0)
    for path in sorted(others.rglob("*sub-*"), key=lambda path: -len(path.parts)):
        path.rename(path.with_name(path.name.replace("sub-", "sub-other")))
    table = others / "participants.tsv"
    table.write_text(table.read_text().replace("sub-", "sub-other"))
    later = train(others, tmp_path / "later", folds=2, **options)
    known = open_cohort(cohort_root).scans[0].participant_id
    assert later.parts_of(known)
    assert later.fold_without(["sub-nobody"]) == "fold-0"


def test_a_run_folder_is_for_one_set_of_people_and_ages(finished, cohort_root, cache, tmp_path):
    run, data = (shutil.copytree(source, tmp_path / source.name) for source in (finished, cohort_root))
    table = data / "participants.tsv"
    header, first, *rest = table.read_text().splitlines()
    name, _age, *others = first.split("\t")
    table.write_text("\n".join([header, "\t".join([name, "33.0", *others]), *rest]) + "\n")
    with pytest.raises(UserError, match="scans_and_ages"):
        train(data, run, preset="tiny", folds=3, cache=cache, console=QUIET)
    config = json.loads((run / "config.json").read_text())
    config["data"]["path"] = str(data)
    (run / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="have changed since"):
        Evaluation.read(run)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["predict", "nowhere", "scan.nii.gz"], "holds no brain-age model"),
        (["report", "nowhere"], "is no run folder"),
        (["train", "tiny-ermoe", "nowhere"], "does not exist"),
    ],
)
def test_mistakes_end_with_one_sentence(arguments, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["brain", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_run_that_has_no_model_yet_is_not_finished(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="holds no brain-age model: name a run of `ermoe brain train` that is finished"):
        BrainAgeModel.load(tmp_path)


def test_prediction_waits_for_no_library_it_does_not_use(finished, cohort_root, cache):
    """Each of them takes seconds to import: as long as the whole of one prediction may take."""
    heavy = {"timm", "torchvision", "torch._dynamo", "monai", "matplotlib", "nilearn", "sklearn", "pandas"}
    given = ["brain", "predict", str(finished), str(open_cohort(cohort_root).scans[0].t1), "--cache", str(cache)]
    code = f"import sys\nfrom ermoe.cli.main import main\nmain({given})\nprint('heavy:', *({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "heavy:"


def test_help_needs_no_torch():
    code = "import sys\nfrom ermoe.brain.commands import COMMANDS\nassert 'torch' not in sys.modules\nprint(*COMMANDS)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {"check", "presets", "train", "report", "evaluate", "predict", "app"} < set(done.stdout.split())
