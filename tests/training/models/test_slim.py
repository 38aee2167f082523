"""Slim models and what they learn from their dense form: within the budget, nearer with every stage, resumable."""

import copy
import json

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from transformers import ViTConfig, ViTForImageClassification

import ermoe
from ermoe.cli.main import main
from ermoe.errors import UserError
from ermoe.models import sizes
from ermoe.models.backbones import family_of
from ermoe.models.sizes import Kind, Size, entries_of
from ermoe.nn import moe_layers
from ermoe.nn.basis import orthonormality_error
from ermoe.train import distillation


@pytest.fixture(scope="module")
def dense():
    torch.manual_seed(0)
    model = timm.create_model("test_vit", num_classes=10, img_size=96).eval()
    for parameter in model.head.parameters():  # an untrained head answers everything alike
        torch.nn.init.normal_(parameter, std=0.5)
    return model


@pytest.fixture(scope="module")
def batches():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, 3, 96, 96, generator=generator) for _ in range(4)]


@pytest.fixture(scope="module")
def slimmed(dense, batches):
    # Experts help a random network too little to pay for routing.
    options = {"num_experts": 3, "routing_cost": 0.0, "held_out": batches[3:], "layer_epochs": 0, "epochs": 0}
    found = ermoe.slim(dense, batches[:3], budget=0.8, **options)
    assert any(layer.num_experts > 1 for layer in found.layers)
    return found


def converted(dense, batches, **options):
    options = {"num_experts": 2, "top_k": 1, "blocks": [2, 5], **options}
    generator = torch.Generator().manual_seed(0)
    return ermoe.upcycle(dense, init="clusters", calibration=batches, generator=generator, **options)


def test_the_whole_model_is_within_its_budget(dense, slimmed):
    assert slimmed.operations == ermoe.count(slimmed.model).multiply_adds.total
    assert 0.7 < slimmed.operations / ermoe.count(dense).multiply_adds.total <= 0.8
    assert all(layer.width < layer.dense_width for layer in slimmed.layers)
    assert len(moe_layers(slimmed.model)) == len(slimmed.layers)


def test_hidden_units_that_experts_do_not_have_to_themselves_are_shared(dense, batches):
    options = {"num_experts": 3, "routing_cost": 0.0, "held_out": batches[3:], "layer_epochs": 0, "epochs": 0}
    shared, apart = (ermoe.slim(dense, batches[:3], routed=routed, **options) for routed in (0.125, 1.0))
    assert shared.share <= 0.8
    layers = moe_layers(shared.model)
    mixtures = [layer for layer in shared.layers if layer.num_experts > 1]
    assert mixtures
    for layer in mixtures:
        found = layers[f"{layer.name}.mlp"]
        own = 0 if found.shared is None else found.shared.size[0]
        assert (own, own + found.experts.size[0]) == (layer.shared, layer.width)
        assert layer.width - layer.shared == min(layer.width, layer.dense_width // 8)
    assert all(layer.shared == 0 for layer in apart.layers)
    assert shared.parameters < apart.parameters
    with pytest.raises(UserError, match="above 0 and at most 1"):
        ermoe.slim(dense, batches, routed=0)
    with pytest.raises(UserError, match="routing_cost=-1: need 0 or more"):
        ermoe.slim(dense, batches, routing_cost=-1)


def test_few_blocks_are_cut_deep_because_routing_takes_time(dense):
    family = family_of(dense)
    networks = {name: family.ffn(block) for name, block in family.blocks(dense)}
    ffn = next(iter(networks.values()))
    whole = ffn.hidden_dim
    kept = range(whole // 16, whole, whole // 16)
    harm = {name: {Size(8, each): (1 - each / whole) ** 2 for each in kept} for name in networks}
    to_save = len(networks) * entries_of(ffn) // 5
    found = {}
    for cost in (0.0, 0.3):
        kind = Kind(8, routing_cost=cost)
        found[cost] = [size for size in sizes._shrink(networks, harm, to_save, kind).values() if size]
        assert sum(entries_of(ffn) - size.entries(ffn, is_rank=False) for size in found[cost]) >= to_save
    assert len(found[0.3]) < len(found[0.0])
    assert min(size.kept for size in found[0.3]) < min(size.kept for size in found[0.0])


def test_the_report_says_what_was_done(slimmed):
    assert f"given to {slimmed.agreement:.1%} of the images" in slimmed.table()
    assert json.loads(json.dumps(slimmed.as_json()))["share"] == slimmed.share


def test_what_was_fitted_is_not_fitted_again(dense, batches, tmp_path, monkeypatch):
    options = {"num_experts": 2, "folder": tmp_path, "layer_epochs": 0, "epochs": 0}
    first = ermoe.slim(dense, batches, **options)
    other = copy.deepcopy(dense)
    torch.nn.init.normal_(other.head.bias)

    def refuse(*_, **__):
        raise AssertionError("fitted again")

    monkeypatch.setattr("ermoe.models.slim.fit_slim", refuse)
    again = ermoe.slim(dense, batches, **options)
    assert again.layers == first.layers
    assert again.agreement == first.agreement
    image = batches[0]
    assert torch.equal(again.model(image), first.model(image))
    for changed in ({"budget": 0.7}, {"seed": 1}):
        with pytest.raises(AssertionError, match="fitted again"):
            ermoe.slim(dense, batches, **options, **changed)
    for model, images in ((other, batches), (dense, batches[1:])):
        with pytest.raises(AssertionError, match="fitted again"):
            ermoe.slim(model, images, **options)


def test_a_smaller_budget_means_narrower_experts(dense, batches, slimmed):
    options = {"num_experts": 3, "routing_cost": 0.0, "layer_epochs": 0, "epochs": 0}
    tight = ermoe.slim(dense, batches[:3], budget=0.6, held_out=batches[3:], **options)
    assert tight.share <= 0.6
    wide, narrow = ({layer.name: layer.width for layer in each.layers} for each in (slimmed, tight))
    assert all(narrow[name] <= width for name, width in wide.items())
    assert sum(narrow.values()) < sum(wide.values())


def test_ranks_are_cut_instead_of_widths(dense, batches):
    options = {"budget": 0.8, "num_experts": 1, "cut": "rank", "held_out": batches[3:], "layer_epochs": 0, "epochs": 0}
    one = ermoe.slim(dense, batches[:2], **options)
    assert one.share <= 0.8
    assert all(layer.num_experts == 1 and layer.rank < 64 and layer.width == layer.dense_width for layer in one.layers)


def test_blocks_have_sizes_of_their_own(dense, batches, tmp_path):
    given = {"num_experts": [2, 1], "hidden_dim": [48, 32], "experts": "dense"}
    model = converted(dense, batches[:2], **given)
    first, second = moe_layers(model).values()
    assert [(layer.experts.num_experts, layer.experts.size[0]) for layer in (first, second)] == [(2, 48), (1, 32)]
    ermoe.save(model, tmp_path / "model")
    torch.testing.assert_close(ermoe.load(tmp_path / "model").eval()(batches[0]), model(batches[0]))
    with pytest.raises(UserError, match="one for each of the 2 blocks"):
        converted(dense, batches[:2], num_experts=[2, 2, 2])


def test_learning_brings_a_model_nearer_to_its_teacher(dense, batches):
    model = converted(dense, batches[:3], experts="dense", hidden_dim=16)
    before = ermoe.distill(copy.deepcopy(model), dense, batches[:3], held_out=batches[:1], layer_epochs=0, epochs=0)
    by_layer = ermoe.distill(model, dense, batches[:3], held_out=batches[:1], layer_epochs=8, epochs=0)
    assert by_layer["layer_error"] < before["layer_error"]
    whole = ermoe.distill(model, dense, batches[:3], held_out=batches[:1], layer_epochs=0, epochs=4, lr=1e-5)
    assert whole["divergence"] < by_layer["divergence"]


def test_blocks_learn_to_say_what_the_teachers_say(dense, batches):
    def states_apart(model):
        with torch.no_grad(), distillation._states(model) as found, distillation._states(dense) as wanted:
            model(batches[0]), dense(batches[0])
        assert len(found) == len(wanted) == len(dense.blocks)
        return float(sum((h - t).norm() / t.norm() for h, t in zip(found, wanted, strict=True)))

    model = converted(dense, batches[:1], experts="dense", hidden_dim=16)
    before = states_apart(model)
    ermoe.distill(model, dense, batches[:1], epochs=10, lr=1e-5, state_weight=100)
    assert states_apart(model) < before


def test_factored_experts_stay_orthonormal_and_loads_equal(dense, batches):
    model = converted(dense, batches[:3], rank=16)
    ermoe.distill(model, dense, batches[:3], layer_epochs=2, epochs=1)
    for layer in moe_layers(model).values():
        assert float(orthonormality_error(layer.experts.up.U.detach()).max()) < 1e-5
    with ermoe.record_routing(model) as routing:
        for batch in batches[:3]:
            model(batch)
    assert all(figures["load_cv2"] < 0.01 for figures in routing.summary().values())


def test_a_router_that_looks_at_the_context_learns_too(dense, batches):
    model = ermoe.upcycle(dense, blocks=[5], num_experts=2, rank=24)
    before = ermoe.distill(copy.deepcopy(model), dense, batches, layer_epochs=0, epochs=0)
    assert ermoe.distill(model, dense, batches, layer_epochs=4, epochs=0)["layer_error"] < before["layer_error"]


def test_only_experts_learn_layer_by_layer_and_all_may_learn_afterwards(dense, batches):
    model = converted(dense, batches[:3], experts="dense", hidden_dim=64)
    before = {name: tensor.clone() for name, tensor in model.named_parameters()}
    ermoe.distill(model, dense, batches[:1], layer_epochs=1, epochs=0)
    # A basis that routes is retracted with the others, which changes it in its last digits.
    changed = {name for name, tensor in model.named_parameters() if not torch.allclose(tensor, before[name], atol=1e-6)}
    assert changed
    assert all(".mlp.experts." in name for name in changed)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_learning_that_was_stopped_goes_on_to_the_same_model(dense, batches, tmp_path, monkeypatch):
    options = {"layer_epochs": 2, "epochs": 1, "save_every": 1}
    whole, stopped = (converted(dense, batches[:3], experts="dense", hidden_dim=64) for _ in range(2))
    ermoe.distill(whole, dense, batches[:3], **options)
    start = copy.deepcopy(stopped)

    class StopError(Exception):
        pass

    calls = iter(range(100))
    learn = distillation.AsAWhole.loss

    def loss(self, network, batch):
        if next(calls) == 1:
            raise StopError
        return learn(self, network, batch)

    with monkeypatch.context() as patched:
        patched.setattr(distillation.AsAWhole, "loss", loss)
        with pytest.raises(StopError):
            ermoe.distill(stopped, dense, batches[:3], folder=tmp_path, **options)
    ermoe.distill(start, dense, batches[:3], folder=tmp_path, **options)
    for name, tensor in start.state_dict().items():
        assert torch.equal(tensor, whole.state_dict()[name]), name


def test_a_folder_that_holds_another_models_learning_is_refused(dense, batches, tmp_path):
    torch.manual_seed(5)
    other = timm.create_model("test_vit", num_classes=10, img_size=96).eval()
    ermoe.distill(converted(dense, batches[:1]), dense, batches[:1], epochs=1, folder=tmp_path)
    for model, teacher, options in (
        (converted(other, batches[:1]), other, {}),
        (converted(dense, batches[:1], num_experts=3), dense, {}),
        (converted(dense, batches[:1]), dense, {"state_weight": 0}),
    ):
        with pytest.raises(UserError, match="choose another folder"):
            ermoe.distill(model, teacher, batches[:1], epochs=1, folder=tmp_path, **options)


@pytest.mark.parametrize("by_name", [False, True])
def test_models_that_say_more_than_a_tensor_learn_too(by_name):
    torch.manual_seed(0)
    size = {"image_size": 32, "patch_size": 8, "hidden_size": 32, "intermediate_size": 64}
    config = ViTConfig(**size, num_hidden_layers=3, num_attention_heads=2, num_labels=5)
    dense = ViTForImageClassification(config).eval()
    images = [torch.randn(8, 3, 32, 32) for _ in range(2)]
    batches = [{"pixel_values": image} for image in images] if by_name else images
    slimmed = ermoe.slim(dense, batches, num_experts=2, layer_epochs=1, epochs=1)
    assert slimmed.share <= 0.8
    assert 0 <= slimmed.agreement <= 1


@pytest.mark.parametrize("budget", [0, 1, 1.5])
def test_a_budget_is_a_share(dense, batches, budget):
    with pytest.raises(UserError, match=f"budget={budget}: need a share"):
        ermoe.slim(dense, batches, budget=budget)


def test_what_cannot_be_had_is_said(dense, batches, slimmed):
    with pytest.raises(UserError, match="smallest feed-forward networks: use a larger one"):
        ermoe.slim(dense, batches[:1], budget=0.05, num_experts=2)
    with pytest.raises(UserError, match="sparse already: slim the dense one"):
        ermoe.slim(slimmed.model, batches)
    with pytest.raises(UserError, match="the teacher is not the dense model"):
        ermoe.distill(slimmed.model, slimmed.model, batches)
    with pytest.raises(UserError, match="has no experts"):
        ermoe.distill(dense, dense, batches)
    with pytest.raises(UserError, match="gone through only once"):
        ermoe.distill(slimmed.model, dense, iter(batches))
    with pytest.raises(UserError, match="gone through only once"):
        ermoe.slim(dense, batches, calibration=iter(batches))
    with pytest.raises(UserError, match="pass a list of batches"):
        ermoe.slim(dense, batches[0])
    with pytest.raises(UserError, match="single output"):
        ermoe.slim(timm.create_model("test_vit", num_classes=1, img_size=96), batches)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Photographs of two classes, and a dense model that knows them."""
    root = tmp_path_factory.mktemp("images")
    generator = np.random.default_rng(0)
    for split in ("train", "val"):
        for name in ("a", "b"):
            (root / split / name).mkdir(parents=True)
            for number in range(8):
                pixels = generator.integers(0, 255, (96, 96, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / split / name / f"{number}.png")
    torch.manual_seed(0)
    ermoe.save(timm.create_model("test_vit", num_classes=2, img_size=96), root / "dense")
    return root


def test_from_the_command_line(folder, capsys):
    slim = ["slim", str(folder / "dense"), str(folder), "--out", str(folder / "slim"), "--num-experts", "2"]
    assert main([*slim, "--layer-epochs", "1", "--epochs", "1", "--batch-size", "8", "--workers", "0"]) == 0
    assert "of the dense operations" in capsys.readouterr().out
    assert json.loads((folder / "slim" / "slimming.json").read_text())["share"] <= 0.8
    assert main(["image", "evaluate", str(folder / "slim"), str(folder), "--workers", "0"]) == 0
    upcycle = [
        "upcycle",
        str(folder / "dense"),
        "--data",
        str(folder),
        "--init",
        "clusters",
        "--out",
        str(folder / "sparse"),
    ]
    assert main([*upcycle, "--num-experts", "2", "--hidden-dim", "64", "--workers", "0"]) == 0
    assert "of one such expert for all tokens" in capsys.readouterr().out
    assert len(moe_layers(ermoe.load(folder / "sparse"))) == 3


def test_mistakes_on_the_command_line(folder, capsys):
    assert main(["upcycle", str(folder / "dense"), "--init", "clusters"]) == 2
    assert "name a folder of images" in capsys.readouterr().err
    assert main(["slim", "test_vit", str(folder)]) == 2
    assert "give --weights FILE" in capsys.readouterr().err
    assert main(["slim", "no_such_model", str(folder), "--weights", str(folder / "dense" / "model.safetensors")]) == 2
    assert "no model that timm knows" in capsys.readouterr().err
