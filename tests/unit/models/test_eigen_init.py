"""Singular directions shared out over experts, and the best truncation where the rank is cut."""

import pytest
import timm
import torch

import ermoe
from ermoe.models.eigen_init import interleaved, svd
from ermoe.models.families.timm_vit import FAMILY
from support.backbones import build, outputs, photographs


@pytest.mark.parametrize(("num_experts", "rank"), [(1, 5), (4, 16), (4, 18), (8, 8), (5, 3)])
def test_every_expert_has_every_direction_once(num_experts, rank):
    order = interleaved(num_experts, rank)
    assert order.shape == (num_experts, rank)
    assert torch.equal(order.sort(dim=1).values, torch.arange(rank).expand(num_experts, -1))


@pytest.mark.parametrize("shape", [(12, 30), (30, 12), (9, 9), (1, 5)])
@pytest.mark.parametrize("smallest", [1.0, 1e-3, 1e-9, 0.0])
def test_decomposition_against_the_general_one(shape, smallest):
    generator = torch.Generator().manual_seed(0)
    left, s, right = torch.linalg.svd(torch.randn(shape, generator=generator).double(), full_matrices=False)
    s = torch.cat([s[:-1], s[:1] * smallest]).sort(descending=True).values
    weight = (left * s) @ right
    U, found, V = svd(weight)
    identity = torch.eye(min(shape)).double()
    assert torch.allclose(found, s, atol=1e-7)
    assert torch.allclose((U * found) @ V.mT, weight, atol=1e-7)
    assert torch.allclose(U.mT @ U, identity, atol=1e-7)
    assert torch.allclose(V.mT @ V, identity, atol=1e-7)


def test_the_first_columns_are_the_experts_own_share():
    order = interleaved(4, 32)
    for expert in range(4):
        assert order[expert, :8].tolist() == list(range(expert, 32, 4))


@pytest.mark.parametrize("experts", ["eigen", "dense"])
def test_routing_subspaces_are_mutually_orthogonal_singular_directions(experts):
    dense, _ = build("test_vit")
    layer = ermoe.upcycle(dense, num_experts=4, route_rank=16, experts=experts).blocks[1].mlp
    basis = (layer.experts.token_basis if experts == "eigen" else layer.router.score.basis).detach()
    columns = basis[:, :, :16].transpose(0, 1).flatten(1)  # D × E r, here square
    assert torch.allclose(columns.T @ columns, torch.eye(64), atol=1e-5)
    weight = dense.blocks[1].mlp.fc1.weight.detach().T
    left, s, _ = torch.linalg.svd(weight, full_matrices=False)
    for expert in range(4):
        for column, direction in enumerate(range(expert, 64, 4)):
            assert abs(float(left[:, direction] @ basis[expert, :, column])) > 0.999
    if experts == "eigen":
        assert torch.allclose(layer.experts.up.s[2, :16], s[2::4], atol=1e-4)


class TestExpertsThatNothingWouldTellApart:
    @pytest.mark.parametrize(
        "options",
        [
            {"num_experts": 65},
            {"num_experts": 65, "experts": "dense"},
            {"num_experts": 9, "rank": 8, "route_rank": 4},
            {"num_experts": 4, "rank": 16, "route_rank": 16},
            {"num_experts": 65, "score": "energy"},
        ],
    )
    def test_they_are_refused(self, options):
        with pytest.raises(ValueError, match=r"^num_experts=.*singular directions to share out"):
            ermoe.upcycle(build("test_vit")[0], **options)

    @pytest.mark.parametrize(
        "options",
        [{"num_experts": 64}, {"num_experts": 8, "rank": 8, "route_rank": 7}, {"num_experts": 60, "rank": 60}],
    )
    def test_up_to_the_last_direction_scores_differ(self, options):
        sparse = ermoe.upcycle(build("test_vit")[0], blocks=[1], **options)
        seen = []
        sparse.blocks[1].mlp.observers.append(seen.append)
        outputs(sparse, photographs(64))
        score_ET = seen[0].score_TE.T
        assert float(torch.pdist(score_ET, p=torch.inf).min()) > 1e-3

    @pytest.mark.parametrize("options", [{"score": "prototype"}, {"score": "logit"}, {"router": "v-moe"}])
    def test_where_something_else_does_they_are_welcome(self, options):
        sparse = ermoe.upcycle(build("test_vit")[0], num_experts=65, blocks=[1], **options)
        assert sparse.blocks[1].mlp.experts.num_experts == 65


def test_a_gated_network_routes_by_its_gate():
    dense, _ = build("vit_small_plus_patch16_dinov3")
    layer = ermoe.upcycle(dense, num_experts=4, experts="dense").blocks[1].mlp
    left = torch.linalg.svd(dense.blocks[1].mlp.fc1_g.weight.detach().T, full_matrices=False)[0]
    assert abs(float(left[:, 1] @ layer.router.score.basis.detach()[1, :, 0])) > 0.999


@pytest.mark.parametrize("name", ["test_vit", "vit_giant_patch14_dinov2", "vit_small_plus_patch16_dinov3"])
def test_an_ffn_seen_through_its_weights_computes_what_its_module_does(name):
    block = build(name)[0].blocks[1]
    x = torch.randn(7, 64)
    with torch.no_grad():
        assert torch.allclose(FAMILY.ffn(block)(x), block.mlp(x), atol=1e-5)


def test_a_network_without_biases_keeps_none():
    model = timm.create_model("test_vit", proj_bias=False).eval()
    layer = ermoe.upcycle(model, num_experts=2).blocks[1].mlp
    assert layer.experts.up.bias is None
    images = photographs(96)
    assert torch.allclose(outputs(ermoe.upcycle(model, rank=64), images), outputs(model, images), atol=1e-4)
