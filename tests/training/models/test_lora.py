"""peft's LoRA on experts and on attention: it learns, is saved, comes back, and merges into the weights it adapts."""

import copy

import pytest
import timm
import torch
from torch.nn import functional as F

import ermoe
from ermoe.errors import UserError
from ermoe.nn.experts import EigenLinear
from support.backbones import apart, distance, outputs, perturb, photographs
from support.backbones import build as backbone

peft = pytest.importorskip("peft")


def build(**options):
    torch.manual_seed(0)
    dense = perturb(timm.create_model("test_vit", num_classes=10, img_size=64, depth=2)).eval()
    options = {"num_experts": 4, "generator": torch.Generator().manual_seed(0)} | options
    return apart(ermoe.upcycle(dense, **options), scale=0.1)


def adapt(model, targets=None, **options):
    targets = ermoe.lora_targets(model) if targets is None else targets
    config = peft.LoraConfig(r=2, target_modules=["qkv", "proj"], target_parameters=targets, **options)
    return peft.get_peft_model(model, config)


def learn(adapted, steps=3):
    learning = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(learning, lr=0.3)
    adapted.train()
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(adapted(photographs(64)[:8]), torch.arange(8)).backward()
        optimizer.step()
        ermoe.update_balance(adapted)
    assert all(parameter.grad.abs().sum() > 0 for parameter in learning)
    return adapted.eval()


ENTRY_TOO = [f"blocks.1.mlp.experts.{name}" for name in ("up.U", "up.V", "down.U")]


@pytest.mark.parametrize(
    ("options", "targets"),
    [
        ({}, None),
        ({}, ENTRY_TOO),  # the basis that routes: scores see what the adapter makes of it
        ({"experts": "dense"}, None),
        ({"router": "v-moe", "eval_capacity_factor": None}, None),
        ({"router": "soft"}, None),
        ({"shared": "dense"}, None),
    ],
    ids=str,
)
def test_learns_comes_back_and_merges(options, targets, tmp_path):
    model, images = build(**options), photographs(64)
    before, again = outputs(model, images), copy.deepcopy(model)
    adapted = adapt(model, targets, modules_to_save=["head", "balance"])
    assert distance(outputs(adapted.eval(), images), before) < 1e-5
    learned = outputs(learn(adapted), images)
    assert distance(learned, before) > 0.1
    adapted.save_pretrained(tmp_path / "adapter")
    assert torch.equal(outputs(peft.PeftModel.from_pretrained(again, tmp_path / "adapter").eval(), images), learned)
    merged = adapted.merge_and_unload()
    assert distance(outputs(merged, images), learned) < 1e-4
    ermoe.save(merged, tmp_path / "merged")
    assert torch.equal(outputs(ermoe.load(tmp_path / "merged").eval(), images), outputs(merged, images))


def test_on_one_factor_it_is_one_on_the_weight_and_the_routing_stays():
    """ΔW = U diag(s) ΔVᵀ has the rank of the adapter; `retract` makes the factor orthonormal again."""
    model = build()
    up = model.blocks[1].mlp.experts.up
    before, basis = up.matrices().detach(), up.U.detach().clone()
    merged = learn(adapt(model)).merge_and_unload()
    up = merged.blocks[1].mlp.experts.up
    assert isinstance(up, EigenLinear)
    assert torch.linalg.matrix_rank(up.matrices() - before, rtol=1e-4).tolist() == [2] * 4
    assert torch.equal(up.U, basis)
    report = ermoe.retract(merged)["blocks.1.mlp.experts.up"]
    assert report.error_after < 1e-5
    assert report.weight_change <= report.error_before


def test_what_needs_the_weights_themselves_wants_it_merged_first(tmp_path):
    adapted = adapt(build())
    asks = (ermoe.merge, ermoe.to_dense, ermoe.count, lambda model: ermoe.save(model, tmp_path / "a"))
    for ask in (*asks, lambda model: ermoe.export(model, tmp_path / "a.pt2")):
        for model in (adapted, adapted.base_model.model):
            with pytest.raises(UserError, match=r"has an adapter of peft.*merge it first.*merge_and_unload"):
                ask(model)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("modules", [["fc1", "fc2"], ["qkv"]])
def test_a_dense_model_is_merged_before_it_becomes_sparse(modules):
    dense = timm.create_model("test_vit", num_classes=10, img_size=64, depth=2).eval()
    adapted = peft.get_peft_model(dense, peft.LoraConfig(r=2, target_modules=modules, init_lora_weights=False)).eval()
    with pytest.raises(UserError, match=r"has an adapter of peft.*merge it first"):
        ermoe.upcycle(adapted)
    expected = outputs(adapted, photographs(64))
    assert distance(outputs(ermoe.upcycle(adapted.merge_and_unload()), photographs(64)), expected) < 1e-4


def test_a_model_without_experts_has_no_targets():
    with pytest.raises(UserError, match=r"no layers of experts.*ermoe\.upcycle"):
        ermoe.lora_targets(timm.create_model("test_vit"))


def test_attention_with_packed_weights_is_adapted_only_where_it_runs_itself():
    images = photographs(32)
    for options in ({}, {"score": "prototype"}):
        model = ermoe.upcycle(backbone("torchvision")[0], **options)
        before, config = outputs(model, images), peft.LoraConfig(target_modules=["self_attention"])
        adapted = peft.get_peft_model(model, config).eval()
        if options:
            assert distance(outputs(adapted, images), before) < 1e-5
        else:
            with pytest.raises(UserError, match=r"packed weights would be left out.*score='prototype'"):
                adapted(images)
