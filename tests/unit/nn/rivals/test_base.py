import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment
from torch import nn
from torch.testing import assert_close

from ermoe.nn.rivals.assignment import balanced_assignment
from ermoe.nn.rivals.base import BaseRouter
from support import slow_routers as slow
from support.base_layer import BaseLayer
from support.routers import DIM, EXPERTS, HIDDEN, build, inputs


def best_total(score):
    """By scipy: every expert has ⌈T/E⌉ columns, of which ⌊T/E⌋ must be filled (a bonus no score can outweigh)."""
    num_tokens, num_experts = score.shape
    columns = np.repeat(score, -(-num_tokens // num_experts), axis=1)
    needed = np.arange(columns.shape[1]) % -(-num_tokens // num_experts) < num_tokens // num_experts
    bonus = 10 * (np.abs(score).max() + 1) * num_tokens
    rows, chosen = linear_sum_assignment(columns + bonus * needed, maximize=True)
    return columns[rows, chosen].sum()


def check(score):
    assigned = balanced_assignment(torch.from_numpy(score)).numpy()
    load = np.bincount(assigned, minlength=score.shape[1])
    assert load.max() - load.min() <= 1
    total = score[np.arange(len(score)), assigned].sum()
    assert total == pytest.approx(best_total(score), rel=1e-9, abs=1e-9)
    return assigned


@pytest.mark.parametrize(("tokens", "experts"), [(1, 1), (3, 5), (8, 8), (32, 4), (37, 5), (200, 7), (256, 16)])
@pytest.mark.parametrize("kind", ["gaussian", "skewed", "integers", "equal", "repeated"])
def test_assignment_is_the_best_one(tokens, experts, kind):
    random = np.random.default_rng(tokens * experts)
    score = random.normal(size=(tokens, experts))
    if kind == "skewed":
        score = score + 10 * random.normal(size=experts)
    elif kind == "integers":
        score = np.round(score)
    elif kind == "equal":
        score = np.zeros_like(score)
    elif kind == "repeated":
        score = score[random.integers(0, max(tokens // 10, 1), tokens)]
    check(score)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 12), st.integers(1, 5), st.integers(0, 10**6), st.sampled_from([1.0, 1e-9, 1e9]))
def test_assignment_of_small_random_cases(tokens, experts, seed, scale):
    check(scale * np.random.default_rng(seed).integers(-4, 5, size=(tokens, experts)).astype(float))


def test_assignment_by_trying_everything():
    score = np.random.default_rng(0).normal(size=(6, 3))
    balanced = [a for a in itertools.product(range(3), repeat=6) if all(a.count(e) == 2 for e in range(3))]
    best = max(balanced, key=lambda a: score[range(6), a].sum())
    assert check(score).tolist() == list(best)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_scores_that_are_no_numbers_are_refused(bad):
    with pytest.raises(ValueError, match="NaN or infinity"):
        balanced_assignment(torch.tensor([[1.0, 2.0], [bad, 0.0]]))
    with pytest.raises(ValueError, match="NaN or infinity"):
        BaseRouter(4, num_experts=2)(torch.full((1, 3, 4), bad))


def test_no_tokens():
    assert balanced_assignment(torch.zeros(0, 4)).tolist() == []


def test_the_layer_against_a_loop():
    layer = build("base", dtype=torch.float64)
    x, _ = inputs(batch=3, tokens=10, dtype=torch.float64)
    tokens = x.view(-1, DIM)
    score = tokens @ layer.router.centroid_ED.T
    for training in (True, False):
        layer.train(training)
        expert = balanced_assignment(score) if training else score.argmax(-1)
        weight = torch.zeros_like(score).scatter(1, expert[:, None], score.gather(1, expert[:, None]).sigmoid())
        assert_close(layer(x).view(-1, DIM), slow.experts_loop(layer.experts, tokens, weight))


def test_training_balances_over_the_batch_and_inference_does_not():
    layer = build("base")
    x = inputs()[0] + 3.0  # a common direction: greedily, most tokens want the same expert
    assert layer.route(x).count_E.tolist() == [12] * EXPERTS
    alone = torch.cat([layer.route(image).expert_TK for image in x])
    assert not torch.equal(alone, layer.route(x).expert_TK)
    layer.eval()
    assert int(layer.route(x).count_E.max()) > 12
    alone = torch.cat([layer.route(image).expert_TK for image in x])
    assert torch.equal(alone, layer.route(x).expert_TK)


def test_expert_vectors_learn_through_the_mixing_weight_alone():
    layer = build("base")
    x, _ = inputs()
    routing = layer.route(x)
    (gradient,) = torch.autograd.grad(routing.weight_A.sum(), layer.router.centroid_ED)
    slope = routing.weight_A * (1 - routing.weight_A)
    expected = torch.zeros_like(gradient).index_add(0, routing.expert_A, slope[:, None] * x.view(-1, DIM))
    assert_close(gradient, expected.detach())


def original(layer, h_TD, expert_T, mask_T):
    """y = α N_e(h) + (1 − α) h, token by token."""
    rows = []
    for h, e, is_real in zip(h_TD, expert_T.tolist(), mask_T.tolist(), strict=True):
        u = h[None]
        for number, experts in enumerate(layer.experts.stack):
            weight, bias = layer.experts.ln_weight_LED[number, e], layer.experts.ln_bias_LED[number, e]
            u = u + slow.run_expert(experts, e, nn.functional.layer_norm(u, (DIM,), weight, bias))
        alpha = (h @ layer.router.centroid_ED[e]).sigmoid()
        rows.append((alpha * u[0] + (1 - alpha) * h) * is_real)
    return torch.stack(rows)


@pytest.mark.parametrize("num_sublayers", [1, 3])
@pytest.mark.parametrize("act_layer", [nn.ReLU, nn.GELU])
@pytest.mark.parametrize("masked", [False, True])
def test_the_original_layer_against_a_loop(num_sublayers, act_layer, masked):
    generator = torch.Generator().manual_seed(0)
    layer = BaseLayer(
        DIM,
        HIDDEN,
        num_experts=EXPERTS,
        num_sublayers=num_sublayers,
        act_layer=act_layer,
        generator=generator,
        dtype=torch.float64,
    )
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    h, _ = inputs(batch=2, tokens=9, dtype=torch.float64)
    mask = torch.arange(9).expand(2, -1) < (6 if masked else 9)
    routing = layer.route(h, mask=mask if masked else None)
    expected = original(layer, h.view(-1, DIM), routing.expert_TK[:, 0], mask.reshape(-1)).view(h.shape)
    for every_expert in (False, True):
        layer.every_expert = every_expert
        y = layer(h, mask=mask if masked else None)
        assert_close(y, expected)
        losses = (y.square().sum(), expected.square().sum())
        fast, obvious = (torch.autograd.grad(loss, list(layer.parameters()), retain_graph=True) for loss in losses)
        assert_close(fast, obvious)


def test_the_original_layer_starts_as_the_identity_also_from_the_meta_device():
    layer = BaseLayer(DIM, num_experts=EXPERTS, num_sublayers=2, device="meta")
    layer.to_empty(device="cpu")
    layer.reset_parameters(torch.Generator().manual_seed(0))
    x, _ = inputs()
    assert torch.equal(layer(x), x)
    with pytest.raises(ValueError, match="num_sublayers=0"):
        BaseLayer(DIM, num_sublayers=0)
