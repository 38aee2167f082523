"""The transformer for volumes: padding, masks, positions, and the same sparse block."""

import pytest
import torch

import ermoe
from ermoe.models.vit3d import ViT3D, cubes_with_voxels, pad_to_cubes, sine_cosine_positions
from support.backbones import apart, distance, perturb

SMALL = {"patch_size": 4, "embed_dim": 48, "depth": 4, "num_heads": 4, "num_classes": 3}


def build(volume_size=(12, 8, 8), **options):
    torch.manual_seed(0)
    return perturb(ViT3D(volume_size, **{**SMALL, **options})).eval()


def volume(*size, batch=2, channels=1):
    return torch.randn(batch, channels, *size, generator=torch.Generator().manual_seed(1))


class TestPadding:
    @pytest.mark.parametrize("size", [(12, 8, 8), (11, 8, 5), (1, 1, 1), (9, 2, 7)])
    def test_a_padded_volume_is_one_with_zeros_at_its_ends(self, size):
        model, x = build(), volume(*size)
        padded = torch.zeros(2, 1, *(4 * -(-edge // 4) for edge in size))
        padded[:, :, : size[0], : size[1], : size[2]] = x
        assert torch.equal(model(x), model(padded))

    def test_every_voxel_matters(self):
        """Nothing is cropped: the last voxel of every axis has a gradient."""
        model, x = build(), volume(11, 7, 6).requires_grad_()
        model(x).sum().backward()
        assert (x.grad != 0).all()

    def test_what_has_no_position_is_refused(self):
        with pytest.raises(ValueError, match=r"\(13, 8, 8\) voxels is larger than \(12, 8, 8\)"):
            build()(volume(13, 8, 8))

    def test_sine_cosine_positions_have_no_limit(self):
        assert build(pos_embed="sincos")(volume(20, 9, 8)).shape == (2, 3)

    def test_pad_to_cubes_fills_the_ends(self):
        padded = pad_to_cubes(torch.ones(1, 1, 3, 4, 5), 4, value=7)
        assert padded.shape == (1, 1, 4, 4, 8)
        assert float(padded.sum()) == 60 + 7 * (128 - 60)


class TestMask:
    def test_a_cube_is_real_if_one_voxel_is(self):
        mask = torch.zeros(1, 8, 8, 6, dtype=torch.bool)
        mask[0, 7, 3, 5] = True
        assert cubes_with_voxels(mask, 4).nonzero().tolist() == [[0, 1, 0, 1]]

    @pytest.mark.parametrize("pool", ["token", "avg", "places"])
    @pytest.mark.parametrize("sparse", [False, True])
    def test_masked_cubes_have_no_influence(self, pool, sparse):
        model = build(global_pool=pool)
        model = apart(ermoe.upcycle(model, num_experts=4)) if sparse else model
        mask = torch.ones(2, 12, 8, 8, dtype=torch.bool)
        mask[1, 4:] = False
        x = volume(12, 8, 8)
        other = x.clone()
        other[1, :, 4:] = 100
        with torch.no_grad():
            assert torch.allclose(model(x, mask), model(other, mask), atol=1e-5)
            assert not torch.allclose(model(x), model(other), atol=1e-2)

    @pytest.mark.parametrize("sparse", [False, True])
    def test_a_masked_volume_equals_the_smaller_one(self, sparse):
        model = build(global_pool="avg")
        model = apart(ermoe.upcycle(model, num_experts=4)) if sparse else model
        x = volume(12, 8, 8)
        mask = torch.ones(2, 12, 8, 8, dtype=torch.bool)
        mask[:, 8:] = False
        with torch.no_grad():
            assert torch.allclose(model(x, mask), model(x[:, :, :8]), atol=1e-4)

    def test_masked_cubes_are_not_routed_and_not_counted(self):
        sparse = ermoe.upcycle(build(), num_experts=4).train()
        mask = torch.ones(2, 12, 8, 8, dtype=torch.bool)
        mask[1, 4:] = False
        seen = []
        sparse.blocks[1].mlp.observers.append(seen.append)
        sparse(volume(12, 8, 8), mask)
        assert int(seen[0].count_E.sum()) == 2 * (13 + 5)
        assert float(sparse.blocks[1].mlp.router.balance._accumulator[-1]) == 13 + 5

    def test_an_empty_volume_is_harmless(self):
        with torch.no_grad():
            out = ermoe.upcycle(build(), num_experts=4)(volume(12, 8, 8), torch.zeros(2, 12, 8, 8, dtype=torch.bool))
        assert out.isfinite().all()

    @pytest.mark.parametrize("mask", [torch.ones(2, 12, 8, 8), torch.ones(2, 8, 8, 8, dtype=torch.bool)])
    def test_bad_masks_are_refused(self, mask):
        with pytest.raises(ValueError, match="mask is"):
            build()(volume(12, 8, 8), mask)


class TestSparse:
    @pytest.mark.parametrize("options", [{}, {"score": "prototype"}, {"experts": "dense"}, {"context_of": "attention"}])
    def test_outputs_stay(self, options):
        dense, x = build(), volume(11, 8, 7)
        mask = torch.rand(2, 11, 8, 7, generator=torch.Generator().manual_seed(0)) > 0.97
        sparse = ermoe.upcycle(dense, num_experts=4, **options)
        with torch.no_grad():
            assert distance(sparse(x), dense(x)) < 1e-4
            assert distance(sparse(x, mask), dense(x, mask)) < 1e-4
            assert distance(ermoe.to_dense(sparse)(x), dense(x)) < 1e-4

    def test_context_without_gradient(self):
        grads = []
        for flag in (True, False):
            sparse = apart(ermoe.upcycle(build(), num_experts=4, blocks=[1], context_grad=flag))
            sparse(volume(12, 8, 8)).sum().backward()
            grads.append(sparse.blocks[1].attn.qkv.weight.grad)
        assert not torch.allclose(grads[0], grads[1], rtol=1e-3)

    def test_save_load_count_and_merge(self, tmp_path):
        sparse = apart(ermoe.upcycle(build(pos_embed="sincos", in_chans=2), num_experts=4)).eval()
        ermoe.save(sparse, tmp_path)
        x = volume(12, 8, 8, channels=2)
        with torch.no_grad():
            assert torch.equal(ermoe.load(tmp_path).eval()(x), sparse(x))
            assert distance(ermoe.merge(sparse)(x), sparse(x)) < 1e-4
        work = ermoe.count(sparse).multiply_adds
        assert work.embedding == 12 * 2 * 4**3 * 48
        assert work.context == 2 * 13**2 * 4 * 8

    def test_gradient_checkpointing_changes_nothing(self):
        sparse = apart(ermoe.upcycle(build(), num_experts=4)).train()
        grads = []
        for enable in (False, True):
            sparse.set_grad_checkpointing(enable)
            sparse.zero_grad()
            sparse(volume(12, 8, 8)).sum().backward()
            grads.append(sparse.blocks[1].mlp.experts.up.U.grad.clone())
        assert torch.allclose(grads[0], grads[1], atol=1e-5)


class TestPositions:
    def test_they_tell_all_cubes_apart(self):
        positions = sine_cosine_positions((6, 7, 6), 48)[0]
        assert float(torch.pdist(positions).min()) > 0.1

    def test_axes_do_not_mix(self):
        """Cubes that differ along one axis share the encodings of the two others."""
        positions = sine_cosine_positions((2, 2, 2), 48)[0].view(2, 2, 2, 48)
        differs = (positions[0, 0, 0] - positions[1, 0, 0]).abs() > 1e-7
        assert set(differs.nonzero().flatten().tolist()) <= {*range(8), *range(24, 32)}

    def test_learned_ones_learn(self):
        model = build()
        model(volume(12, 8, 8)).sum().backward()
        assert (model.pos_embed.grad != 0).any()

    def test_too_narrow_for_three_axes(self):
        with pytest.raises(ValueError, match="at least 6"):
            sine_cosine_positions((2, 2, 2), 5)


class TestPlaces:
    def test_the_head_sees_a_mean_in_which_places_have_weights(self):
        model, x = build(global_pool="places"), volume(12, 8, 8)
        with torch.no_grad():
            tokens_BND = model.forward_features(x)[:, 1:]
            weight_ND = (1 + 10 * model.place_weight).reshape(12, 48)
            expected = model.head(
                torch.stack([w * z for w, z in zip(weight_ND, tokens_BND.unbind(1), strict=True)]).mean(0)
            )
            assert torch.allclose(model(x), expected, atol=1e-5)

    def test_they_come_back_from_disk(self, tmp_path):
        model, x = build(global_pool="places"), volume(12, 8, 8)
        ermoe.save(model, tmp_path / "model")
        with torch.no_grad():
            assert torch.equal(ermoe.load(tmp_path / "model").eval()(x), model(x))

    def test_a_smaller_volume_has_other_places(self):
        with pytest.raises(ValueError, match="weights for 12 cubes, and this volume has 8: bring volumes to"):
            build(global_pool="places")(volume(8, 8, 8))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"volume_size": (8, 8)}, "three positive"),
        ({"pos_embed": "rope"}, "pos_embed='rope'"),
        ({"global_pool": "max"}, "global_pool='max'"),
        ({"num_heads": 5}, "num_heads=5"),
        ({"patch_size": 0}, "patch_size=0"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        build(**options)


def test_bad_volumes_are_refused():
    with pytest.raises(ValueError, match=r"need \(B, 1, X, Y, Z\)"):
        build()(torch.randn(2, 12, 8, 8))


def test_timms_protocol():
    model = build()
    x = volume(12, 8, 8)
    with torch.no_grad():
        assert torch.equal(model.forward_head(model.forward_features(x)), model(x))
        assert model.forward_head(model.forward_features(x), pre_logits=True).shape == (2, 48)
    with pytest.raises(ValueError, match="global_pool='max'"):
        model.reset_classifier(3, "max")
    assert (model.num_classes, model.global_pool) == (3, "token")
    model.reset_classifier(7, "avg")
    assert model(x).shape == (2, 7)
    sparse = ermoe.upcycle(model)
    assert {"pos_embed", "cls_token", "blocks.1.mlp.experts.up.U"} <= sparse.no_weight_decay()
