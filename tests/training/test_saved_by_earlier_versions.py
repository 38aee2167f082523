"""What an earlier version wrote is read by this one: models, runs, checkpoints and indices of fixtures/saved.tar.xz.

Everything goes through public names and the command line, as its owners would. If a test fails, the code is to be
mended, not the archive; see fixtures/make.py.
"""

import json
import re
import shutil
import tarfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ermoe
from ermoe.cli.main import main

ARCHIVE = Path(__file__).parents[1] / "fixtures" / "saved.tar.xz"
MODELS = (
    "eigen", "eigen-full-rank", "energy", "prototype", "dense-experts", "merged", "bfloat16", "plain-dense",
    "registered", "v-moe", "logit", "loss-free", "expert-choice", "soft", "base", "cosine",
    "eva-swiglu", "dinov2-packed-swiglu", "dinov3-swiglu", "deit-distilled", "torchvision", "hugging-face",
    "single-gated", "deep-moe", "vit3d", "sfcn", "swin3d", "clip", "clip-moe", "long-clip",
)  # fmt: skip
NEEDED = {"hugging-face": "transformers", "swin3d": "monai"}
NEEDED |= dict.fromkeys(("clip", "clip-moe", "long-clip"), "open_clip")


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """The unpacked archive, to be read only."""
    place = tmp_path_factory.mktemp("saved")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(place, filter="data")
    return place


@pytest.fixture
def command(capsys):
    """Runs a command that must succeed; returns what it prints."""

    def run(*arguments):
        capsys.readouterr()
        assert main([str(argument) for argument in arguments]) == 0, capsys.readouterr().err
        return capsys.readouterr().out

    return run


def expected(path):
    return json.loads(path.read_text(encoding="utf-8"))


def numbers(pattern, text):
    """Name → number, of a pattern that finds both."""
    return {name: float(value) for name, value in re.findall(pattern, text)}


class TestModels:
    def test_the_list_is_that_of_the_archive(self, saved):
        assert {path.name for path in (saved / "models").iterdir()} == set(MODELS)

    @pytest.mark.parametrize("name", MODELS)
    def test_a_model_gives_the_same_answers(self, saved, name):
        pytest.importorskip(NEEDED.get(name, "torch"))
        folder = saved / "models" / name
        stored = load_file(folder / "expected.safetensors")
        inputs = [stored[key] for key in sorted(stored) if key.startswith("input.")]
        outputs = [stored[key] for key in sorted(stored) if key.startswith("output.")]
        tolerance = 1e-5 if outputs[0].dtype == torch.float32 else 3e-2
        for mine, theirs in zip(answers(ermoe.load(folder), inputs), outputs, strict=True):
            torch.testing.assert_close(mine, theirs, atol=tolerance, rtol=tolerance)


@torch.no_grad()
def answers(model, inputs):
    result = model.eval()(*inputs)
    result = result.logits if hasattr(result, "logits") else result
    return result if isinstance(result, tuple) else (result,)


class TestImageRuns:
    def test_a_finished_run_is_evaluated(self, saved, command):
        shown = command("image", "evaluate", saved / "images" / "finished", "digits", "--workers", 0)
        figures = expected(saved / "images" / "finished.json")["eval"]
        found = numbers(r"\b(loss|top1|load_cv2) ([\d.]+)", shown)
        assert found == pytest.approx(figures, abs=2 / 599)  # an image more or less, on another processor

    def test_a_finished_run_predicts(self, saved, command):
        shown = command("image", "predict", saved / "images" / "finished", saved / "images" / "digit.png", "--top", 10)
        chances = expected(saved / "images" / "finished.json")["predict"]
        assert numbers(r"\b(\d) ([\d.]+)%", shown) == pytest.approx(chances, abs=0.11)

    def test_an_interrupted_run_goes_on_to_the_same_end(self, saved, command, tmp_path):
        """The figures are those of the earlier version, which went on from the same checkpoint.

        The first step tells whether weights, order and rate are the checkpoint's, the second whether its moments are,
        the last evaluation whether the average is. Rounding errors of another processor grow from step to step.
        """
        wanted = expected(saved / "images" / "interrupted.json")
        run = shutil.copytree(saved / "images" / "interrupted", tmp_path / "run")
        before = (run / "metrics.jsonl").read_text().splitlines()
        command(
            "image",
            "train",
            "digits-ermoe",
            "digits",
            *wanted["options"],
            "--validation",
            0,
            "--out",
            run,
            "--resume",
            "must",
        )
        lines = (run / "metrics.jsonl").read_text().splitlines()
        assert lines[: len(before)] == before
        first, second, *_, last = map(json.loads, lines[len(before) :])
        wanted_first, wanted_second, *_, wanted_last = wanted["metrics"]
        for name in ("lr", "loss", "gradient_norm"):
            assert first[name] == pytest.approx(wanted_first[name], rel=1e-3), name
        assert second["loss"] == pytest.approx(wanted_second["loss"], rel=1e-3)
        assert (last["step"], last["kind"]) == (wanted_last["step"], "test")
        for name in ("loss", "top1", "fallback_rate"):
            assert last[name] == pytest.approx(wanted_last[name], abs=5e-3), name
        assert ermoe.load(run / "model").num_classes == 10


class TestBrainRun:
    @pytest.fixture(autouse=True)
    def _packages(self):
        for package in ("nibabel", "nilearn", "monai"):
            pytest.importorskip(package)

    def test_it_predicts(self, saved):
        found = ermoe.brain.load(saved / "brain" / "run").predict_all([saved / "brain" / "bids"])
        wanted = expected(saved / "brain" / "expected.json")["predictions"]
        assert {row.participant_id for row in found} == set(wanted)
        for row in found:
            for name, value in wanted[row.participant_id].items():
                assert getattr(row, name) == pytest.approx(value, abs=5e-3), (row.participant_id, name)

    def test_training_finds_it_finished(self, saved, command, tmp_path):
        """Networks, splits and data are taken for those of the run, and give its outputs again."""
        run = shutil.copytree(saved / "brain" / "run", tmp_path / "run")
        options = expected(saved / "brain" / "expected.json")["options"]
        place = ("--out", run, "--cache", tmp_path / "cache", "--no-check")
        assert options[:2] == ["--preset", "tiny"]  # as it was said then
        command("brain", "train", "tiny-ermoe", saved / "brain" / "bids", *options[2:], *place)
        outputs, wanted = (load_file(folder / "outputs.safetensors") for folder in (run, saved / "brain" / "run"))
        torch.testing.assert_close(outputs, wanted, atol=1e-3, rtol=1e-3)
        assert not list(run.rglob("last.pt"))  # nothing was trained


class TestRetrievalRun:
    @pytest.fixture(autouse=True)
    def _packages(self):
        pytest.importorskip("open_clip")

    def test_its_index_is_searched(self, saved, command):
        place = saved / "retrieval"
        moved = ("--model", place / "run", "--images", place / "images", "--top", 6)
        for query, wanted in expected(place / "expected.json")["search"].items():
            shown = command("retrieve", "search", place / "index", query, *moved)
            assert numbers(r"(\S+\.png)\D+(\d\.\d+)", shown) == pytest.approx(wanted, abs=1.1e-3)

    def test_training_takes_it_for_its_own_run(self, saved, command, tmp_path):
        """Recipe and data are those of its config.json; another preset's are not."""
        run = shutil.copytree(saved / "retrieval" / "run", tmp_path / "run")
        options = (saved / "retrieval" / "shapes", "--epochs", 2, "--workers", 0, "--out", run)
        assert "rsum" in command("retrieve", "train", "tiny-ermoe", *options)
        assert expected(run / "config.json") == expected(saved / "retrieval" / "run" / "config.json")
        assert main(["retrieve", "train", "tiny-dense", *map(str, options)]) == 2

    def test_its_evaluation_counts_as_read(self, saved, command, tmp_path):
        run = shutil.copytree(saved / "retrieval" / "run", tmp_path / "run")
        (record,) = run.glob("retrieval-*-test.json")
        earlier = expected(record)
        evaluate = ("retrieve", "evaluate", run, saved / "retrieval" / "shapes", "--workers", 0, "--draws", 20)
        assert f"read on {earlier['date']}" in command(*evaluate)
        command(*evaluate, "--again")
        assert expected(record)["reads"] == 2
        assert expected(record)["figures"] == pytest.approx(earlier["figures"], abs=0.1)
