"""`ermoe image` from training to prediction, on the digits that come with scikit-learn."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.stats import t as student

import ermoe
from ermoe.bench.study import table
from ermoe.cli.image import run
from ermoe.data.catalogue import open_images
from ermoe.data.loader import Loader
from ermoe.errors import UserError
from ermoe.models.baselines.image_level import STYLES
from ermoe.tasks.image.classification import evaluate, transform_for
from ermoe.tasks.image.presets import PRESETS, recipe
from ermoe.tasks.image.probe import Features, Probe, draw_shots, probe
from ermoe.tasks.image.run import model_folder, train
from ermoe.train.progress import Log


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished run of a few epochs."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("image") / "run"
    run(["train", "digits-ermoe", "digits", "--run", str(folder), "--epochs", "4", "--device", "cpu"])
    return folder


def test_train_writes_a_model_with_its_classes(trained):
    assert json.loads((trained / "classes.json").read_text()) == [str(i) for i in range(10)]
    assert json.loads((trained / "config.json").read_text())["preset"] == "digits-ermoe"


def test_eval_repeats_the_last_figures_of_the_run(trained, capsys, tmp_path):
    run(["eval", str(trained), "digits", "--report", str(tmp_path / "routing.html")])
    last = json.loads((trained / "metrics.jsonl").read_text().splitlines()[-1])
    out = capsys.readouterr().out
    assert f"top1 {last['top1']:.4g}" in out
    assert "blocks.1.mlp" in out
    assert (tmp_path / "routing.html").stat().st_size > 1000


def test_probe_gives_both_readings_with_intervals_and_lists_the_images(trained, tmp_path, capsys):
    run(["probe", str(trained), "digits", "--shots", "2", "5", "--out", str(tmp_path)])
    record = json.loads((tmp_path / "probe.json").read_text())
    assert [(p["reading"], p["shots"]) for p in record["probes"]] == [
        ("images", 2), ("images", 5), ("epochs", 2), ("epochs", 5),
    ]  # fmt: skip
    for entry in record["probes"]:
        assert len(entry["accuracies"]) == 5
        assert entry["half_width_95"] >= 0
    few = record["probes"][1]
    assert [len(drawn) for drawn in few["drawn"]] == [50] * 5
    assert few["drawn"][0] != few["drawn"][1]
    assert few["mean"] > 0.2
    assert "95 %" in capsys.readouterr().out


def test_predict_names_classes(trained, tmp_path, capsys):
    image = open_images("digits", "test").image_NCHW[0, 0].numpy()
    path = tmp_path / "digit.png"
    Image.fromarray(image).resize((32, 32)).save(path)
    run(["predict", str(trained), str(path), "--top", "3"])
    out = capsys.readouterr().out.replace("\n", " ")
    assert "digit.png:" in out
    assert out.count("%") == 3


def test_check_reports(capsys):
    run(["check", "digits"])
    assert "0 unreadable" in capsys.readouterr().out


def test_a_study_is_a_queue_that_repeats_nothing(tmp_path, capsys):
    command = ["study", "digits-dense", "digits-v-moe", "--data", "digits", "--seeds", "1", "--epochs", "2"]
    command += ["--out", str(tmp_path), "--threads", "1"]
    run(command)
    path = tmp_path / "digits-v-moe-1.json"
    record = json.loads(path.read_text())
    assert {"load_cv2", "weight_cv2", "top1", "seconds_per_step"} <= record["figures"].keys()
    assert {"commit", "machine", "versions", "command", "config"} <= record.keys()
    record["figures"]["top1"] = 0.123456
    path.write_text(json.dumps(record))
    run(command)
    assert "12.35%" in capsys.readouterr().out


def test_mistakes_are_named(trained, tmp_path):
    with pytest.raises(UserError, match="there is no preset"):
        run(["train", "nothing", "digits", "--run", str(tmp_path)])
    with pytest.raises(UserError, match="does not exist"):
        run(["train", "digits-ermoe", str(tmp_path / "nowhere"), "--run", str(tmp_path / "run")])
    with pytest.raises(UserError, match="another configuration"):
        run(["train", "digits-ermoe", "digits", "--run", str(trained), "--epochs", "5", "--device", "cpu"])
    with pytest.raises(UserError, match="cannot be read"):
        run(["predict", str(trained), str(tmp_path / "nothing.png")])


def test_every_preset_says_what_it_is():
    for name in PRESETS:
        chosen = recipe(name)
        assert chosen.training.epochs > 0
        assert chosen.architecture.startswith("vit_") or chosen.architecture in STYLES
    for method in ("ermoe", "ermoe-mean", "ermoe-none", "v-moe", "gate", "gate-loss-free", "soft", "expert-choice"):
        recipe(f"digits-{method}").build(10)(torch.randn(2, 3, 8, 8))


def test_intervals_are_those_of_student():
    result = Probe("images", 5, [0.5, 0.6, 0.7, 0.6, 0.6], [])
    expected = student.interval(0.95, 4, loc=0.6, scale=np.std(result.accuracies, ddof=1) / np.sqrt(5))
    assert (result.mean - result.half_width, result.mean + result.half_width) == pytest.approx(expected)


def test_draws_take_the_same_number_of_every_class():
    label = torch.arange(40) % 4
    drawn = [draw_shots(label, 3, 4, seed=0, draw=d) for d in range(3)]
    assert all(torch.bincount(label[index]).tolist() == [3] * 4 for index in drawn)
    assert len({tuple(index) for index in drawn}) == 3
    with pytest.raises(UserError, match="only 10 training images"):
        draw_shots(label, 11, 4, seed=0, draw=0)


def test_separable_features_are_separated_in_both_readings():
    images = open_images("digits")
    centre = torch.randn(10, 64, generator=torch.Generator().manual_seed(0))
    label, test_label = images.label_N, open_images("digits", "test").label_N
    given = Features(centre[label], label, centre[test_label], test_label)
    for reading in ("images", "epochs"):
        assert probe(given, images, reading=reading, shots=5).mean > 0.95
    with pytest.raises(UserError, match="at least 5"):
        probe(given, images, reading="images", shots=5, draws=2)
    with pytest.raises(UserError, match="use one of"):
        probe(given, images, reading="minutes", shots=5)


def test_the_table_of_a_study():
    records = [{"preset": "a", "seed": s, "figures": {"top1": v}} for s, v in ((1, 0.5), (2, 0.6))]
    assert "| a | 2 | 55.00% ± 7.07% |" in table(records)


def test_a_model_starts_from_weights_with_another_classifier(tmp_path, caplog):
    chosen = recipe("digits-ermoe")
    dense = recipe("digits-dense").build(7)
    torch.save(dense.state_dict(), tmp_path / "dense.pth")
    model = chosen.build(10, weights=str(tmp_path / "dense.pth"))
    assert torch.equal(model.patch_embed.proj.weight, dense.patch_embed.proj.weight)
    assert "starts afresh" in caplog.text
    state = {name: value for name, value in dense.state_dict().items() if "qkv" not in name}
    torch.save(state, tmp_path / "other.pth")
    with pytest.raises(UserError, match="weights of another model"):
        chosen.build(10, weights=str(tmp_path / "other.pth"))


def _interrupt_after(last_step):
    def step(log, now):
        if now > last_step:
            raise KeyboardInterrupt

    return step


@pytest.mark.parametrize("style", ["single-gated", "deep-moe"])
def test_image_level_rivals_train_in_two_stages_and_resume(style, tmp_path, monkeypatch):
    torch.set_num_threads(1)
    changes = {"epochs": 2, "batch_size": 256, "base_lr": 1e-3}  # 4 steps an epoch
    few_experts = {"num_experts": 2} if style == "single-gated" else {}
    chosen = recipe(f"digits-{style}")
    chosen = replace(chosen, model_args=chosen.model_args | few_experts)
    whole = train(chosen, "digits", tmp_path / "whole", **changes)
    monkeypatch.setattr(Log, "step", _interrupt_after(6))
    with pytest.raises(KeyboardInterrupt):
        train(chosen, "digits", tmp_path / "cut", save_every=2, **changes)
    monkeypatch.undo()
    assert train(chosen, "digits", tmp_path / "cut", save_every=2, **changes) == whole
    model = ermoe.load(model_folder(tmp_path / "whole")).eval()
    images = open_images("digits", "test")
    figures = evaluate(model, Loader(images, transform_for(model)))
    assert figures["top1"] == pytest.approx(whole["top1"])
    model.reset_classifier(0)
    assert model(torch.zeros(2, 3, 16, 16)).shape == (2, 512)
