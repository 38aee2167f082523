"""A study is a queue that repeats nothing, mixes nothing, and compares step times that were taken in turns."""

import json
import shlex
from pathlib import Path

import pytest
import torch

from ermoe.cli.image import run
from ermoe.errors import UserError
from ermoe.studies.bench import study_steps
from ermoe.studies.bench.clock import Measurement
from ermoe.studies.bench.study import Study, run_queue, table
from ermoe.studies.bench.study_steps import steps_of

PRESETS = ["digits-dense", "digits-v-moe"]


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """A finished one of an epoch."""
    torch.set_num_threads(1)
    asked = Study(PRESETS, Path("digits"), [1], tmp_path_factory.mktemp("study"), threads=1, epochs=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study_steps, "_ROUNDS", 3)
        run(shlex.split(asked.command)[2:])
    return asked


@pytest.fixture(autouse=True)
def _few_rounds(monkeypatch):
    monkeypatch.setattr(study_steps, "_ROUNDS", 3)


def _stored(study, name):
    return json.loads((study.out / name).read_text())


def test_a_run_leaves_what_is_needed_to_trust_and_repeat_it(study):
    record = _stored(study, "digits-v-moe-1.json")
    assert {"load_cv2", "weight_cv2", "top1"} <= record["figures"].keys()
    assert {"commit", "machine", "versions", "config", "threads", "changes"} <= record.keys()
    options = f"--data digits --seeds 1 --epochs 1 --threads 1 --out {study.out}"
    assert record["command"] == f"ermoe image study digits-v-moe {options}"


def test_steps_are_timed_in_turns_and_recorded(study):
    record = _stored(study, "steps.json")
    assert {"command", "commit", "machine", "versions"} <= record.keys()
    assert record["settings"] == {"data": "digits", "threads": 1, "rounds": 3}
    assert record["steps"].keys() == set(PRESETS)
    assert record["steps"]["digits-dense"]["ratio"] == 1
    assert record["steps"]["digits-v-moe"]["ratio"] > 0


def test_a_study_repeats_nothing_and_its_table_says_what_the_files_say(study, capsys):
    record, steps = _stored(study, "digits-v-moe-1.json"), _stored(study, "steps.json")
    record["figures"]["top1"] = 0.123456
    record["figures"]["seconds_per_step"] = 99.0  # what earlier versions recorded
    steps["steps"]["digits-v-moe"] |= {"ratio": 4.5, "ratio_low": 4.25, "ratio_high": 4.75}
    (study.out / "digits-v-moe-1.json").write_text(json.dumps(record))
    (study.out / "steps.json").write_text(json.dumps(steps))
    run(shlex.split(study.command)[2:])
    written = (study.out / "table.md").read_text()
    assert "12.35%" in written
    assert "4.50 (4.25–4.75) |" in written
    assert "1.00 (1.00–1.00) |" in written
    assert written in capsys.readouterr().out


def test_records_of_other_settings_are_refused(study):
    def asked(data="digits", epochs=1):
        return Study(PRESETS, Path(data), [1], study.out, threads=1, epochs=epochs)

    with pytest.raises(UserError, match=r"training\.epochs: 1 there, 3 asked for"):
        run_queue(asked(epochs=3))
    with pytest.raises(UserError, match=r"training\.epochs: 1 there, 20 asked for"):
        run_queue(asked(epochs=None))
    with pytest.raises(UserError, match="data set: digits there, elsewhere asked for"):
        run_queue(asked(data="elsewhere"))
    assert len(run_queue(asked(data="/moved/to/digits"))) == 2


def test_records_may_be_older_than_a_setting(study):
    record = _stored(study, "digits-dense-1.json")
    del record["config"]["training"]["keep_every"], record["config"]["augmentation"]["cutmix"]
    (study.out / "digits-dense-1.json").write_text(json.dumps(record))
    assert run_queue(study)[0]["figures"] == record["figures"]


def test_steps_are_timed_again_for_other_presets_data_or_threads(study, monkeypatch):
    timed = []

    def measure(asked, dense, presets):
        timed.append((dense, presets))
        return [Measurement(preset, 1.0, 1.0, 1.0, 1.0) for preset in presets]

    monkeypatch.setattr(study_steps, "_measure", measure)

    def steps(presets, threads=1):
        return list(steps_of(Study(presets, Path("digits"), [1], study.out, threads=threads)))

    assert steps(PRESETS) == PRESETS
    assert steps(["digits-v-moe"]) == []  # beside nothing dense
    assert timed == []
    assert steps(PRESETS, threads=2) == PRESETS
    assert steps([*PRESETS, "digits-gate"], threads=2) == [*PRESETS, "digits-gate"]
    assert timed == [("digits-dense", PRESETS), ("digits-dense", [*PRESETS, "digits-gate"])]


def test_the_table_of_a_study_without_step_times():
    records = [{"preset": "a", "seed": s, "figures": {"top1": v}} for s, v in ((1, 0.5), (2, 0.6))]
    assert "| a | 2 | 55.00% ± 7.07% |" in table(records)
    assert "step / dense" not in table(records, {})
