"""What is saved comes back as it was, or is refused by name."""

import os

import pytest
import timm
import torch
from torch import nn

import ermoe
from ermoe.images.rivals.image_level import image_level
from ermoe.models.weights.compare import difference
from support.backbones import build, hugging_face, outputs, perturb, photographs

TINY = {"depth": 2, "embed_dim": 64, "num_heads": 4, "num_classes": 5}
EVA, VIT, DINO = "eva02_tiny_patch14_224", "vit_tiny_patch16_224", "vit_small_patch16_dinov3"


def tiny(name, size, **options):
    torch.manual_seed(0)
    return perturb(timm.create_model(name, **{**TINY, "img_size": size, **options})).eval()


def round_trip(model, folder):
    ermoe.save(model, folder)
    return ermoe.load(folder).eval()


def refusal(model, folder):
    with pytest.raises(ermoe.errors.UserError, match="cannot be written down") as caught:
        ermoe.save(model, folder)
    assert os.listdir(folder) == []
    assert "\n" not in str(caught.value)
    return str(caught.value)


class TestArguments:
    """Arguments that change outputs and no shape."""

    @pytest.mark.parametrize(
        ("name", "size", "options"),
        [
            (EVA, 56, {"rope_temperature": 100}),
            (EVA, 56, {"rope_rotate_half": True}),
            (EVA, 56, {"ref_feat_shape": (8, 8)}),
            (EVA, 56, {"rope_grid_indexing": "xy"}),
            (EVA, 56, {"rope_grid_offset": 0.5}),
            (EVA, 56, {"dynamic_img_size": True, "rope_temperature": 50.0}),
            (DINO, 64, {"rope_temperature": 20.0, "rope_shift_coords": 0.1, "rope_jitter_coords": 1.5}),
            (VIT, 64, {"global_pool": "avg", "pool_include_prefix": True}),
            (VIT, 64, {"drop_path_rate": 0.00123456789}),
        ],
    )
    def test_they_come_back(self, name, size, options, tmp_path):
        model = tiny(name, size, **options)
        plain = tiny(name, size)
        plain.load_state_dict(model.state_dict(), strict=False)
        loaded = round_trip(model, tmp_path)
        assert torch.equal(outputs(loaded, photographs(size)), outputs(model, photographs(size)))
        assert difference(model, plain) is not None

    def test_padding_of_odd_images_comes_back(self, tmp_path):
        model = tiny(VIT, 64, dynamic_img_size=True, dynamic_img_pad=True)
        loaded = round_trip(model, tmp_path)
        assert torch.equal(outputs(loaded, photographs(70)), outputs(model, photographs(70)))

    @pytest.mark.parametrize("name", [EVA, VIT, DINO])
    def test_another_input_size_comes_back(self, name, tmp_path):
        model = tiny(name, 112)
        model.set_input_size((224, 112))
        images = torch.randn(2, 3, 224, 112, generator=torch.Generator().manual_seed(0))
        assert torch.equal(outputs(round_trip(model, tmp_path), images), outputs(model, images))

    def test_the_routing_rank_is_that_of_the_layer(self, tmp_path):
        """A study of the paper routes by square bases, which no option can ask for."""
        sparse = ermoe.upcycle(tiny(VIT, 64), num_experts=4)
        sparse.blocks[1].mlp.router.score.route_rank = 64
        assert round_trip(sparse, tmp_path).blocks[1].mlp.router.score.route_rank == 64

    def test_the_second_stage_of_training_comes_back(self, tmp_path):
        for style in ("deep-moe", "single-gated"):
            model = image_level(style, num_classes=3, img_size=32, blocks=(1, 1, 1, 1)).eval()
            model.begin_second_stage()
            loaded = round_trip(model, tmp_path)
            assert torch.equal(outputs(loaded, photographs(32)), outputs(model, photographs(32)))
            assert getattr(loaded, "gate_weight", 0) == 0


class TestChangedByHand:
    @pytest.mark.parametrize(
        ("path", "attribute", "value", "message"),
        [
            ("blocks.1.mlp.router", "top_k", 1, "blocks.1.mlp.router has top_k = 1, and would come back with 2"),
            ("blocks.1.mlp.router", "below_threshold", "prune", "blocks.1.mlp.router has below_threshold = 'prune'"),
            ("blocks.1.mlp.router.balance", "rate", 0.3, "balance has rate = 0.3"),
            ("blocks.1", "context_of", "attention", "blocks.1 has context_of = 'attention'"),
            ("blocks.1", "context_grad", False, "blocks.1 has context_grad = False"),
            ("blocks.1.mlp.experts", "act", nn.ReLU(), "experts.act is ReLU, and would come back as GELU"),
            ("norm", "eps", 1e-3, "norm has eps = 0.001, and would come back with 1e-06"),
            ("", "norm", nn.LayerNorm(64), "norm is torch.nn.modules.normalization.LayerNorm"),
            ("", "extra", nn.Linear(2, 2), "extra is Linear, and would come back as absent"),
            ("", "head", nn.Linear(64, 5, bias=False), "head.bias is absent, and would come back as float32 (5,)"),
            ("patch_embed", "strict_img_size", False, "patch_embed has strict_img_size = False"),
            ("blocks.0.attn", "scale", 1.0, "blocks.0.attn has scale = 1.0"),
        ],
    )
    def test_it_is_named(self, path, attribute, value, message, tmp_path):
        sparse = ermoe.upcycle(tiny(VIT, 64), num_experts=4)
        setattr(sparse.get_submodule(path), attribute, value)
        assert message in refusal(sparse, tmp_path)

    def test_a_part_in_another_precision(self, tmp_path):
        model = tiny(VIT, 64)
        model.head.double()
        assert "head.weight is float64 (5, 64), and would come back as float32" in refusal(model, tmp_path)

    def test_a_buffer_that_is_not_saved(self, tmp_path):
        model = tiny(EVA, 56)
        model.rope.pos_embed.mul_(1.1)
        assert "rope has values of its own in pos_embed" in refusal(model, tmp_path)


class TestWhatIsNoDifference:
    def test_how_it_is_computed_and_notes_of_its_owner(self, tmp_path):
        sparse = ermoe.upcycle(tiny(VIT, 64), num_experts=4).train()
        sparse.set_grad_checkpointing()
        sparse.epoch, sparse.blocks[0].nickname = 3, "first"
        sparse.blocks[1].mlp.every_expert = True
        sparse.blocks[1].mlp.observers.append(print)
        sparse.blocks[0].attn.fused_attn = not sparse.blocks[0].attn.fused_attn
        assert not round_trip(sparse, tmp_path).blocks[1].mlp.every_expert

    def test_half_precision_and_back(self, tmp_path):
        model = tiny(EVA, 56).bfloat16().float()
        assert round_trip(model, tmp_path).rope.pos_embed.dtype == torch.float32

    def test_where_a_model_came_from(self, tmp_path):
        hugging_face().save_pretrained(tmp_path / "theirs")
        model = type(hugging_face()).from_pretrained(tmp_path / "theirs").eval()
        loaded = round_trip(model, tmp_path / "ours")
        assert torch.equal(outputs(loaded, photographs(32)), outputs(model, photographs(32)))

    def test_a_model_and_its_copy(self):
        model, _ = build("test_vit2")
        assert difference(model, build("test_vit2")[0].to("meta")) is None
