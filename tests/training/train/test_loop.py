"""What the loop does in a step, an epoch and a run."""

import functools
import io
import math

import pytest
import timm
import torch
from rich.console import Console
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import ermoe
from ermoe.errors import UserError
from ermoe.images.run import Classification, transform_for
from ermoe.models.io import load
from ermoe.nn.basis import orthonormality_error
from ermoe.nn.orthogonality import bases
from ermoe.train import checkpoint
from ermoe.train.compute import Compute, Processes
from ermoe.train.loader import Loader, some_batches
from ermoe.train.run_folder import read_lines
from ermoe.train.settings import Training
from ermoe.train.trainer import Average, build_optimizer, learning_rate, set_learning_rate
from support.tiny_run import AUGMENTED, StoppedError, images, labelled, recipe, run


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def losses(folder):
    return [line["loss"] for line in read_lines(folder / "metrics.jsonl") if line["kind"] == "train"]


def test_a_run_leaves_what_it_promises(tmp_path):
    task = run(tmp_path, recipe(keep_every=1, epochs=2, validation=0.1))
    found = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    expected = {"config.json", "metrics.jsonl", "timing.jsonl", "model/config.json", "model/model.safetensors"}
    expected |= {"checkpoints/last.pt", "checkpoints/best/model.safetensors", "checkpoints/epoch-0001/config.json"}
    assert expected <= found
    assert any(name.startswith("events.") for name in found)
    model = load(tmp_path / "model")
    assert all(orthonormality_error(basis).max() < 1e-5 for basis in bases(model)), "the average was retracted"
    assert all(orthonormality_error(basis).max() < 1e-5 for basis in bases(task.model)), "and so were the weights"
    first, last = (line for line in read_lines(tmp_path / "metrics.jsonl") if line["kind"] == "test")
    assert last["loss"] < first["loss"]
    assert "fluctuation" in last
    assert "blocks.1.mlp/load_cv2" in last
    assert {"validation_top1", "drift"} <= last.keys()
    assert last["offsets_settled_on"].startswith("128 training images"), "two batches of 64 of the 180"


def test_the_saved_model_gives_the_reported_figures(tmp_path):
    task = run(tmp_path, recipe(epochs=1))
    line = read_lines(tmp_path / "metrics.jsonl")[-1]
    task.model.load_state_dict(load_file(tmp_path / "model" / "model.safetensors"))
    assert task.evaluate()["loss"] == pytest.approx(line["loss"], abs=1e-6)


@pytest.mark.parametrize("ema", [0.0, 0.9])
def test_a_kept_model_shares_out_plain_images_evenly_and_training_keeps_its_own_offsets(tmp_path, ema):
    task = run(tmp_path, recipe(augmentation=AUGMENTED, epochs=1, ema=ema))
    model = load(tmp_path / "model").eval()
    plain = task.train_images
    with ermoe.record_routing(model) as recorder, torch.no_grad():
        for batch in Loader(transform_for(model).of(plain)):
            model(batch.image)
    assert max(layer["load_cv2"] for layer in recorder.summary().values()) < 1e-3
    kept, trained = (network.blocks[1].mlp.router.balance.offset_E for network in (model, task.model))
    assert not torch.equal(kept, trained)
    last = checkpoint.read(tmp_path / "checkpoints" / "last.pt")["model"]["blocks.1.mlp.router.balance.offset_E"]
    assert torch.equal(last, trained)


def test_tensorboard_reads_what_the_metrics_say(tmp_path):
    def stop(epoch, step):
        if (epoch, step) == (0, 8):
            raise StoppedError

    with pytest.raises(StoppedError):
        run(tmp_path, recipe(epochs=1, save_every=5), before=stop)
    run(tmp_path, recipe(epochs=1, save_every=5))
    board = EventAccumulator(str(tmp_path)).Reload()
    assert [event.step for event in board.Scalars("train/loss")] == list(range(1, 13)), "repeated steps count once"
    assert [event.value for event in board.Scalars("train/loss")] == pytest.approx(losses(tmp_path))


def test_bases_may_be_retracted_within_an_epoch(tmp_path):
    """At step 11 of 12 they are as far from orthonormal as three steps take them, not eleven."""
    worst = {}
    for every in (0, 8):

        def stop(epoch, step):
            if step == 11:
                raise StoppedError

        folder = tmp_path / str(every)
        with pytest.raises(StoppedError):
            run(folder, recipe(retract_every=every, save_every=11, ema=0), before=stop)
        state = checkpoint.read(folder / "checkpoints" / "last.pt")["model"]
        stacks = [tensor for name, tensor in state.items() if name.endswith((".U", ".V"))]
        worst[every] = max(float(orthonormality_error(stack).max()) for stack in stacks)
    assert worst[8] < 0.5 * worst[0]


def test_where_there_is_no_terminal_every_epoch_is_a_line(tmp_path):
    file = io.StringIO()
    run(tmp_path, recipe(epochs=2), console=Console(file=file, width=20))
    first, second = file.getvalue().splitlines()
    assert first.startswith("step 12 of 24: loss ")
    assert second.startswith("step 24 of 24: loss ")


def test_a_warm_up_longer_than_the_run_is_pointed_out(tmp_path, caplog):
    run(tmp_path / "long", recipe(epochs=1, warmup_epochs=2))
    assert "warmup_epochs=2 is more than epochs=1" in caplog.text
    caplog.clear()
    run(tmp_path / "short", recipe(epochs=1))
    assert not caplog.text


@pytest.mark.parametrize("rank", [0, 1])
def test_the_probe_for_the_fluctuation_is_of_all_classes_and_the_same_on_every_process(rank):
    by_class = images("test", 1000)
    by_class.label_N, order = by_class.label_N.sort()
    by_class.image_NCHW = by_class.image_NCHW[order]
    chosen = recipe()
    task = Classification(chosen.build(4), labelled(test=by_class), chosen, Compute(Processes(rank=rank, num=2)))
    drawn = some_batches(task.test_loader.source, torch.device("cpu"), num_items=256, batch_size=8)
    assert torch.cat([batch.label for batch in drawn]).bincount().min() > 5
    task.model.eval()
    used = task._experts_of_probe()
    assert {len(used_PE) for used_PE in used.values()} == {256 * 5}  # images × tokens
    alone = Classification(task.model, labelled(test=by_class), chosen, Compute())._experts_of_probe()
    assert all(torch.equal(alone[name], used[name]) for name in used)


@pytest.mark.no_cover
def test_accumulation_equals_the_whole_batch(tmp_path):
    for parts in (1, 4):
        run(tmp_path / str(parts), recipe(precision="fp64", epochs=1, accumulate=parts))
    assert losses(tmp_path / "4") == pytest.approx(losses(tmp_path / "1"), abs=1e-9)


@pytest.mark.no_cover
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_follows_full_precision(tmp_path, precision):
    for name in ("fp32", precision):
        run(tmp_path / name, recipe(precision=name, epochs=1, base_lr=0.01))
    assert losses(tmp_path / precision) == pytest.approx(losses(tmp_path / "fp32"), abs=0.05)


@pytest.mark.no_cover
def test_a_compiled_run_follows_the_plain_one(tmp_path, monkeypatch):
    run(tmp_path / "plain", recipe(epochs=1, log_every=5))
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    run(tmp_path / "compiled", recipe(epochs=1, log_every=5), compile=True)
    assert losses(tmp_path / "compiled") == pytest.approx(losses(tmp_path / "plain"), abs=1e-3)


@pytest.mark.parametrize(
    "sparsity", [None, {"router": "v-moe", "num_experts": 4}, {"router": "soft", "num_experts": 4}]
)
def test_other_methods_train_in_the_same_loop(tmp_path, sparsity):
    run(tmp_path, recipe(sparsity=sparsity, augmentation=AUGMENTED, epochs=1, deterministic=False))
    assert all(math.isfinite(loss) for loss in losses(tmp_path))


def test_deterministic_mode_is_switched_on(tmp_path):
    try:
        run(tmp_path, recipe(epochs=1, deterministic=True))
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_fp16_with_shards_is_refused(tmp_path):
    task = run(tmp_path, recipe(precision="fp16"), task_only=True)
    from ermoe.train.trainer import Trainer

    with pytest.raises(UserError, match="use bf16"):
        Trainer.build(task, Training(precision="fp16"), Compute(Processes(num=2), parallel="fsdp"))


def test_weight_decay_spares_bases_norms_and_biases():
    model = recipe().build(4)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed, spared = set(), set()
    for group in build_optimizer(model, Training()).param_groups:
        (decayed if group["weight_decay"] else spared).update(names[id(p)] for p in group["params"])
    assert ermoe.no_weight_decay(model) <= spared
    assert {"pos_embed", "cls_token", "norm.weight", "blocks.0.attn.qkv.bias"} <= spared
    assert "blocks.0.attn.qkv.weight" in decayed
    assert not any("experts" in name for name in decayed)


def test_layer_decay_slows_early_blocks():
    model = timm.create_model("test_vit")
    optimizer = build_optimizer(model, Training(layer_decay=0.5))
    set_learning_rate(optimizer, 1.0)
    rate = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    first, last = (rate[id(model.blocks[i].attn.qkv.weight)] for i in (0, 1))
    assert first == pytest.approx(0.5 * last)
    assert rate[id(model.head.weight)] == 1.0


@pytest.mark.parametrize("layer_decay", [1.0, 0.5])
def test_bases_learn_as_slowly_as_they_are_told(layer_decay):
    model = recipe().build(4)
    optimizer = build_optimizer(model, Training(basis_lr=0.25, layer_decay=layer_decay))
    set_learning_rate(optimizer, 1.0)
    rate = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    assert len(rate) == len(list(model.parameters())), "every parameter, once"
    up = model.blocks[1].mlp.experts.up
    assert rate[id(up.U)] == rate[id(up.V)] == 0.25 * rate[id(up.s)]
    assert rate[id(up.s)] == rate[id(model.blocks[1].attn.qkv.weight)]


def test_the_learning_rate_rises_and_falls():
    rates = [learning_rate(s, total_steps=100, warmup_steps=10, peak=2.0) for s in range(100)]
    assert rates[0] == pytest.approx(0.2)
    assert max(rates) == rates[9] == 2.0
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert rates[-1] < 1e-3


def test_the_average_is_an_average():
    model = torch.nn.Linear(2, 2)
    average = Average(model, decay=0.9)
    expected = model.weight.detach().clone()
    for step in range(1, 5):
        with torch.no_grad():
            model.weight += 1
        average.update()
        decay = min(0.9, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * model.weight.detach()
    own = model.weight.detach().clone()
    with average.in_place():
        torch.testing.assert_close(model.weight.detach(), expected)
    assert torch.equal(model.weight, own)


@pytest.mark.parametrize(
    "bad", [{"epochs": 0}, {"precision": "fp8"}, {"ema": 1.0}, {"layer_decay": 0.0}, {"clip": -1}, {"accumulate": 0}]
)
def test_settings_that_make_no_sense_are_refused(bad):
    with pytest.raises(UserError, match=next(iter(bad))):
        Training(**bad)
