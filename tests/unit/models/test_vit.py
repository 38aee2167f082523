"""The registered models have timm's whole protocol."""

import pytest
import timm
import torch
from timm.optim import create_optimizer_v2, param_groups_layer_decay
from torch import nn

import ermoe
import ermoe.models.vit
from ermoe.models.backbones import SparseBlock
from support.backbones import distance, outputs, perturb, photographs


@pytest.fixture(params=["test_ermoe_vit", "test_ermoe_vit2"])
def model(request):
    torch.manual_seed(0)
    return perturb(timm.create_model(request.param, num_classes=10)).eval()


def test_they_are_registered():
    names = set(timm.list_models("*ermoe*"))
    assert {f"ermoe_vit_{size}_patch16_224" for size in ("tiny", "small", "base")} <= names
    assert not timm.list_pretrained("*ermoe*")


def test_the_base_model_has_the_size_of_an_upcycled_one():
    with torch.device("meta"):
        registered = timm.create_model("ermoe_vit_base_patch16_224")
        upcycled = ermoe.upcycle(timm.create_model("vit_base_patch16_224"))
    sizes = [{name: tuple(t.shape) for name, t in m.state_dict().items()} for m in (registered, upcycled)]
    assert sizes[0] == sizes[1]


def test_they_start_afresh_only():
    with pytest.raises(ValueError, match=r"init='dense': a model created by name starts afresh.*ermoe\.upcycle"):
        timm.create_model("test_ermoe_vit", init="dense")


class TestProtocol:
    def test_features_and_head_make_the_whole(self, model):
        images = photographs(96)
        features = model.forward_features(images)
        assert torch.equal(model.forward_head(features), model(images))
        assert model.forward_head(features, pre_logits=True).shape == (8, model.num_features)

    def test_a_new_classifier(self, model):
        model.reset_classifier(3)
        assert model(photographs(96)).shape == (8, 3)
        assert model.get_classifier().out_features == 3
        model.reset_classifier(0)
        assert isinstance(model.get_classifier(), nn.Identity)

    def test_intermediates(self, model):
        final, intermediates = model.forward_intermediates(photographs(96), indices=2)
        assert [tuple(i.shape) for i in intermediates] == [(8, 64, 6, 6)] * 2
        assert torch.equal(final, model.forward_features(photographs(96)))
        assert len(model.get_intermediate_layers(photographs(96), n=3)) == 3

    def test_pruning_to_intermediates(self, model):
        model.prune_intermediate_layers(1)
        assert len(model.forward_intermediates(photographs(96), intermediates_only=True, indices=1)) == 1

    def test_features_only(self):
        model = timm.create_model("test_ermoe_vit", features_only=True, out_indices=(1, 3))
        assert [tuple(f.shape) for f in model(photographs(96))] == [(8, 64, 6, 6)] * 2

    def test_no_weight_decay_reaches_the_optimiser(self, model):
        optimiser = create_optimizer_v2(model, opt="adamw", weight_decay=0.05)
        decayed = {id(p) for group in optimiser.param_groups if group["weight_decay"] > 0 for p in group["params"]}
        names = {name for name, parameter in model.named_parameters() if id(parameter) in decayed}
        assert "blocks.1.attn.qkv.weight" in names
        assert not any(".experts." in name for name in names)

    def test_layer_decay_groups_blocks(self, model):
        groups = param_groups_layer_decay(model, layer_decay=0.5, no_weight_decay_list=model.no_weight_decay())
        scale = {id(p): group["lr_scale"] for group in groups for p in group["params"]}
        parameters = dict(model.named_parameters())
        first, last = parameters["blocks.1.mlp.experts.up.U"], parameters["blocks.3.mlp.experts.up.U"]
        assert scale[id(last)] == pytest.approx(4 * scale[id(first)])

    def test_gradient_checkpointing(self, model):
        model.train()
        grads = []
        for enable in (False, True):
            model.set_grad_checkpointing(enable)
            model.zero_grad()
            model(photographs(96)).sum().backward()
            grads.append(model.blocks[1].mlp.experts.up.U.grad.clone())
        assert torch.allclose(grads[0], grads[1], atol=1e-5)

    def test_other_image_sizes(self, model):
        assert model(photographs(64)).shape == (8, 10)

    def test_a_new_input_size(self):
        model = timm.create_model("ermoe_vit_tiny_patch16_224", depth=2, num_experts=2, rank=16).eval()
        model.set_input_size(img_size=(64, 64))
        assert model(photographs(64)).shape == (8, 1000)

    def test_weights_can_be_drawn_anew(self, model):
        before = model.blocks[1].mlp.experts.up.U.clone()
        model.init_weights()
        assert not torch.equal(before, model.blocks[1].mlp.experts.up.U)
        assert ermoe.orthogonality_loss(model).item() < 1e-7


def test_options_of_the_layer_pass_through_timm():
    model = timm.create_model(
        "test_ermoe_vit", num_experts=6, top_k=3, rank=24, blocks="all", threshold=0.2, router="eigen", score="energy"
    )
    layer = model.blocks[0].mlp
    assert all(isinstance(block, SparseBlock) for block in model.blocks)
    assert (layer.experts.num_experts, layer.router.top_k, layer.router.threshold) == (6, 3, 0.2)
    assert layer.experts.up.s.shape == (6, 24)


def test_an_unknown_option_is_named():
    with pytest.raises(ValueError, match="nonsense"):
        timm.create_model("test_ermoe_vit", nonsense=1)


def test_a_seed_makes_two_models_equal():
    models = []
    for _ in range(2):
        torch.manual_seed(3)
        models.append(timm.create_model("test_ermoe_vit").eval())
    assert torch.equal(outputs(models[0], photographs(96)), outputs(models[1], photographs(96)))


def test_half_precision_under_autocast(model):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = outputs(model, photographs(96))
    assert half.dtype == torch.bfloat16
    assert distance(half.float(), outputs(model, photographs(96))) < 0.3
