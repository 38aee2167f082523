"""The way back to dense, factors multiplied out, and parameters that do not learn."""

import copy

import pytest
import torch
from timm.layers import Mlp

import ermoe
from ermoe.nn import DenseLinear, EigenLinear, moe_layers
from support.backbones import ACCEPTED, apart, build, distance, outputs, perturb, photographs

FAMILIES = [
    "test_vit",
    "test_vit2",
    "vit_giant_patch14_dinov2",
    "eva02_tiny_patch14_224",
    "vit_small_plus_patch16_dinov3",
]
FAMILIES += ["torchvision", "hugging face"]


class TestToDense:
    @pytest.mark.parametrize("name", FAMILIES)
    def test_there_and_back(self, name):
        dense, size = build(name)
        again = ermoe.to_dense(ermoe.upcycle(dense, num_experts=4))
        assert again.state_dict().keys() == dense.state_dict().keys()
        assert [type(m) for m in again.modules()] == [type(m) for m in dense.modules()]
        assert distance(outputs(again, photographs(size)), outputs(dense, photographs(size))) < 1e-4
        for key, value in dense.state_dict().items():
            assert torch.allclose(again.state_dict()[key], value, atol=1e-5), key

    @pytest.mark.parametrize("options", [{"experts": "dense"}, {"router": "v-moe"}, {"score": "prototype"}])
    def test_every_kind_of_layer_comes_back(self, options):
        dense, size = build("test_vit")
        again = ermoe.to_dense(ermoe.upcycle(dense, num_experts=4, **options))
        assert distance(outputs(again, photographs(size)), outputs(dense, photographs(size))) < 1e-4

    @pytest.mark.parametrize("router", ["eigen", "logit", "cosine", "emoe", "clip-moe"])
    def test_outputs_stay_where_weights_sum_to_one(self, router):
        sparse = ermoe.upcycle(build("test_vit")[0], num_experts=4, router=router)
        images = photographs(64)
        assert distance(outputs(ermoe.to_dense(sparse), images), outputs(sparse, images)) < 1e-4

    @pytest.mark.parametrize("router", ["v-moe", "expert-choice", "soft", "base"])
    def test_elsewhere_it_is_the_model_they_started_from(self, router):
        dense, size = build("test_vit")
        sparse = ermoe.upcycle(dense, num_experts=4, router=router)
        again, images = ermoe.to_dense(sparse), photographs(size)
        assert distance(outputs(again, images), outputs(dense, images)) < 1e-4
        assert distance(outputs(again, images), outputs(sparse, images)) > 1e-2

    def test_it_can_be_made_sparse_again(self):
        dense, size = build("test_vit")
        again = ermoe.upcycle(ermoe.to_dense(ermoe.upcycle(dense)), num_experts=3)
        assert distance(outputs(again, photographs(size)), outputs(dense, photographs(size))) < 1e-4

    def test_nothing_of_the_sparse_model_is_left(self):
        dense, _ = build("test_vit")
        again = ermoe.to_dense(ermoe.upcycle(dense), inplace=True)
        assert vars(again).keys() == vars(dense).keys()
        assert vars(again.blocks[1]).keys() == vars(dense.blocks[1]).keys()

    def test_a_bias_without_a_place_in_the_dense_network(self):
        dense, size = build("test_vit")
        dense.blocks[1].mlp = perturb(Mlp(64, 192, bias=(False, True))).eval()
        sparse = ermoe.upcycle(dense, num_experts=4)
        assert distance(outputs(ermoe.to_dense(sparse), photographs(size)), outputs(dense, photographs(size))) < 1e-4
        with torch.no_grad():
            sparse.blocks[1].mlp.experts.up.bias += 1
        with pytest.raises(ValueError, match="learned a bias where the dense network has none"):
            ermoe.to_dense(sparse)

    def test_experts_that_differ_are_refused(self):
        sparse = ermoe.upcycle(build("test_vit")[0])
        with torch.no_grad():
            sparse.blocks[3].mlp.experts.up.s[2, 0] *= 2
        with pytest.raises(ValueError, match=r"experts of blocks\.3\S* differ"):
            ermoe.to_dense(sparse)

    def test_a_dense_model_is_refused(self):
        with pytest.raises(ValueError, match="not sparse"):
            ermoe.to_dense(build("test_vit")[0])

    @pytest.mark.parametrize("options", [{"num_experts": 1}, {"num_experts": 2, "shared": 32}])
    def test_narrow_networks_cannot_be_dense_again(self, options):
        dense, size = build("test_vit")
        sizes = {"init": "clusters", "hidden_dim": 16, "top_k": 1, "experts": "dense", "blocks": [1]}
        sparse = ermoe.upcycle(dense, calibration=[photographs(size)], **sizes, **options)
        with pytest.raises(ValueError, match="keep only some of the dense network's hidden units"):
            ermoe.to_dense(sparse)


class TestMerge:
    @pytest.mark.parametrize("options", [{}, {"score": "prototype"}, {"score": "energy"}, {"score": "logit"}])
    def test_outputs_and_choices_stay(self, options):
        sparse = apart(ermoe.upcycle(build("test_vit")[0], num_experts=4, **options))
        for layer in moe_layers(sparse).values():  # calibrated ones end where two tokens tie, and rounding decides
            layer.router.balance.offset_E.copy_(torch.tensor([0.02, -0.01, 0.005, -0.015]))
        merged = ermoe.merge(sparse)
        chosen = []
        for model in (sparse, merged):
            model.blocks[1].mlp.observers.append(lambda routing: chosen.append(routing.expert_TK))
        assert distance(outputs(merged, photographs(64)), outputs(sparse, photographs(64))) < 1e-4
        assert torch.equal(chosen[0], chosen[1])
        assert isinstance(merged.blocks[1].mlp.experts.up, DenseLinear)
        assert isinstance(sparse.blocks[1].mlp.experts.up, EigenLinear)

    @pytest.mark.parametrize("name", ["vit_giant_patch14_dinov2", "torchvision", "hugging face"])
    def test_other_families(self, name):
        dense, size = build(name)
        sparse = apart(ermoe.upcycle(dense, num_experts=4))
        assert distance(outputs(ermoe.merge(sparse), photographs(size)), outputs(sparse, photographs(size))) < 1e-4

    def test_a_rank_that_is_cheaper_as_factors_stays(self):
        sparse = ermoe.upcycle(build("test_vit")[0], rank=40)  # 40 < 64 · 192 / 256
        merged = ermoe.merge(sparse)
        assert isinstance(merged.blocks[1].mlp.experts.up, EigenLinear)
        assert torch.equal(outputs(merged, photographs(64)), outputs(sparse, photographs(64)))

    def test_bases_that_moved_are_still_spared_by_weight_decay(self):
        merged = ermoe.merge(ermoe.upcycle(build("test_vit")[0]))
        assert "blocks.1.mlp.router.score.basis" in merged.no_weight_decay()
        assert "blocks.1.mlp.experts.up.U" not in merged.no_weight_decay()

    def test_it_saves_work(self):
        sparse = ermoe.upcycle(build("test_vit")[0])
        assert (
            ermoe.count(ermoe.merge(sparse), 64).multiply_adds.experts < ermoe.count(sparse, 64).multiply_adds.experts
        )

    def test_frozen_stays_frozen(self):
        sparse = ermoe.upcycle(build("test_vit")[0], num_experts=2)
        ermoe.freeze(sparse, "experts")
        merged = ermoe.merge(sparse)
        assert not merged.blocks[1].mlp.experts.up.W.requires_grad
        assert not merged.blocks[1].mlp.router.score.basis.requires_grad


class TestFreeze:
    @pytest.fixture
    def sparse(self):
        return ermoe.upcycle(build("test_vit")[0], num_experts=2, score="prototype")

    def learning(self, model):
        return {name for name, parameter in model.named_parameters() if parameter.requires_grad}

    def test_the_four_parts_are_the_whole_and_do_not_overlap(self, sparse):
        everything = {name for name, _ in sparse.named_parameters()}
        parts = [set(ermoe.freeze(copy.deepcopy(sparse), part)) for part in ("experts", "router", "head", "backbone")]
        assert set.union(*parts) == everything
        assert sum(len(part) for part in parts) == len(everything)

    def test_only_the_experts_learn(self, sparse):
        ermoe.freeze(sparse, "backbone", "head", "router")
        assert self.learning(sparse) == {name for name, _ in sparse.named_parameters() if ".mlp.experts." in name}

    def test_patterns(self, sparse):
        frozen = ermoe.freeze(sparse, "blocks.0.*", "pos_embed")
        assert "pos_embed" in frozen
        assert "blocks.0.attn.qkv.weight" in frozen
        assert "blocks.1.attn.qkv.weight" in self.learning(sparse)

    def test_and_thaw(self, sparse):
        before = self.learning(sparse)
        ermoe.freeze(sparse, "*")
        assert self.learning(sparse) == set()
        ermoe.unfreeze(sparse, "*")
        assert self.learning(sparse) == before

    def test_soft_moe_has_the_same_parts(self):
        sparse = ermoe.upcycle(build("test_vit")[0], num_experts=2, router="soft")
        assert "blocks.1.mlp.phi" in ermoe.freeze(sparse, "router")

    def test_what_does_not_exist_is_named(self, sparse):
        with pytest.raises(ValueError, match=r"'blocks\.9\.\*' names no parameter"):
            ermoe.freeze(sparse, "blocks.9.*")

    def test_nothing_is_no_part(self, sparse):
        for function in (ermoe.freeze, ermoe.unfreeze):
            with pytest.raises(ValueError, match="no part is named: use one of backbone, experts, head, router"):
                function(sparse)


def test_every_accepted_architecture_comes_back_exactly_named():
    for name in ACCEPTED:
        dense, _ = build(name)
        again = ermoe.to_dense(ermoe.upcycle(dense, num_experts=2, blocks=[1]), inplace=True)
        assert again.state_dict().keys() == dense.state_dict().keys(), name
