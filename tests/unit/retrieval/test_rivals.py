"""CLIP-MoE, Long-CLIP and the two-branch variant: what each must do by its description."""

import pytest
import torch

import ermoe
from ermoe.errors import UserError
from ermoe.nn.rivals.clip_moe import ClipMoE, ClipMoERouter
from ermoe.nn.rivals.losses import auxiliary_loss
from ermoe.retrieval.clip.model import create_clip
from ermoe.retrieval.clip.towers import tokenise
from ermoe.retrieval.presets import TextShape
from ermoe.retrieval.rivals.clip_moe import (
    clip_moe,
    joint_clusters,
    mix_text_experts,
    train_only_gates,
    train_only_mlps,
)
from ermoe.retrieval.rivals.long_clip import primary_components, stretch_positions, stretched

IMAGE = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}


def build(seed=0, **text):
    shape = TextShape(**{"context_length": 12, "width": 32, "heads": 2, "layers": 2, **text})
    return create_clip("vit_tiny_patch16_224", shape, embed_dim=16, seed=seed, image_args=IMAGE).eval()


@pytest.fixture
def batch():
    image = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    return image, tokenise(["a dog", "two cats", "a boat at sea"], 12).id_TL.long()


def test_clip_moe_starts_as_its_base_with_experts_in_every_block_of_both_towers(batch, tmp_path):
    base = build()
    model = clip_moe(base, generator=torch.Generator().manual_seed(0)).eval()
    layers = [name for name, module in model.named_modules() if isinstance(module, ermoe.MoE)]
    assert len(layers) == 4
    for mine, theirs in zip(model(*batch), base(*batch), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=0)
    ermoe.save(model, tmp_path)
    for mine, again in zip(model(*batch), ermoe.load(tmp_path).eval()(*batch), strict=True):
        assert torch.equal(mine, again)


def test_only_the_gates_learn_and_they_get_gradients(batch):
    stages = [build(seed) for seed in range(4)]
    model = clip_moe(stages[0], stages=stages, generator=torch.Generator().manual_seed(0)).train()
    names = train_only_gates(model)
    assert len(names) == 4
    assert all(name.endswith("router.gate.W") for name in names)
    image, text, scale = model(*batch)
    ((scale * image @ text.mT).logsumexp(0).sum() + auxiliary_loss(model)).backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == (name in names)
    assert all(model.get_parameter(name).grad.abs().max() > 0 for name in names)


def test_experts_are_the_networks_of_the_stages():
    stages = [build(seed) for seed in range(3)]
    model = clip_moe(stages[0], num_experts=3, stages=stages)
    x = torch.randn(5, 32)
    for block, expert in ((0, 2), (1, 1)):
        layer = model.visual.trunk.blocks[block].mlp
        torch.testing.assert_close(
            layer.experts.every_expert(x)[expert], stages[expert].visual.trunk.blocks[block].mlp(x)
        )
        layer = model.text.transformer.resblocks[block].mlp
        torch.testing.assert_close(
            layer.experts.every_expert(x)[expert], stages[expert].text.transformer.resblocks[block].mlp(x)
        )
    with pytest.raises(UserError, match="2 stages cannot be 4 experts"):
        clip_moe(stages[0], stages=stages[:2])
    with pytest.raises(UserError, match="has experts already"):
        mix_text_experts(model)


def test_the_gate_renormalises_and_its_loss_is_k_when_balanced():
    router = ClipMoERouter(8, 4, ClipMoE(balance_weight=1.0)).train()
    routing = router(torch.randn(2, 6, 8))
    torch.testing.assert_close(routing.weight_TK.sum(-1), torch.ones(12))
    with torch.no_grad():
        router.gate.W.zero_()
    even = router._imbalance(torch.full((8, 4), 0.25), torch.full((4,), 4), None)
    assert float(even) == pytest.approx(2.0)
    uneven = router._imbalance(torch.eye(4)[[0] * 8], torch.tensor([8, 8, 0, 0]), None)
    assert float(uneven) == pytest.approx(4.0)
    masked = router(torch.randn(2, 6, 8), mask_GS=torch.arange(12).view(2, 6) < 8)
    assert int(masked.count_E.sum()) == 16
    with pytest.raises(ValueError, match="top_k=5"):
        ClipMoERouter(8, 4, ClipMoE(top_k=5))


def test_stages_train_their_mlps_on_clusters():
    model = build()
    names = train_only_mlps(model)
    assert len(names) == 2 * 2 * 4
    image, text = torch.randn(2, 30, 8, generator=torch.Generator().manual_seed(0))
    cluster_N = joint_clusters(image, text, seed=1)
    assert cluster_N.shape == (30,)
    assert 0 <= int(cluster_N.min()) <= int(cluster_N.max()) < 9
    assert torch.equal(cluster_N, joint_clusters(image, text, seed=1))
    with pytest.raises(UserError, match="2 pairs cannot be 3 clusters"):
        joint_clusters(image[:2], text[:2])
    with pytest.raises(UserError, match="no parameter"):
        train_only_gates(model)


def test_long_clip_keeps_20_positions_and_makes_four_of_each_other():
    position = torch.randn(77, 6)
    long = stretched(position)
    assert long.shape == (248, 6)
    assert torch.equal(long[:20], position[:20])
    torch.testing.assert_close(long[20::4], position[20:])
    torch.testing.assert_close(long[21], position[20] + (position[21] - position[20]) / 4)
    torch.testing.assert_close(long[247], position[76] + 0.75 * (position[76] - position[75]))
    with pytest.raises(UserError, match="must be a multiple"):
        stretched(position, 250)


def test_a_stretched_tower_takes_long_texts_and_leaves_the_first_positions_alone(batch, tmp_path):
    model = stretch_positions(build(context_length=77)).train()
    long = tokenise(["a dog runs after a ball " * 20], model.context_length).id_TL.long()
    assert int((long != 0).sum()) > 100
    model.encode_text(long).sum().backward()
    grad = model.text.positional_embedding.grad
    assert not grad[:20].any()
    assert grad[20:100].any()
    assert "text.positional_embedding" in model.no_weight_decay()
    ermoe.save(model, tmp_path)
    assert ermoe.load(tmp_path).context_length == 248


def test_primary_components_are_those_of_a_principal_component_analysis():
    feature = torch.randn(20, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    centred = feature - feature.mean(0)
    U, s, Vh = torch.linalg.svd(centred, full_matrices=False)
    expected = feature.mean(0) + (U[:, :3] * s[:3]) @ Vh[:3]
    found = primary_components(feature, 3)
    torch.testing.assert_close(found, torch.nn.functional.normalize(expected, dim=-1), atol=1e-5, rtol=0)
    unit = torch.nn.functional.normalize(feature, dim=-1)
    torch.testing.assert_close(primary_components(unit, 32), unit, atol=1e-5, rtol=0)


def test_masked_images_follow_whole_ones_only_while_training(batch):
    model = build().train()
    torch.manual_seed(0)
    image_2BD, _, _ = model(batch[0], None, masked_share=0.5)
    whole, masked = image_2BD.chunk(2)
    torch.testing.assert_close(whole, model(batch[0])[0])
    assert not torch.allclose(whole, masked)
    whole, masked = model.eval()(batch[0], None, masked_share=0.5)[0].chunk(2)
    assert torch.equal(whole, masked)
