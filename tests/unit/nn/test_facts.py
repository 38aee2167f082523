"""The two facts that shape the method (docs/explanation/facts.md), and what follows from them."""

import pytest
import torch

from ermoe.nn import EigenbasisScore, EigenMoE, EnergyScore, PrototypeScore
from ermoe.nn.basis import random_basis


def tokens(seed=0, num=200, dim=32):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num, dim, generator=generator, dtype=torch.float64)
    return x, x + torch.randn(num, dim, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("score", [EigenbasisScore(32), EnergyScore(32)], ids=["eigenbasis", "energy"])
def test_a_square_basis_gives_every_expert_the_same_score(score):
    x, context = tokens()
    basis = random_basis(8, 32, 32, generator=torch.Generator().manual_seed(1)).double()
    basis = torch.linalg.qr(basis)[0]  # orthonormal to the last bit of float64
    score_TE = score(x, context, basis)
    assert (score_TE.amax(1) - score_TE.amin(1)).max() < 1e-12
    expected = torch.cosine_similarity(x, context) if isinstance(score, EigenbasisScore) else torch.ones(200).double()
    torch.testing.assert_close(score_TE[:, 0], expected)


def test_a_narrow_basis_tells_experts_apart():
    x, context = tokens()
    basis = random_basis(8, 32, 8, generator=torch.Generator().manual_seed(1)).double()
    score_TE = EigenbasisScore(8)(x, context, basis)
    assert (score_TE.amax(1) - score_TE.amin(1)).mean() > 0.3


def test_prototypes_route_even_in_a_square_basis():
    x, _ = tokens()
    basis = random_basis(8, 32, 32, generator=torch.Generator().manual_seed(1)).double()
    score = PrototypeScore(8, 32, generator=torch.Generator().manual_seed(2))
    score_TE = score(x, None, basis)
    assert (score_TE.amax(1) - score_TE.amin(1)).mean() > 0.3


@pytest.mark.parametrize("balance", ["none", "offset"])
def test_with_fill_the_threshold_changes_the_statistic_and_never_the_choice(balance):
    x, context = (part.float() for part in tokens())
    choices, rates = [], []
    for threshold in (0.0, 0.3, 0.5, 0.9):
        layer = EigenMoE(32, threshold=threshold, balance=balance, generator=torch.Generator().manual_seed(3))
        routing = layer.route(x, context)
        choices.append((routing.expert_TK, routing.weight_TK))
        rates.append(routing.fell_back_T.float().mean().item())
    for experts, weights in choices[1:]:
        assert torch.equal(experts, choices[0][0])
        assert torch.equal(weights, choices[0][1])
    assert rates == sorted(rates)
    assert rates[0] < 0.01 < 0.2 < rates[-1]


def test_with_prune_the_threshold_is_an_activation_budget():
    x, context = (part.float() for part in tokens())
    used = []
    for threshold in (0.0, 0.5, 0.8, 0.99):
        layer = EigenMoE(
            32, top_k=3, threshold=threshold, below_threshold="prune", generator=torch.Generator().manual_seed(3)
        )
        routing = layer.route(x, context)
        used.append(len(routing.token_A) / 200)
        assert (
            routing.score_TE.gather(1, routing.expert_TK)[routing.kept_TK & ~routing.fell_back_T[:, None]] >= threshold
        ).all()
        assert (routing.kept_TK.sum(1)[routing.fell_back_T] == 1).all()
        best = routing.score_TE.argmax(1)[routing.fell_back_T]
        assert torch.equal(routing.expert_TK[routing.fell_back_T, 0], best)
        torch.testing.assert_close(routing.weight_TK.sum(1), torch.ones(200))
    assert used == sorted(used, reverse=True)
    assert used[0] > 2.5
    assert used[-1] < 1.2


@pytest.mark.parametrize("score", ["eigenbasis", "energy"])
def test_a_square_routing_basis_is_refused_with_the_reason(score):
    with pytest.raises(ValueError, match=r"square orthonormal basis preserves lengths and angles.*use route_rank < 16"):
        EigenMoE(16, route_rank=16, score=score)


def test_a_missing_context_is_refused_with_the_reason():
    with pytest.raises(ValueError, match=r"without one every score is 1.*ContextAttention.*'prototype'"):
        EigenMoE(16, num_experts=2)(torch.randn(1, 3, 16))


def test_without_a_context_every_score_would_be_one():
    x, _ = tokens()
    basis = random_basis(8, 32, 8).double()
    score_TE = EigenbasisScore(8)(x, x, basis)
    torch.testing.assert_close(score_TE, torch.ones_like(score_TE))


def test_cosine_is_scale_free():
    x, context = tokens()
    basis = random_basis(8, 32, 8).double()
    score = EigenbasisScore(8)
    torch.testing.assert_close(score(1e-4 * x, 1e5 * context, basis), score(x, context, basis))


@pytest.mark.parametrize(
    ("dim", "num_experts", "rank", "expected"), [(768, 8, 768, 96), (768, 8, 504, 56), (64, 8, 64, 8), (16, 8, 4, 4)]
)
def test_default_route_rank(dim, num_experts, rank, expected):
    layer = EigenMoE(dim, 2 * dim, num_experts=num_experts, rank=rank, device="meta")
    assert layer.router.score.route_rank == expected
