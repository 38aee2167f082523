"""A study is a queue that repeats nothing, mixes nothing, and compares step times that were taken in turns."""

import json
from dataclasses import replace

import pytest
import torch

from ermoe.cli import main as cli
from ermoe.errors import UserError
from ermoe.studies import comparison as steps_module
from ermoe.studies.bench.measure import Measurement
from ermoe.studies.comparison import run_comparison, step_times, table
from ermoe.studies.image_command import Comparison
from ermoe.studies.record import RECORDS, read_records

PRESETS = ("digits-dense", "digits-v-moe")


def run(words):
    """`ermoe image` with these words; mistakes are raised."""
    cli.run(["image", *words])


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """A finished one of an epoch."""
    torch.set_num_threads(1)
    asked = Comparison((*PRESETS, "digits"), (1,), tmp_path_factory.mktemp("study"), threads=1, epochs=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps_module, "_ROUNDS", 3)
        patch.setattr("sys.argv", ["ermoe", "image", *words(asked)])
        run(words(asked))
    return asked


def words(asked):
    """What to type for it."""
    options = ["--seeds", *asked.seeds, "--epochs", asked.epochs, "--threads", asked.threads]
    return ["study", *asked.presets_and_data, *map(str, options), "--out", str(asked.out)]


@pytest.fixture(autouse=True)
def _few_rounds(monkeypatch):
    monkeypatch.setattr(steps_module, "_ROUNDS", 3)


def stored(study, name):
    (record,) = [record for record in read_records(study.out / RECORDS) if record["name"] == name]
    return record


def changed(study, change, folder):
    """The study in another folder, after a change of its lines."""
    lines = [json.loads(line) for line in (study.out / RECORDS).read_text().splitlines()]
    for line in lines:
        change(line)
    (folder / RECORDS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return replace(study, out=folder)


def test_a_run_leaves_what_is_needed_to_trust_and_repeat_it(study):
    record = stored(study, "digits-v-moe")
    assert {"load_cv2", "weight_cv2", "top1"} <= record["figures"].keys()
    assert record["settings"]["training"]["epochs"] == 1
    assert record["seconds"] > 0
    assert {"commit", "machine", "versions", "threads"} <= record["environment"].keys()
    options = f"digits --seeds 1 --epochs 1 --threads 1 --out {study.out}"
    assert record["environment"]["command"] == f"ermoe image study digits-dense digits-v-moe {options}"


def test_steps_are_timed_in_turns_and_recorded(study):
    record = stored(study, "steps")
    assert {"command", "commit", "machine", "versions"} <= record["environment"].keys()
    assert record["settings"] == {"data": "digits", "threads": 1, "rounds": 3, "device": "cpu"}
    assert record["figures"].keys() == set(PRESETS)
    assert record["figures"]["digits-dense"]["ratio"] == 1
    assert record["figures"]["digits-v-moe"]["ratio"] > 0


def test_a_study_repeats_nothing_and_its_table_says_what_the_records_say(study, capsys, tmp_path):
    def change(line):
        if line.get("name") == "digits-v-moe":
            line["figures"] |= {"top1": 0.123456, "seconds_per_step": 99.0}  # what earlier versions recorded
        elif line.get("name") == "steps":
            line["figures"]["digits-v-moe"] |= {"ratio": 4.5, "ratio_low": 4.25, "ratio_high": 4.75}

    again = changed(study, change, tmp_path)
    run(words(again))
    written = (again.out / "table.md").read_text()
    assert "12.35%" in written
    assert "4.50 (4.25–4.75) |" in written
    assert "1.00 (1.00–1.00) |" in written
    assert written in capsys.readouterr().out


def test_records_of_other_settings_are_refused(study):
    with pytest.raises(UserError, match=r"digits-dense, seed 1.*training\.epochs: 1 there, 3 asked for"):
        run_comparison(replace(study, epochs=3))
    with pytest.raises(UserError, match=r"training\.epochs: 1 there, 20 asked for"):
        run_comparison(replace(study, epochs=None))
    with pytest.raises(UserError, match="data: digits there, elsewhere asked for"):
        run_comparison(replace(study, presets_and_data=(*PRESETS, "elsewhere")))
    assert len(run_comparison(replace(study, presets_and_data=(*PRESETS, "/moved/to/digits")))) == 2


def test_records_may_be_older_than_a_setting(study, tmp_path):
    def change(line):
        if line.get("name") == "digits-dense":
            del line["settings"]["training"]["keep_every"], line["settings"]["augmentation"]["cutmix"]

    older = changed(study, change, tmp_path)
    assert run_comparison(older)[0]["figures"] == stored(study, "digits-dense")["figures"]


def test_what_an_earlier_version_left_counts_as_done(study, tmp_path):
    for name in PRESETS:
        record = stored(study, name)
        old = {"preset": name, "seed": 1, "changes": {"epochs": 1}, "figures": record["figures"], "wall_seconds": 4.0}
        old |= {**record["environment"], "config": {**record["settings"], "preset": name, "num_classes": 10}}
        (tmp_path / f"{name}-1.json").write_text(json.dumps(old))
    steps = stored(study, "steps")
    old = {**steps["environment"], "settings": steps["settings"], "steps": steps["figures"]}
    (tmp_path / "steps.json").write_text(json.dumps(old))
    earlier = replace(study, out=tmp_path)
    assert [record["figures"] for record in run_comparison(earlier)] == [stored(study, p)["figures"] for p in PRESETS]
    assert step_times(earlier) == step_times(study)
    assert stored(earlier, "digits-dense")["seconds"] == 4.0
    with pytest.raises(UserError, match=r"training\.epochs: 1 there, 3 asked for"):
        run_comparison(replace(earlier, epochs=3))


def test_steps_are_timed_again_for_other_presets_data_or_threads(study, monkeypatch):
    timed = []

    def measure(asked, dense, presets):
        timed.append((dense, tuple(presets)))
        return [Measurement(preset, 1.0, 1.0, 1.0, 1.0) for preset in presets]

    monkeypatch.setattr(steps_module, "_measure", measure)

    def steps(presets, threads=1):
        return tuple(step_times(replace(study, presets_and_data=(*presets, "digits"), threads=threads)))

    assert steps(PRESETS) == PRESETS
    assert steps(("digits-v-moe",)) == ()  # beside nothing dense
    assert timed == []
    assert steps(PRESETS, threads=2) == PRESETS
    assert steps((*PRESETS, "digits-gate"), threads=2) == (*PRESETS, "digits-gate")
    assert timed == [("digits-dense", PRESETS), ("digits-dense", (*PRESETS, "digits-gate"))]


def test_the_table_of_a_study_without_step_times():
    records = [{"name": "a", "seed": s, "figures": {"top1": v}} for s, v in ((1, 0.5), (2, 0.6))]
    assert "| a | 2 | 55.00% ± 7.07% |" in table(records).markdown()
    assert "step / dense" not in table(records, {}).markdown()
