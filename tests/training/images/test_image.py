"""`ermoe image` from training to prediction, on the digits that come with scikit-learn."""

import json
import re
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from PIL import Image
from scipy.stats import t as student

import ermoe
from ermoe.cli import main as cli
from ermoe.cli.main import main
from ermoe.console import parse_command
from ermoe.data.images import open_images
from ermoe.errors import UserError
from ermoe.images.commands import Train
from ermoe.images.predicting import class_names, predict
from ermoe.images.presets import PRESETS, recipe
from ermoe.images.probe import Features, Probe, draw_shots, extract, probe, record_path
from ermoe.images.rivals.image_level import STYLES
from ermoe.images.run import evaluate, train, transform_for
from ermoe.train.compute import Processes
from ermoe.train.loader import Loader
from ermoe.train.run_folder import Log, model_folder

DOCS = Path(__file__).parents[3] / "docs"


def run(words):
    """`ermoe image` with these words; mistakes are raised."""
    cli.run(["image", *words])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished run of a few epochs."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("image") / "run"
    run(["train", "digits-ermoe", "digits", "--out", str(folder), "--epochs", "2", "--device", "cpu"])
    return folder


@pytest.fixture(scope="module")
def photo(tmp_path_factory):
    """A digit in a file."""
    path = tmp_path_factory.mktemp("photo") / "digit.png"
    Image.fromarray(open_images("digits", "test").image_NCHW[0, 0].numpy()).resize((32, 32)).save(path)
    return str(path)


def _class_folders(root, classes):
    for split, shade in (("train", 10), ("val", 200)):
        for number, name in enumerate(classes):
            (root / split / name).mkdir(parents=True)
            Image.new("RGB", (8, 8), (shade, 20 * number, 0)).save(root / split / name / "one.png")
    return root


def test_train_writes_a_model_with_its_classes(trained):
    assert json.loads((trained / "classes.json").read_text()) == [str(i) for i in range(10)]
    assert json.loads((trained / "config.json").read_text())["preset"] == "digits-ermoe"


def test_prediction_waits_for_no_library_it_does_not_use(trained, photo):
    """timm itself, which the model is made of, brings what torch compiles with."""
    heavy = {"monai", "matplotlib", "nilearn", "nibabel", "sklearn", "scipy", "pandas", "transformers", "onnx"}
    given = ["image", "predict", str(trained), str(photo)]
    code = f"import sys\nfrom ermoe.cli.main import main\nmain({given})\nprint('heavy:', *({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "heavy:"


def test_eval_repeats_the_last_figures_of_the_run(trained, capsys, tmp_path):
    run(["evaluate", str(trained), "digits", "--report", str(tmp_path / "routing.html")])
    last = json.loads((trained / "metrics.jsonl").read_text().splitlines()[-1])
    out = capsys.readouterr().out
    assert f"top1 {last['top1']:.4g}" in out
    assert "blocks.1.mlp" in out
    assert (tmp_path / "routing.html").stat().st_size > 1000


def test_eval_refuses_as_many_other_classes(trained, tmp_path):
    data = _class_folders(tmp_path, "abcdefghij")
    with pytest.raises(UserError, match=r"knows the class '0' where .* has 'a'"):
        run(["evaluate", str(trained), str(data)])


def test_eval_says_that_a_dense_model_has_no_routing_to_report(tmp_path, capsys):
    ermoe.save(recipe("digits-dense").build(10), tmp_path / "model")
    run(["evaluate", str(tmp_path / "model"), "digits", "--report", str(tmp_path / "routing.html")])
    assert "is dense: there is no routing to report" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize("command", ["evaluate", "probe", "predict"])
def test_a_device_can_be_asked_for(command, trained, capsys):
    assert main(["image", command, str(trained), "digits", "--device", "cuda"]) == 2
    assert "torch sees no such device here" in capsys.readouterr().err


def test_probe_gives_both_readings_with_intervals_and_lists_the_images(trained, capsys):
    run(["probe", str(trained), "digits", "--shots", "2", "5"])
    record = json.loads((trained / "probe-digits.json").read_text())
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


def test_a_probe_is_written_where_that_is_possible(tmp_path, monkeypatch):
    model = tmp_path / "model"
    model.mkdir()
    monkeypatch.chdir(tmp_path)
    assert record_path("model", "data/cifar/") == Path("model/probe-cifar.json")
    assert record_path("model", "digits", Path("out")) == Path("out/probe-digits.json")
    assert record_path("owner/name", "digits") == Path("runs/probe/owner--name/probe-digits.json")
    monkeypatch.setattr("ermoe.images.probe._can_write_into", lambda folder: folder.resolve() != model)
    assert record_path("model", "digits") == tmp_path / "model-probe-digits.json"


def test_a_probe_that_cannot_be_written_is_refused_before_it_is_computed(trained, photo, monkeypatch):
    monkeypatch.setattr("ermoe.images.probe.features", pytest.fail)
    with pytest.raises(UserError, match="cannot be written"):
        run(["probe", str(trained), "digits", "--out", photo])


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["probe", "RUN", "digits", "--shots", "5", "0"], "shots=0: need at least 1"),
        (["probe", "RUN", "digits", "--shots", "-3"], "shots=-3: need at least 1"),
        (["predict", "RUN", "PHOTO", "--top", "0"], "top=0: need at least 1"),
        (["predict", "RUN", "PHOTO", "--top", "-1"], "top=-1: need at least 1"),
    ],
)
def test_numbers_below_one_are_refused(command, message, trained, photo, capsys):
    names = {"RUN": str(trained), "PHOTO": photo}
    assert main(["image", *(names.get(word, word) for word in command)]) == 2
    assert capsys.readouterr().err == f"ermoe: {message}\n"


def test_predict_names_classes(trained, photo, capsys):
    run(["predict", str(trained), photo, "--top", "3"])
    out = capsys.readouterr().out.replace("\n", " ")
    assert "digit.png:" in out
    assert out.count("%") == 3


def test_predict_leaves_out_what_it_cannot_read_and_says_so_at_the_end(trained, photo, tmp_path, capsys):
    empty, nothing = tmp_path / "empty.png", tmp_path / "nothing.png"
    empty.touch()
    assert main(["image", "predict", str(trained), str(nothing), photo, str(empty), photo]) == 2
    shown = capsys.readouterr()
    assert shown.out.count("digit.png:") == 2
    assert shown.err.startswith("ermoe: 2 of 4 images are left out: ")
    assert shown.err.count("\n") == 1
    assert all(str(path) in shown.err for path in (empty, nothing))


def test_predictions_keep_their_places_over_batches(trained, photo):
    model = ermoe.load(model_folder(trained))
    paths = [photo, "nothing.png"] * 10
    predictions = predict(model, paths, class_names(trained, 10))
    assert [prediction.image for prediction in predictions] == paths
    assert [prediction.problem is None for prediction in predictions] == [True, False] * 10


def test_models_in_double_precision_predict_and_are_probed(trained, photo):
    model = ermoe.load(model_folder(trained))
    images = open_images("digits", "test")
    (single,), feature_ND = predict(model, [photo], class_names(trained, 10)), extract(model, images)
    model.double()
    (double,) = predict(model, [photo], class_names(trained, 10))
    assert double.classes == single.classes
    assert double.probabilities == pytest.approx(single.probabilities, abs=1e-4)
    torch.testing.assert_close(extract(model, images), feature_ND, rtol=1e-3, atol=1e-3)


def test_check_reports(capsys):
    run(["check", "digits", "--counts"])
    out = capsys.readouterr().out
    assert "0 unreadable" in out
    assert "test 0: 59" in out


def test_check_of_a_broken_set_exits_with_1(tmp_path):
    data = _class_folders(tmp_path, "ab")
    (data / "train" / "a" / "two.png").write_bytes(b"no image")
    with pytest.raises(SystemExit) as stop:
        main(["image", "check", str(data)])
    assert stop.value.code == 1
    with pytest.raises(UserError, match="unreadable or in both splits"):
        run(["train", "digits-dense", str(data), "--out", str(tmp_path / "run"), "--check", "--device", "cpu"])
    assert not (tmp_path / "run").exists()


def test_only_the_main_process_checks(monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr("ermoe.images.check.check", pytest.fail)
    monkeypatch.setattr("torch.distributed.new_group", lambda **options: seen.append("group"))
    monkeypatch.setattr("torch.distributed.broadcast", lambda tensor, source, group: seen.append("verdict"))
    monkeypatch.setattr("ermoe.images.run.train", lambda *given, **options: seen.append("train"))
    second = Processes(rank=1, num=2)
    monkeypatch.setattr("ermoe.train.compute.processes", lambda device: nullcontext(second))
    run(["train", "digits-dense", "digits", "--out", str(tmp_path), "--check"])
    assert seen == ["group", "verdict", "train"]


def test_deterministic_is_a_flag():
    for flag in (True, False):
        argv = ["digits-dense", "digits", *(["--deterministic"] if flag else [])]
        assert parse_command(Train, argv, prog="ermoe image train").recipe.training.deterministic is flag


def test_options_are_the_presets_until_they_are_changed():
    command = parse_command(Train, ["--epochs", "3", "digits-v-moe", "digits", "--crop", "pad"], prog="train")
    chosen = recipe("digits-v-moe")
    assert command.recipe == replace(
        chosen, training=replace(chosen.training, epochs=3), augmentation=replace(chosen.augmentation, crop="pad")
    )


def test_weights_that_cannot_be_fetched(monkeypatch):
    def offline(*names, **options):
        raise LocalEntryNotFoundError("no network")

    monkeypatch.setattr(timm, "create_model", offline)
    with pytest.raises(UserError, match=r"cannot be fetched \(LocalEntryNotFoundError\)"):
        recipe("b16-ermoe").build(10, weights="timm")


def test_the_lines_of_the_documentation_run(trained, photo):
    page = (DOCS / "how-to/train.md").read_text("utf-8")
    (lines,) = re.findall(r"```python\n(import ermoe\n.*?)```", page, re.DOTALL)
    here = {"runs/digits": str(trained), "epochs=3": "epochs=2", "photo.png": photo}
    for written, meant in here.items():
        assert written in lines
        lines = lines.replace(written, meant)
    names = {}
    exec(lines, names)
    assert names["accuracy"] == pytest.approx(names["figures"]["top1"])
    assert len(names["few_shot"].accuracies) == 5
    assert len(names["predictions"][0].classes) == 5


def test_mistakes_are_named(trained, tmp_path):
    with pytest.raises(UserError, match="there is no preset"):
        run(["train", "nothing", "digits", "--out", str(tmp_path)])
    with pytest.raises(UserError, match="does not exist"):
        run(["train", "digits-ermoe", str(tmp_path / "nowhere"), "--out", str(tmp_path / "run")])
    with pytest.raises(UserError, match="another configuration"):
        run(["train", "digits-ermoe", "digits", "--out", str(trained), "--epochs", "5", "--device", "cpu"])


def test_every_preset_says_what_it_is():
    for name in PRESETS:
        chosen = recipe(name)
        assert chosen.training.epochs > 0
        assert chosen.architecture.startswith(("vit_", "deit_")) or chosen.architecture in STYLES
    methods = ("ermoe", "ermoe-mean", "ermoe-none", "ermoe-shared", "v-moe", "gate", "gate-loss-free", "soft", "emoe")
    for method in (*methods, "expert-choice"):
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


@pytest.fixture
def few_digits(monkeypatch):
    """The first 64 images of a split are all there are."""

    def first(data, split="train"):
        images = open_images(data, split)
        images.image_NCHW, images.label_N = images.image_NCHW[:64], images.label_N[:64]
        return images

    monkeypatch.setattr("ermoe.images.run.open_images", first)
    return first


@pytest.mark.no_cover
@pytest.mark.parametrize("style", ["single-gated", "deep-moe"])
def test_image_level_rivals_train_in_two_stages_and_resume(style, tmp_path, monkeypatch, few_digits):
    changes = {"epochs": 2, "batch_size": 16, "base_lr": 1e-3, "validation": 0.0}  # 4 steps an epoch
    few_experts = {"num_experts": 2} if style == "single-gated" else {}
    chosen = recipe(f"digits-{style}")
    chosen = replace(chosen, model_args=chosen.model_args | few_experts)
    whole = train(chosen, "digits", tmp_path / "whole", **changes)
    with monkeypatch.context() as patch:
        patch.setattr(Log, "step", _interrupt_after(6))
        with pytest.raises(KeyboardInterrupt):
            train(chosen, "digits", tmp_path / "cut", save_every=2, **changes)
    assert train(chosen, "digits", tmp_path / "cut", save_every=2, **changes) == whole
    model = ermoe.load(model_folder(tmp_path / "whole")).eval()
    figures = evaluate(model, Loader(transform_for(model).of(few_digits("digits", "test"))))
    assert figures["top1"] == pytest.approx(whole["top1"])
    model.reset_classifier(0)
    assert model(torch.zeros(2, 3, 16, 16)).shape == (2, 512)
