"""Every vision transformer of timm that is not refused, in small: the same outputs, also from disk."""

import itertools
import re

import pytest
import timm
import torch

import ermoe
from ermoe.errors import UserError
from ermoe.models.backbones import family_of
from support.backbones import distance, outputs, perturb
from support.timm_arguments import CASES, SMALL, TEN, label

MODULES = ("vision_transformer", "deit", "eva", "beit", "vision_transformer_sam", "naflexvit")
NAMES = [name for module in MODULES for name in timm.list_models(module=module) if "mci" not in name]  # of one width
REFUSED = re.compile("18x2|_rpn_|_xp_|_d?pwee_|eva02_enormous")  # parallel or post-norm blocks
PAIRS = [("vit_tiny_patch16_224", {**SMALL, **first, **second}) for first, second in itertools.combinations(TEN, 2)]


def small(name):
    """Arguments that make a model of any name small, with 3 × 3 patches."""
    patch = re.search(r"patch(\d+)", name)
    size = {"embed_dim": 64, "num_heads": 4, "depth": 2, "num_classes": 10}
    size |= {"mlp_ratio": 4.0} if "giant" in name else {}  # even, for gates that are packed
    size |= {"num_kv_heads": (4, 2), "qkv_fused": False} if "sapiens2" in name else {}
    if name.startswith("naflex"):
        return {**size, "pos_embed_grid_size": (3, 3)}
    return {**size, "img_size": 3 * int(patch[1] if patch else 16)}


def check(model, folder):
    family = family_of(model)
    shape = (2, family.channels(model), *family.image_size(model))
    images = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    has_weights = family.no_context(family.blocks(model)[1][1]) is None
    score = "eigenbasis" if has_weights else "prototype"
    sparse = ermoe.upcycle(perturb(model).eval(), num_experts=2, route_rank=8, score=score)
    before, after = outputs(model, images), outputs(sparse, images)
    assert distance(after, before) <= 1e-4
    assert torch.equal(after.argmax(-1), before.argmax(-1))
    ermoe.save(sparse, folder)
    assert torch.equal(outputs(ermoe.load(folder).eval(), images), after)


@pytest.mark.parametrize("name", NAMES)
def test_names(name, tmp_path):
    model = timm.create_model(name, **small(name))
    if REFUSED.search(name):
        with pytest.raises(UserError, match=r"blocks\.1 cannot be made sparse: it is a"):
            ermoe.upcycle(model)
    else:
        check(model, tmp_path)


def test_they_are_many():
    assert sum(REFUSED.search(name) is None for name in NAMES) >= 60


@pytest.mark.parametrize(("name", "args"), [*CASES, *PAIRS], ids=label)
def test_arguments(name, args, tmp_path):
    check(timm.create_model(name, **args), tmp_path)
