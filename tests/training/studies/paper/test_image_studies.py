"""Every study on images runs from end to end on a handful of digits, and measures what it says."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import timm
import torch
from rich.console import Console

from ermoe.data.images import open_images, some_of
from ermoe.errors import UserError
from ermoe.images.presets import recipe
from ermoe.images.run import LabelledImages
from ermoe.models.upcycle import upcycle
from ermoe.nn import moe_layers
from ermoe.studies.paper import accuracy, catalogue, images, sweeps
from ermoe.studies.paper.images import PAPER_RULE, Variant
from ermoe.studies.paper.setup import Setup
from ermoe.studies.paper.study import run
from ermoe.studies.record import RECORDS
from support import pictures
from support.rows import keep

NAMES = ["threshold", "lambda", "top-k", "balance", "ablation", "train-heatmaps", "expert-choice"]


def few(split, number):
    whole = open_images("digits", split)
    return some_of(whole, np.arange(number), summary=f"{number} digits")


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """Studies share what they train."""
    return tmp_path_factory.mktemp("trained")


@pytest.fixture
def setup(tmp_path, work, monkeypatch, request):
    def brief(setup, method):
        chosen = recipe(f"digits-{method}")
        epochs = 2 if method in ("single-gated", "deep-moe") else 1
        return replace(chosen, training=replace(chosen.training, epochs=epochs, batch_size=50, warmup_epochs=0.0))

    data = LabelledImages("few", few("train", 100), few("test", 60))
    monkeypatch.setattr(images, "base_recipe", brief)
    monkeypatch.setattr(images, "source", lambda setup, path=None: data)
    monkeypatch.setattr(images, "_WORKERS", 0)
    keep(request, sweeps.LAMBDAS, "lambda-0", "lambda-5e-05", "lambda-0.01")
    keep(request, sweeps.NUMBERS, 1, 2, 6)
    keep(request, accuracy.PARTS, "normal weights", "learned logits", accuracy.FULL.name, "square basis")
    monkeypatch.setattr(sweeps, "step_times", partial(sweeps.step_times, rounds=2))
    return Setup(out=tmp_path, work=work, seeds=(1,), console=Console(quiet=True))


@pytest.mark.parametrize("name", NAMES)
def test_study_runs_and_shows_both_sides(setup, name):
    found = run(catalogue.find(name), setup)
    assert found.rows
    assert all(len(row) == len(found.header) for row in found.rows)
    place = setup.place(name)
    assert (place / "result.md").is_file()
    assert (found.drawing is None) or (place / "plot.png").stat().st_size > 5000
    before = (place / RECORDS).read_bytes()
    assert before
    run(catalogue.find(name), setup)
    assert (place / RECORDS).read_bytes() == before


def test_the_threshold_never_changes_a_choice_but_pruning_does(setup):
    figures = sweeps.sweep_threshold(setup, PAPER_RULE, 1)
    used = [figures["pruned"][str(t)]["experts_per_token"] for t in sweeps.THRESHOLDS]
    assert used == sorted(used, reverse=True)
    assert used[-1] >= 1
    rates = list(figures["fallback"].values())
    assert rates == sorted(rates)


def test_pruning_is_undone(setup):
    model = images.recipe_of(setup, Variant(PAPER_RULE), 1, images.source(setup)).build(10)
    router = next(iter(moe_layers(model).values())).router
    with sweeps.pruning(model, 0.9):
        assert (router.threshold, router.below_threshold) == (0.9, "prune")
    assert (router.threshold, router.below_threshold) == (0.5, "fill")


def test_a_square_basis_cannot_tell_experts_apart(setup):
    model = images.recipe_of(setup, accuracy.PARTS["square basis"][0], 1, images.source(setup)).build(10)
    accuracy.square_bases(model)
    recorder = images.routed(model.eval(), images.source(setup))
    assert images.mean_over_layers(recorder, "spread") < 1e-5
    plain = images.recipe_of(setup, accuracy.FULL, 1, images.source(setup)).build(10)
    assert images.mean_over_layers(images.routed(plain.eval(), images.source(setup)), "spread") > 0.1


def test_variants_share_what_is_trained_alike(setup):
    assert Variant("a").key == Variant("b").key == PAPER_RULE
    assert Variant("a", sparsity={"top_k": 1}).key != Variant("a").key
    assert accuracy.PARTS["square basis"][0].key.endswith("square-basis")


def test_a_trained_model_is_the_averaged_one_that_was_evaluated(setup):
    data = images.source(setup)
    result = images.trained(setup, Variant(PAPER_RULE), 1, data)
    figures, _ = images.examined(result.model, data)
    assert figures["top1"] == pytest.approx(result.figures["top1"])
    assert result.figures["drift"] > 0
    assert images.trained(setup, Variant("again"), 1, data).figures == result.figures


def test_halves_share_no_class_and_lose_no_image():
    data = LabelledImages("digits", open_images("digits", "train"), open_images("digits", "test"))
    first, second = images.halves(data)
    assert first.train.classes == list("01234")
    assert second.train.classes == list("56789")
    assert len(first.train) + len(second.train) == len(data.train)
    for part, offset in ((first, 0), (second, 5)):
        assert int(part.train.label_N.min()) == 0
        assert int(part.train.label_N.max()) == 4
        original = (data.train.label_N >= offset) & (data.train.label_N < offset + 5)
        assert torch.equal(part.train.label_N + offset, data.train.label_N[original])
        assert torch.equal(part.train.image_NCHW, data.train.image_NCHW[original])


def test_chosen_images_in_files_are_read_through(tmp_path):
    pictures.image_folder(tmp_path, per_class=8)
    whole = open_images(tmp_path)
    part = images.chosen(whole, [0, 1])
    assert set(part.label_N.tolist()) == {0, 1}
    original_N = torch.isin(whole.label_N, torch.tensor([0, 1])).nonzero().squeeze(1)
    for index, original in enumerate(original_N.tolist()):
        assert torch.equal(part.read(index), whole.read(original))
        assert part.name(index) == whole.name(original)


@pytest.mark.parametrize("style", ["single-gated", "deep-moe"])
def test_convolutional_rivals_train_and_can_be_probed(setup, style):
    data = images.source(setup)
    result = images.trained(setup, Variant(style, style), 1, data)
    assert 0 <= result.figures["top1"] <= 1
    found = accuracy.probes(result.model, data, 1, shots=(2,))
    assert set(found) == {"images-2", "epochs-2"}


def test_few_shot_at_full_scale_wants_two_data_sets(setup):
    full = replace(setup, scale="full", data="cifar")
    with pytest.raises(UserError, match="--pretrain"):
        accuracy.sources(full)


def test_times_of_a_pass_are_ratios_to_two_experts(setup):
    model = images.recipe_of(setup, Variant(PAPER_RULE), 1, images.source(setup)).build(10).eval()
    times = sweeps.step_times(model, images.source(setup))
    assert times["2"] == 1
    assert np.isfinite(list(times.values())).all()


@pytest.mark.parametrize("name", accuracy.PARTS)
def test_every_row_of_the_ablation_can_be_built_at_full_scale(name):
    data = LabelledImages("none", few("train", 1), few("test", 1))
    chosen = images.recipe_of(Setup(scale="full"), accuracy.PARTS[name][0], 1, data)
    with torch.device("meta"):
        dense = timm.create_model(chosen.architecture, **chosen.model_args)
    assert upcycle(dense, init=chosen.init, inplace=True, **chosen.sparsity).sparsity.num_experts == 8


def test_what_a_miniature_changes_in_the_method_is_said(setup):
    said = images.describe(setup)
    assert "departs from the paper: 1 is added to each chosen score in Eq. 7" in said
    assert "retracted every 10 steps" in said
    assert "retracted" not in sweeps.lambda_.ours(setup)
    full = replace(setup, scale="full", data="imagenet")
    assert images._departures(recipe("paper-ermoe")) == ""
    assert "ViT-B/16" in images.describe(full)
