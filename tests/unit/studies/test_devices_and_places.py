"""Studies run where they were asked to, and name their files as they are."""

from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

from ermoe.data.images import open_images
from ermoe.studies import comparison
from ermoe.studies.bench import layer, result
from ermoe.studies.bench_command import Bench
from ermoe.studies.image_command import Comparison
from ermoe.studies.paper.setup import Setup
from ermoe.studies.paper.study import Findings, Study, run
from ermoe.studies.record import Job, new_record, run_queue


def test_steps_are_timed_on_the_device(monkeypatch):
    def see(model, batches):
        image, label = next(batches)
        return {next(model.parameters()).device.type, image.device.type, label.device.type}

    monkeypatch.setattr(comparison, "training_step_of", see)
    monkeypatch.setattr(comparison, "_NUM_BATCHES", 1)
    assert comparison._step("digits-dense", open_images("digits", "train"), torch.device("meta")) == {"meta"}


def test_steps_of_another_device_do_not_count_and_old_ones_are_of_the_cpu(tmp_path, monkeypatch):
    timed = {"seconds": 1.0, "ratio": 1.0, "ratio_low": 1.0, "ratio_high": 1.0}
    figures = {name: {"name": name, **timed} for name in ("digits-dense",)}
    settings = {"data": "digits", "threads": 1, "rounds": comparison._ROUNDS}
    old = new_record("image study", comparison.STEPS, settings=settings, figures=figures)
    comparison.add_records(tmp_path / comparison.RECORDS, old)
    measured = []
    monkeypatch.setattr(comparison, "_measure", lambda asked, dense, own: measured.append(asked.device) or [])
    asked = Comparison(("digits-dense", "digits"), (1,), tmp_path, threads=1, device="cpu")
    assert comparison.step_times(asked)["digits-dense"].ratio == 1.0
    assert measured == []
    monkeypatch.setattr(comparison, "device_named", torch.device)
    monkeypatch.setattr(comparison, "_measure", lambda asked, dense, own: [comparison.Measurement(dense, 1, 2, 1, 3)])
    assert comparison.step_times(replace(asked, device="cuda"))["digits-dense"].ratio == 2
    assert comparison.read_records(tmp_path / comparison.RECORDS)[-1]["settings"]["device"] == "cuda"


def test_brackets_in_names_are_shown(tmp_path, capsys, monkeypatch):
    setup = Setup(out=tmp_path / "[old]", work=tmp_path, seeds=(1,), console=Console(width=1000))
    found = Findings(["row"], [["x"]], ["See [old]."])
    run(Study("thing", "a [title]", "there", lambda setup: "[here]", lambda setup: [], lambda runs: found), setup)
    shown = capsys.readouterr().out
    assert "thing: a [title]\n" in shown
    assert "Here (mini): [here]\n" in shown
    assert "• See [old].\n" in shown
    assert f"written: {tmp_path}/[old]/" in shown
    run_queue("x", [Job("[a]", 1, dict)], tmp_path / "records.jsonl", console=Console())
    assert capsys.readouterr().out == "run 1 of 1: [a], seed 1\n"
    monkeypatch.setattr(layer, "routing", lambda *given, **options: None)
    monkeypatch.setattr(result, "show", lambda *given: None)
    monkeypatch.setattr(result, "save", lambda made, out: out / "bench.jsonl")
    Bench("routing", out=Path("[old]"))(Console())
    assert capsys.readouterr().out == "written: [old]/bench.jsonl\n"
