"""Studies that start from a file with weights: here of a ViT so small that it is fine-tuned in a moment."""

from dataclasses import replace

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file

from ermoe.cli import main as cli
from ermoe.data.images import open_images
from ermoe.errors import UserError
from ermoe.images.presets import PRESETS, PRETRAINED, recipe
from ermoe.images.run import LabelledImages
from ermoe.studies.conversions import Photographs
from ermoe.studies.figures import Runs
from ermoe.studies.paired import apart, difference, packed, paired_verdict, unpacked
from ermoe.studies.paper import catalogue, converted, finetuning, images, over_training, parts, sweeps
from ermoe.studies.paper.images import PAPER_RULE
from ermoe.studies.paper.setup import Setup
from ermoe.studies.record import RECORDS, read_records
from ermoe.train.compute import Compute
from support.rows import keep

ARGS = {"img_size": 16, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
METHODS = ["dense", "v-moe", PAPER_RULE, "ermoe-clusters"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Studies share what they train."""
    folder = tmp_path_factory.mktemp("real")
    torch.manual_seed(0)
    model = timm.create_model("deit_tiny_patch16_224", **ARGS, num_classes=7)
    save_file(model.state_dict(), folder / "weights.safetensors")
    return folder


@pytest.fixture
def run(place, monkeypatch, request):
    def brief(setup, method):
        chosen = recipe(f"deit-tiny-{method}")
        sparsity = chosen.sparsity and {**chosen.sparsity, **({"rank": 8} if "rank" in chosen.sparsity else {})}
        training = replace(chosen.training, epochs=1, batch_size=8, warmup_epochs=0.0)
        few = {"epoch_steps": 2, "calibration": chosen.calibration and 40}
        return replace(chosen, model_args=ARGS, sparsity=sparsity, training=training, **few)

    digits = (images.drawn(open_images("digits", split), 60) for split in ("train", "test"))
    data = LabelledImages("digits", *digits)
    monkeypatch.setattr(images, "base_recipe", brief)
    monkeypatch.setattr(images, "_KEPT", (PAPER_RULE,))
    monkeypatch.setattr(images, "source", lambda setup, path=None: data)
    for rows in (finetuning.CONTEST, finetuning._FIGURE_4, finetuning._SUPPLEMENT_13):
        keep(request, rows, *METHODS)
    for rows in (over_training._COLOURS, over_training._FOLLOWED):
        keep(request, rows, PAPER_RULE)
    for rows in (parts.PARTS, parts._SWEPT):
        keep(request, rows, parts.FULL.name)
    keep(request, sweeps.NUMBERS, 1, 2, 4)
    monkeypatch.setattr(parts, "_RETRAINED", {})
    monkeypatch.setattr(parts, "step_times", lambda model, data, rounds: {"2": 1.0})
    files = ["--weights", str(place / "weights.safetensors"), "--data", "digits"]
    folders = ["--out", str(place / "out"), "--work", str(place / "work")]
    return lambda study, *words: cli.main(["paper", "run", study, "--scale", "tiny", *files, *folders, *words])


def records_of(place, study):
    (path,) = (place / "out" / study).glob(f"*/{RECORDS}")
    return read_records(path)


def test_a_contest_from_the_command_line(run, place):
    assert run("finetune", "--seeds", "1") == 0
    (page,) = (place / "out" / "finetune").glob("*/result.md")
    said = page.read_text(encoding="utf-8")
    assert "2 steps of 8 images" in said
    assert "| V-MoE, no limit at inference |" in said
    records = records_of(place, "finetune")
    for figures in (record["figures"] for record in records if record["name"] != finetuning.TIMES):
        right_N = unpacked(figures["right"])
        assert right_N.sum() / figures["num_images"] == pytest.approx(figures["top1"])
    by_name = {record["name"]: record["figures"] for record in records}
    assert by_name["v-moe"]["no limit"]["drop_rate"] == 0 < by_name["v-moe"]["drop_rate"]
    assert by_name["ermoe-clusters"]["start"]["class_bits"] > 0
    assert by_name["ermoe-clusters"]["size"]["operations"] < by_name["dense"]["size"]["operations"]
    assert by_name[finetuning.TIMES]["dense"] == 1


@pytest.mark.parametrize("name", ["balance", "expert-choice"])
def test_tables_of_the_same_runs(place, name):
    found = catalogue.find(name, "tiny").findings(Runs(records_of(place, "finetune")))
    assert found.rows
    assert all(len(row) == len(found.header) for row in found.rows)


@pytest.mark.parametrize("name", ["ablation", "top-k", "train-heatmaps"])
def test_other_studies_take_over_what_it_trained(run, place, name):
    assert run(name, "--seeds", "1") == 0
    found = catalogue.find(name, "tiny").findings(Runs(records_of(place, name)))
    assert all(len(row) == len(found.header) for row in found.rows)


def test_steadiness_is_measured_in_training_between_seeds_and_in_changed_images(run, place):
    assert run("stability", "--seeds", "1", "2") == 0
    *_, last = (record["figures"] for record in records_of(place, "stability"))
    assert list(last["steps"]) == ["2"]
    assert list(last["seeds"]) == ["1"]
    changes = [*last["steps"].values(), *last["perturbed"].values()]
    assert all(0 <= own["changed"] <= 1 and 0 < own["jaccard"] <= 1 for own in changes)


@pytest.fixture
def photographs(run, monkeypatch, request):
    torch.manual_seed(0)
    dense = timm.create_model("deit_tiny_patch16_224", **ARGS, num_classes=10).eval()
    splits = [images.drawn(open_images("digits", split), 60) for split in ("train", "test")]
    monkeypatch.setattr(converted, "opened", lambda setup, seed, data=None: Photographs(dense, *splits, seed))
    monkeypatch.setitem(PRETRAINED, "ermoe-clusters", {**PRETRAINED["ermoe-clusters"], "rank": 8})
    monkeypatch.setattr(converted, "_SHOTS", (2,))
    keep(request, converted.ROWS, "dense", "ERMoE, exact", "V-MoE", "ERMoE, clusters, k = 1")
    keep(request, converted._TABLE_2, "dense", "v-moe", "ermoe-clusters")
    return run


def test_converted_models_are_judged_without_training_on_labels(photographs, place):
    assert photographs("imagenet", "--seeds", "1") == 0
    figures = {record["name"]: record["figures"] for record in records_of(place, "imagenet")}
    assert figures["ERMoE, exact"]["agreement"] == 1
    assert apart(Runs(records_of(place, "imagenet")), ("ERMoE, exact",), ("dense",)).mean == 0
    assert figures["V-MoE"][", no limit at inference"]["drop_rate"] == 0
    assert figures["ERMoE, clusters, k = 1"]["operations"] < 1


def test_frozen_features_are_computed_once_for_all_seeds(photographs, place):
    assert photographs("few-shot", "--seeds", "1", "2") == 0
    kept = {path.stem for path in (place / "work").glob("*/features/*.safetensors")}
    assert kept == {f"{method}-from-weights.safetensors" for method in ("dense", "v-moe", "ermoe-clusters")}
    found = catalogue.find("few-shot", "tiny").findings(Runs(records_of(place, "few-shot")))
    assert all(len(row) == len(found.header) for row in found.rows)


def test_experts_are_fitted_to_training_images_and_classifiers_start_alike(run, place):
    def start(method):
        chosen = replace(images.base_recipe(None, method), weights=str(place / "weights.safetensors"))
        return chosen.task(images.source(None), Compute()).model

    dense, sparse = start("dense"), start("ermoe-clusters")
    assert set(sparse.group_fits) == {"blocks.1"}
    assert torch.equal(sparse.head.weight, dense.head.weight)


def test_every_preset_is_declared_for_these_weights():
    assert {f"deit-tiny-{method}" for method in (*finetuning.CONTEST, *finetuning._FIGURE_4)} <= PRESETS.keys()


def test_what_is_lacking_gets_a_sentence():
    with pytest.raises(UserError, match="name DeiT-Tiny's file with --weights"):
        Setup(scale="tiny", data="digits")
    with pytest.raises(UserError, match="coco has no such scale; use mini or full"):
        catalogue.find("coco", "tiny")
    with pytest.raises(UserError, match="stability has no such scale; use tiny"):
        catalogue.find("stability", "mini")
    with pytest.raises(UserError, match="fitted to training images; pass images="):
        recipe("deit-tiny-ermoe-clusters").build(10)


def record(name, seed, right_N):
    return {"name": name, "seed": seed, "figures": {"right": packed(right_N), "num_images": len(right_N)}}


def test_differences_are_paired_by_seed_and_image():
    rng = np.random.default_rng(0)
    worse = [rng.random(1003) < 0.5 for _ in range(3)]
    better = [own | (rng.random(1003) < 0.1) for own in worse]
    runs = Runs([record(name, seed, own[seed]) for name, own in (("a", better), ("b", worse)) for seed in range(3)])
    found = apart(runs, ("a",), ("b",))
    assert found == difference(better, worse)
    assert found.mean == pytest.approx(np.mean(better) - np.mean(worse))
    assert "A is above B by" in paired_verdict(runs, (("a",), "A"), (("b",), "B"))
    equal = Runs([record("a", 0, worse[0]), record("b", 0, worse[0][::-1])])
    assert "equal within the noise" in paired_verdict(equal, (("a",), "A"), (("b",), "B"))
    assert apart(runs, ("a",), ("c",)) is None


def test_seeds_that_disagree_widen_the_interval():
    even = [np.arange(1000) < 510] * 3
    apart_by_seed = [np.arange(1000) < number for number in (460, 510, 560)]
    base = [np.arange(1000) < 500] * 3
    assert difference(apart_by_seed, base).half_width > 5 * difference(even, base).half_width
