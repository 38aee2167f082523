"""The fast layer equals the loops of `slow_layer`: outputs and every gradient, in float64, to 1e-9."""

import pytest
import torch
from torch import nn

from ermoe.nn import EigenMoE
from support.slow_layer import slow_layer

DIM, HIDDEN, EXPERTS = 12, 20, 4


def build(seed=0, **options):
    generator = torch.Generator().manual_seed(seed)
    options = {"rank": 10, "route_rank": 5, "num_experts": EXPERTS, "act_layer": nn.GELU} | options
    layer = EigenMoE(DIM, HIDDEN, generator=generator, dtype=torch.float64, **options)
    with torch.no_grad():
        for parameter in layer.parameters():  # nothing at a special value: s, biases and bases all vary
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
        if layer.router.balance is not None:
            layer.router.balance.offset_E.copy_(0.3 * torch.randn(options["num_experts"], generator=generator))
    return layer


def inputs(seed=1, shape=(2, 6)):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, DIM, generator=generator, dtype=torch.float64, requires_grad=True)
    mixed = x.detach() + torch.randn(*shape, DIM, generator=generator, dtype=torch.float64)
    return x, mixed.requires_grad_()


def assert_same(layer, x, context, mask=None):
    """Outputs, gradients of x, of the context and of all parameters."""
    generator = torch.Generator().manual_seed(7)
    upstream = torch.randn(x.shape, generator=generator, dtype=torch.float64)
    wanted = [x, context, *layer.parameters()] if context is not None else [x, *layer.parameters()]
    results = []
    for y in (layer(x, context, mask), slow_layer(layer, x, context, mask)):
        gradients = torch.autograd.grad((y * upstream).sum(), wanted, allow_unused=True)
        results.append([y, *(torch.zeros_like(w) if g is None else g for w, g in zip(wanted, gradients, strict=True))])
    for fast, slow in zip(*results, strict=True):
        torch.testing.assert_close(fast, slow, rtol=0, atol=1e-9)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("below_threshold", ["fill", "prune"])
@pytest.mark.parametrize("balance", ["offset", "mean", "none"])
@pytest.mark.parametrize("score", ["eigenbasis", "prototype", "energy", "logit"])
def test_every_score_balance_and_threshold_mode(score, balance, below_threshold, masked):
    layer = build(score=score, balance=balance, below_threshold=below_threshold)
    x, context = inputs()
    mask = torch.tensor([[True] * 6, [True, False, True, False, False, True]]) if masked else None
    assert_same(layer, x, context if score == "eigenbasis" else None, mask)


@pytest.mark.parametrize("capacity_factor", [None, 0.5, 1.0])
@pytest.mark.parametrize("below_threshold", ["fill", "prune"])
@pytest.mark.parametrize("top_k", [1, 2, 3, EXPERTS])
def test_every_k_with_and_without_capacity(top_k, below_threshold, capacity_factor):
    layer = build(top_k=top_k, below_threshold=below_threshold, capacity_factor=capacity_factor)
    assert_same(layer, *inputs())


@pytest.mark.parametrize(
    "options",
    [
        {"experts": "dense"},
        {"gated": True, "act_layer": nn.SiLU},
        {"experts": "dense", "gated": True, "score": "prototype"},
        {"bias": False},
        {"rank": DIM, "act_layer": nn.ReLU},
        {"shared_dim": 14},
    ],
    ids=lambda options: "-".join(f"{k}={getattr(v, '__name__', v)}" for k, v in options.items()),
)
def test_every_kind_of_expert(options):
    layer = build(**options)
    x, context = inputs()
    assert_same(layer, x, context if options.get("score", "eigenbasis") == "eigenbasis" else None)


@pytest.mark.parametrize("below_threshold", ["fill", "prune"])
def test_one_expert_takes_all_and_the_others_are_empty(below_threshold):
    layer = build(top_k=1, score="prototype", threshold=0.0, below_threshold=below_threshold)
    with torch.no_grad():
        layer.router.balance.offset_E.copy_(torch.tensor([-9.0, -9.0, 9.0, -9.0]))
    x, _ = inputs()
    if below_threshold == "fill":
        assert layer.route(x).count_E.tolist() == [0, 0, 12, 0]
    assert_same(layer, x, None)


def test_all_scores_negative():
    layer = build(threshold=0.2, below_threshold="prune")
    x, noisy = inputs()
    context = (noisy.detach() - 4 * x.detach()).requires_grad_()
    assert layer.route(x, context).fell_back_T.all()
    assert_same(layer, x, context)


@pytest.mark.parametrize("seed", range(5))
def test_random_layers_and_shapes(seed):
    generator = torch.Generator().manual_seed(seed)
    experts = int(torch.randint(2, 7, (), generator=generator))
    top_k = int(torch.randint(1, experts + 1, (), generator=generator))
    layer = build(seed, num_experts=experts, top_k=top_k, threshold=0.6, below_threshold="prune")
    assert_same(layer, *inputs(seed + 100, shape=(3, 4)))
