"""What a sparse image tower starts from, and how fast it learns beside its text tower."""

from dataclasses import replace

import pytest
import torch
from rich.console import Console

from ermoe.errors import UserError
from ermoe.retrieval.commands import Convert
from ermoe.retrieval.presets import TextShape, recipe
from ermoe.retrieval.run import train
from ermoe.train.trainer import build_optimizer, set_learning_rate


def test_networks_of_a_given_image_tower_stay_in_sparse_blocks(tmp_path):
    dense = recipe("tiny-dense").build().visual.trunk.eval()
    torch.save(dense.state_dict(), tmp_path / "tower.pth")
    chosen = recipe("tiny-ermoe")
    chosen = replace(chosen, training=replace(chosen.training, seed=5))
    sparse = chosen.build(image_weights=str(tmp_path / "tower.pth")).visual.trunk.eval()
    image = torch.randn(3, 3, 32, 32)
    torch.testing.assert_close(sparse(image), dense(image))


@pytest.fixture(scope="module")
def deit(tmp_path_factory):
    """A file like DeiT-Tiny's, of two blocks: half precision, positions for 224 pixels, a classifier."""
    import timm

    path = tmp_path_factory.mktemp("deit") / "deit.pth"
    model = timm.create_model("deit_tiny_patch16_224", depth=2).half()
    torch.save(model.state_dict(), path)
    return str(path)


def small_deit(method, **changes):
    chosen = recipe(f"deit-tiny-{method}")
    text = TextShape(context_length=8, width=32, heads=2, layers=1)
    return replace(chosen, text=text, image_args={**chosen.image_args, "depth": 2}, **changes)


def test_all_towers_of_deit_tiny_start_from_the_file(deit):
    dense, ermoe, v_moe = (small_deit(method).build(weights=deit).eval() for method in ("dense", "ermoe", "v-moe"))
    image = torch.randn(2, 3, 96, 96)
    torch.testing.assert_close(ermoe.visual(image), dense.visual(image), atol=1e-4, rtol=1e-4)
    assert torch.equal(v_moe.visual.trunk.blocks[0].mlp.fc1.weight, dense.visual.trunk.blocks[0].mlp.fc1.weight)
    assert torch.equal(ermoe.text.text_projection, dense.text.text_projection)
    stored = torch.load(deit, weights_only=True)
    assert torch.equal(dense.visual.trunk.blocks[1].mlp.fc1.weight, stored["blocks.1.mlp.fc1.weight"].float())
    assert dense.visual.trunk.pos_embed.shape == (1, 37, 192)


def test_an_image_tower_that_knows_something_learns_more_slowly(deit):
    chosen = small_deit("ermoe", image_lr=0.25)
    model = chosen.build(weights=deit)
    optimizer = build_optimizer(model, replace(chosen.training, basis_lr=0.5), {"visual.trunk.": chosen.image_lr})
    set_learning_rate(optimizer, 1.0)
    rate = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    assert len(rate) == len(list(model.parameters())), "every parameter, once"
    trunk = model.visual.trunk
    assert rate[id(trunk.cls_token)] == rate[id(trunk.blocks[1].attn.qkv.weight)] == 0.25
    assert rate[id(trunk.blocks[1].mlp.experts.up.U)] == 0.125
    others = [model.visual.head.proj.weight, model.text.token_embedding.weight, model.logit_scale]
    assert {rate[id(parameter)] for parameter in others} == {1.0}


def test_deit_tiny_says_which_file_it_wants(deit, tmp_path):
    with pytest.raises(
        UserError, match="deit-tiny-ermoe starts from a deit_tiny_patch16_224: give its file with --wei"
    ):
        train("deit-tiny-ermoe", tmp_path, tmp_path / "run")
    with pytest.raises(UserError, match="has one file, for its image tower"):
        small_deit("dense").build(weights=deit, image_weights=deit)
    with pytest.raises(UserError, match="brings no text tower"):
        Convert("deit-tiny-dense", deit, tmp_path / "model")(Console())
    with pytest.raises(UserError, match="must know something"):
        small_deit("dense-frozen").build(weights=deit)
    with pytest.raises(UserError, match="image_lr=-1"):
        small_deit("dense", image_lr=-1)
