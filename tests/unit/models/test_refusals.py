"""What cannot be made sparse is refused by name, and left as it was."""

import pytest
import timm
import torch
from torch import nn

import ermoe
from ermoe.models.backbones import SparseBlock, family_of
from support.backbones import REFUSED, build, distance, outputs, photographs


@pytest.fixture
def dense():
    return build("test_vit")[0]


def test_another_version_of_a_library_is_named(monkeypatch):
    elsewhere = ("ermoe.models.families.none", "timm.models.vision_transformer")
    monkeypatch.setitem(ermoe.models.backbones.FAMILIES, "timm_vit", elsewhere)
    with pytest.raises(ValueError, match=r"this version of timm is not one ermoe knows.*upgrade timm"):
        ermoe.upcycle(timm.create_model("test_vit"))


@pytest.mark.parametrize("name", REFUSED)
def test_blocks_without_a_place_for_experts_are_named(name):
    with pytest.raises(ValueError, match=r"blocks\.1 cannot be made sparse: it"):
        ermoe.upcycle(build(name)[0])


def test_a_sparse_model_is_refused(dense):
    sparse = ermoe.upcycle(dense)
    with pytest.raises(ValueError, match=r"blocks\.1 is sparse already.*to_dense"):
        ermoe.upcycle(sparse)


def test_other_blocks_of_a_sparse_model_are_welcome(dense):
    sparse = ermoe.upcycle(ermoe.upcycle(dense, blocks=[1]), blocks=[3])
    assert sparse.sparsity == ermoe.upcycle(dense, blocks=[1, 3]).sparsity
    assert distance(outputs(sparse, photographs(64)), outputs(dense, photographs(64))) <= 1e-4


def test_an_unknown_backbone_is_refused():
    with pytest.raises(ValueError, match=r"ResNet is no backbone ermoe knows"):
        ermoe.upcycle(timm.create_model("test_resnet"))


def test_attention_without_weights_is_refused_only_if_they_are_needed():
    model = timm.create_model("test_vit", attn_layer="diff", num_heads=2)
    with pytest.raises(ValueError, match=r"blocks\.1 cannot.*DiffAttention has no attention weights.*prototype"):
        ermoe.upcycle(model)
    assert ermoe.upcycle(model, score="prototype").sparsity.blocks == (1, 3, 5)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda mlp: setattr(mlp, "norm", nn.BatchNorm1d(192)), "inner norm is a BatchNorm1d; experts have LayerNorm"),
        (lambda mlp: setattr(mlp, "drop1", nn.Identity()), r"mlp\.drop1 is a Identity, not Dropout"),
        (lambda mlp: setattr(mlp, "act", nn.PReLU()), "activation PReLU has parameters"),
        (lambda mlp: setattr(mlp.drop2, "p", 0.3), "two different dropout rates"),
        (lambda mlp: setattr(mlp, "fc2", nn.Conv2d(192, 64, 1)), "convolutions"),
        (lambda mlp: setattr(mlp, "__class__", nn.Module), "is a Module"),
    ],
)
def test_networks_that_experts_cannot_be_are_named(dense, change, reason):
    change(dense.blocks[3].mlp)
    with pytest.raises(ValueError, match=rf"blocks\.3 cannot be made sparse: its.*{reason}"):
        ermoe.upcycle(dense)


@pytest.mark.parametrize("name", ["torchvision", "hugging face", "eva02_tiny_patch14_224"])
def test_parts_exchanged_by_hand_are_named(name):
    for part in ("mlp", "block"):
        dense, _ = build(name)
        block_name, block = family_of(dense).blocks(dense)[1]
        if part == "mlp":
            block.mlp = nn.Identity()
        else:
            block.__class__ = type("Mine", (type(block),), {})
        with pytest.raises(ValueError, match=f"{block_name} cannot be made sparse: it"):
            ermoe.upcycle(dense)


def test_weights_that_are_no_numbers_are_named(dense):
    with torch.no_grad():
        dense.blocks[3].mlp.fc1.weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"blocks\.3 cannot.*NaN"):
        ermoe.upcycle(dense, inplace=True)
    assert not any(isinstance(block, SparseBlock) for block in dense.blocks)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"blocks": "every-0"}, "blocks='every-0'"),
        ({"blocks": "last-9"}, "this model has 6 blocks"),
        ({"blocks": [7]}, "this model has 6 blocks"),
        ({"blocks": []}, "blocks="),
        ({"blocks": 3}, "blocks=3: use 'every-n'"),
        ({"blocks": [1.5]}, r"blocks=\[1\.5\]: use 'every-n'"),
        ({"blocks": ["1"]}, r"blocks=\['1'\]: use 'every-n'"),
        ({"blocks": torch.tensor([1, 3])}, r"blocks=tensor\(\[1, 3\]\): use 'every-n'"),
        ({"num_experts": 2.5}, "^num_experts=2.5: need a whole number"),
        ({"num_experts": "4"}, "^num_experts='4': need a whole number"),
        ({"rank": 32.0}, "^rank=32.0: need a whole number"),
        ({"rank": 5, "experts": "dense"}, "^rank=5: dense experts have no rank"),
        ({"rank": 5, "router": "v-moe"}, "^rank=5: dense experts have no rank"),
        ({"threshold": 1.5}, "^threshold=1.5"),
        ({"init": "zeros"}, "init='zeros'"),
        ({"context_of": "dreams"}, "context_of='dreams'"),
        ({"router": "dice"}, "router='dice'"),
        ({"rank": 65}, "rank=65"),
        ({"route_rank": 64}, "square orthonormal basis"),
        ({"temperature": 2}, "^router='eigen' has no option temperature: it has num_experts, "),
        ({"calibration": []}, "no batches"),
        ({"hidden_dim": 8}, "hidden_dim=8: narrower experts are fitted to tokens; pass calibration="),
    ],
)
def test_bad_options_leave_the_model_as_it_was(dense, options, message):
    with pytest.raises(ValueError, match=message):
        ermoe.upcycle(dense, inplace=True, **options)
    assert not any(isinstance(block, SparseBlock) for block in dense.blocks)


@pytest.mark.parametrize("name", ["act_layer", "bias", "gated", "drop", "device", "dtype", "dim"])
def test_what_follows_from_the_dense_network_is_no_option(dense, name):
    with pytest.raises(ValueError, match=f"^{name}: experts take this from the feed-forward network they replace"):
        ermoe.upcycle(dense, **{name: None})
    with pytest.raises(ValueError, match="has no option temperature") as problem:
        ermoe.upcycle(dense, temperature=2)
    assert name not in str(problem.value).partition("it has ")[2].split(", ")


def test_attention_of_ones_own_is_refused_only_if_its_weights_are_needed():
    class Capped(nn.MultiheadAttention):
        def forward(self, *args, **kwargs):
            attended, weights = super().forward(*args, **kwargs)
            return attended.clamp(-1, 1), weights

    model, _ = build("torchvision")
    model.encoder.layers[1].self_attention.__class__ = Capped
    with pytest.raises(ValueError, match=r"its Capped computes attention in a way of its own.*; use score='prototype'"):
        ermoe.upcycle(model)
    assert ermoe.upcycle(model, score="prototype").sparsity.blocks == (1, 3)


@pytest.mark.parametrize(("part", "place"), [("", "it"), ("mlp", "its mlp"), ("mlp.fc1", r"mlp\.fc1")])
def test_classes_that_were_changed_by_others_are_named(dense, part, place, monkeypatch):
    kind = type(dense.blocks[1].get_submodule(part))
    forward = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, *inputs: 2 * forward(self, *inputs))
    said = rf"{place} has a forward that .* has put into the class {kind.__name__}, which.*; undo that first"
    with pytest.raises(ValueError, match=said):
        ermoe.upcycle(dense)


@pytest.mark.parametrize("given", [None, "vit_tiny_patch16_224", {}])
def test_what_is_no_model_is_refused(given):
    with pytest.raises(ValueError, match=r"upcycle takes a model, not a \w+: build one"):
        ermoe.upcycle(given)


def test_half_precision_can_be_saved_and_is_not_warned_of(dense, caplog):
    ermoe.upcycle(dense.bfloat16())
    assert not caplog.records
