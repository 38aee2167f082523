"""Whatever ``timm.create_model(name, **arguments)`` can build comes back from disk, or it is said before training."""

import logging
from functools import partial

import pytest
import timm
import torch
from torch import nn

import ermoe
from ermoe.errors import UserError
from ermoe.models.backbones import family_of
from ermoe.models.families.timm_layers import as_data, from_data
from support.backbones import build, distance, outputs, perturb
from support.timm_arguments import CASES, SMALL, TEN, label


def round_trip(model, folder, **options):
    """A model and the sparse one it becomes, on disk and back: bit-equal outputs, and those of the dense one."""
    family = family_of(model)
    shape = (2, family.channels(model), *family.image_size(model))
    images = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    sparse = ermoe.upcycle(perturb(model).eval(), num_experts=2, **options)
    ermoe.save(sparse, folder)
    before = outputs(sparse, images)
    assert distance(before, outputs(model, images)) <= 1e-4
    assert torch.equal(outputs(ermoe.load(folder).eval(), images), before)


@pytest.mark.parametrize(("name", "args"), CASES[::2], ids=label)
def test_arguments_are_read_off_a_model(name, args):
    """All of them, and all pairs of ten, through a file: tests/system."""
    model = timm.create_model(name, **args)
    assert family_of(model).unsavable(model) is None


@pytest.mark.parametrize("pool", ["avg", "map"])
def test_ten_arguments_at_once(pool, tmp_path):
    args = {name: value for some in TEN for name, value in some.items()} | {"global_pool": pool}
    round_trip(timm.create_model("vit_tiny_patch16_224", **{**SMALL, **args}), tmp_path)


@pytest.mark.parametrize("num_classes", [0, 10])
def test_a_head_may_have_been_replaced(num_classes, tmp_path):
    model = timm.create_model("vit_tiny_patch16_224", **{**SMALL, "num_classes": num_classes})
    model.head = nn.Linear(32, 3)
    round_trip(model, tmp_path)
    assert timm.create_model(f"local-dir:{tmp_path}", pretrained=True).head.out_features == 3


def test_so_may_that_of_torchvision(tmp_path):
    model, _ = build("torchvision")
    model.heads.head = nn.Linear(64, 3)
    round_trip(model, tmp_path)


class Mine(nn.GELU):
    pass


class TestWhatCannotBeRead:
    @pytest.mark.parametrize("options", [{}, {"init": "random", "inplace": True}])
    def test_it_is_said_before_training(self, options, caplog):
        model = timm.create_model("test_vit", act_layer=Mine)
        with caplog.at_level(logging.WARNING, logger="ermoe"):
            sparse = ermoe.upcycle(model, num_experts=2, **options)
        assert "ermoe.save will not write this VisionTransformer: the layer" in caplog.text
        assert "Mine is neither torch's nor timm's" in caplog.text
        assert sparse.sparsity.num_experts == 2, "who does not want to save need not"

    def test_arguments_can_be_passed(self, tmp_path, caplog):
        args = {"norm_layer": partial(timm.layers.LayerNorm, affine=False)}
        model = timm.create_model("test_vit", **args).eval()
        with caplog.at_level(logging.WARNING, logger="ermoe"):
            sparse = ermoe.upcycle(model, num_experts=2)
        assert "unless you pass what you gave to timm.create_model" in caplog.text
        with pytest.raises(UserError, match=r"pass that as args="):
            ermoe.save(sparse, tmp_path)
        ermoe.save(sparse, tmp_path, args=args)
        images = torch.randn(2, 3, 160, 160, generator=torch.Generator().manual_seed(0))
        assert torch.equal(outputs(ermoe.load(tmp_path).eval(), images), outputs(sparse, images))

    def test_only_timm_has_arguments(self, tmp_path):
        model = build("torchvision")[0]
        with pytest.raises(UserError, match=r"args= are arguments of timm\.create_model: a Vision"):
            ermoe.save(model, tmp_path, args={"depth": 2})


class TestLayersAsData:
    @pytest.mark.parametrize("layer", [nn.ReLU, timm.layers.RmsNorm, partial(nn.LayerNorm, eps=1e-3)])
    def test_back_and_forth(self, layer):
        assert str(from_data(as_data(layer))) == str(layer)

    @pytest.mark.parametrize("name", ["os.system", "torch.nn.functional", "builtins.eval", 3, None, "torch.nn.init"])
    def test_nothing_else_can_be_named(self, name):
        with pytest.raises(UserError, match="neither torch's nor timm's"):
            from_data({"layer": name})
