"""Training: what a run does, what it leaves alone, and that it can be stopped and go on."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from ermoe.errors import UserError
from ermoe.retrieval.build import load_clip
from ermoe.retrieval.captioned import CaptionedImages
from ermoe.retrieval.captions.catalogue import open_captions
from ermoe.retrieval.contrastive import Contrastive, contrastive_loss
from ermoe.retrieval.presets import METHODS, PRESETS, VARIANTS, recipe
from ermoe.retrieval.run import train
from ermoe.train.compute import Compute
from ermoe.train.run_folder import model_folder, read_lines
from ermoe.train.settings import NO_AUGMENTATION, Augmentation, Training
from support import captions as layouts


@pytest.fixture(scope="module")
def flickr(tmp_path_factory):
    return layouts.flickr8k(tmp_path_factory.mktemp("flickr"), train=24, dev=6, test=6)


@pytest.fixture(scope="module")
def dense_run(flickr, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "dense"
    train("tiny-dense", flickr, folder, cache=True)
    return folder


@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_and_leaves_a_model_that_dev_chose(flickr, tmp_path, method):
    figures = train(f"tiny-{method}", flickr, tmp_path / "run", cache=True)
    assert 0 <= figures["i2t_r1"] <= 1
    assert ("load_cv2" in figures) == (method != "dense")
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines if line["kind"] == "test"] == [3, 6]
    assert load_clip(tmp_path / "run").trained_on.numel() == 24
    assert best_of(tmp_path / "run") == tmp_path / "run" / "checkpoints" / "best"


@pytest.mark.no_cover
def test_a_run_learns_to_tell_its_training_pairs_apart(flickr, tmp_path):
    """Loss falls well below that of guessing, ln(batch)."""
    fast = replace(recipe("tiny-ermoe").training, epochs=15, base_lr=0.1, warmup_epochs=1.0, ema=0.0)
    calm = replace(recipe("tiny-ermoe"), augmentation=NO_AUGMENTATION, training=fast)
    train(calm, flickr, tmp_path / "run", cache=True)
    losses = [line["loss"] for line in read_lines(tmp_path / "run" / "metrics.jsonl") if line["kind"] == "train"]
    assert losses[0] > 1.8
    assert sum(losses[-5:]) / 5 < 1.0


def test_a_frozen_text_tower_is_byte_identical_after_training(flickr, dense_run, tmp_path):
    train("tiny-ermoe-frozen", flickr, tmp_path / "run", text_from=str(dense_run), cache=True)
    before, after = (load_file(best_of(place) / "model.safetensors") for place in (dense_run, tmp_path / "run"))
    texts = [name for name in before if name.startswith("text.")]
    assert len(texts) > 10
    for name in texts:
        assert before[name].numpy().tobytes() == after[name].numpy().tobytes(), name
    assert not torch.equal(before["visual.head.proj.weight"], after["visual.head.proj.weight"])


def test_a_tuned_text_tower_moves_on_from_where_it_was_taken_and_an_image_tower_of_rate_zero_stays(
    flickr, dense_run, tmp_path
):
    train("tiny-dense", flickr, tmp_path / "run", text_from=str(dense_run), image_lr=0.0, cache=True)
    before, after = (load_file(best_of(place) / "model.safetensors") for place in (dense_run, tmp_path / "run"))
    assert not torch.equal(before["text.text_projection"], after["text.text_projection"])
    start = recipe("tiny-dense").build().state_dict()
    trunk = [name for name in start if name.startswith("visual.trunk.")]
    assert all(torch.equal(start[name], after[name]) for name in trunk)
    assert not torch.equal(start["visual.head.proj.weight"], after["visual.head.proj.weight"])


def test_cached_features_of_a_frozen_tower_give_the_loss_of_the_tower_itself(flickr, dense_run):
    model = recipe("tiny-dense-frozen").build(text_from=str(dense_run))
    task = _task(model, flickr)
    (cached,) = next(iter(task.batches(0, 0)))
    assert cached.text is None
    task.source.feature_RD = None
    (plain,) = next(iter(task.loader.epoch(0)))
    assert plain.feature is None
    model.eval()
    torch.testing.assert_close(task.loss(model, cached), task.loss(model, plain), atol=1e-5, rtol=0)


def test_every_epoch_shows_each_image_once_with_one_of_its_captions(flickr):
    task = _task(recipe("tiny-dense").build(), flickr)
    for epoch in range(3):
        shown = [batch for parts in task.batches(epoch, 0) for batch in parts]
        assert [len(batch.image) for batch in shown] == [8, 8, 8]
        order = task.loader.order.epoch(epoch)
        wanted = task.source.token_RL[torch.from_numpy(task.train_set.one_text_each(order, seed=0, epoch=epoch))].long()
        given = torch.cat([torch.nn.functional.pad(b.text, (0, 16 - b.text.shape[1])) for b in shown])
        assert torch.equal(given, wanted)
    (later,) = next(iter(task.batches(1, 2)))
    (again,) = list(task.batches(1, 0))[2]
    assert torch.equal(later.text, again.text)
    assert torch.equal(later.image, again.image)


@pytest.mark.parametrize("variant", VARIANTS[1:])
def test_rivals_train_by_their_own_rules(flickr, tmp_path, variant):
    before = {name: tensor.clone() for name, tensor in recipe(f"tiny-{variant}").build().state_dict().items()}
    train(f"tiny-{variant}", flickr, tmp_path / "run", cache=True, epochs=1)
    model = load_clip(tmp_path / "run")
    moved = {n for n, t in model.state_dict().items() if n in before and n != "trained_on" and not before[n].equal(t)}
    if variant == "clip-moe":
        assert moved
        assert all(name.endswith("router.gate.W") for name in moved)
    else:
        assert {"visual.head.proj.weight", "text.text_projection"} <= moved
    assert model.context_length == (248 if variant == "long-clip" else 16)


def test_two_branches_are_two_contrastive_losses(flickr):
    model = recipe("tiny-fix-clip-style").build().eval()  # evaluation mode masks nothing
    task = _task(model, flickr, variant="fix-clip-style")
    (batch,) = next(iter(task.batches(0, 0)))
    image, text, scale = model(batch.image, batch.text)
    long, short = text.chunk(2)
    expected = contrastive_loss(image, long, scale) + contrastive_loss(image, short, scale)
    torch.testing.assert_close(task.loss(model, batch), expected)


@pytest.mark.no_cover
def test_an_interrupted_run_ends_as_if_nothing_had_happened(flickr, tmp_path):
    train("tiny-ermoe", flickr, tmp_path / "whole", cache=True, save_every=2)
    stopped = tmp_path / "stopped"

    class StopError(Exception):
        pass

    original = Contrastive.loss
    calls = []

    def failing(self, network, batch):
        calls.append(1)
        if len(calls) == 6:
            raise StopError
        return original(self, network, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Contrastive, "loss", failing)
        with pytest.raises(StopError):
            train("tiny-ermoe", flickr, stopped, cache=True, save_every=2)
    train("tiny-ermoe", flickr, stopped, cache=True, save_every=2, resume="must")
    assert (stopped / "metrics.jsonl").read_text() == (tmp_path / "whole" / "metrics.jsonl").read_text()
    weights, others = (load_file(place / "model" / "model.safetensors") for place in (stopped, tmp_path / "whole"))
    assert all(torch.equal(weights[name], others[name]) for name in others)


def test_the_configuration_says_what_was_run(dense_run, flickr):
    config = json.loads((dense_run / "config.json").read_text())
    assert config["protocol"] == "custom"
    assert config["preset"] == "tiny-dense"
    assert config["num_images"] == 24
    assert config["data"] == str(flickr)


def test_mistakes_are_told(flickr, dense_run, tmp_path):
    with pytest.raises(UserError, match="not be each other's negatives"):
        train("tiny-dense", flickr, tmp_path / "a", accumulate=2)
    with pytest.raises(UserError, match="must know something"):
        recipe("tiny-dense-frozen").build()
    with pytest.raises(UserError, match="no preset 'tiny'"):
        recipe("tiny")
    with pytest.raises(UserError, match="no text tower of this shape"):
        recipe("small-dense").build(text_from=str(best_of(dense_run)))
    with pytest.raises(UserError, match="no caption for a mixed image"):
        _task(recipe("tiny-dense").build(), flickr, augmentation=Augmentation(mixup=0.5))
    train_set = open_captions(flickr, split="train")
    with pytest.raises(UserError, match="24 images are in both train and dev"):
        CaptionedImages("", "custom", train_set, train_set)
    _begun(tmp_path / "begun")
    with pytest.raises(UserError, match="no model yet"):
        best_of(tmp_path / "begun")
    with pytest.raises(UserError, match="experts of its own"):
        replace(recipe("tiny-clip-moe"), sparsity={})


def test_every_preset_is_a_recipe():
    assert {"small-ermoe", "small-ermoe-frozen", "openai-b16-clip-moe", "imagenet-b16-ermoe-frozen"} <= set(PRESETS)
    for name in PRESETS:
        assert recipe(name).text_tower == ("frozen" if name.endswith("-frozen") else "tuned")


def best_of(run):
    return model_folder(run, prefer="best")


def _task(model, flickr, **options):
    plain = replace(recipe("tiny-dense"), training=Training(batch_size=8, epochs=1), augmentation=NO_AUGMENTATION)
    return Contrastive(model, CaptionedImages.open(flickr, cache=True), replace(plain, **options), Compute())


def _begun(folder):
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "metrics.jsonl").write_text("")
