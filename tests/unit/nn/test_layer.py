"""Promises of the layer: equal experts, ties, order, repeatability, odd inputs, bad arguments."""

import pytest
import torch
from torch import nn

from ermoe.nn import Context, EigenMoE, MoE, Routing, TopKRouter, build_experts, context
from ermoe.nn.order import stable_top_k

SCORES = ["eigenbasis", "prototype", "energy", "logit"]


def build(seed=0, dim=16, **options):
    return EigenMoE(dim, **{"num_experts": 4, "generator": torch.Generator().manual_seed(seed)} | options)


def pair(*shape, seed=1, requires_grad=False):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator).requires_grad_(requires_grad) for _ in range(2)]


@pytest.mark.parametrize("below_threshold", ["fill", "prune"])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("score", SCORES)
def test_equal_experts_compute_their_common_ffn_whatever_the_routing(score, gated, below_threshold):
    layer = build(score=score, gated=gated, below_threshold=below_threshold)
    with torch.no_grad():
        for linear in layer.experts.linears():
            linear.bias.copy_(torch.randn_like(linear.bias[:1]).expand_as(linear.bias))
            signs = torch.where(torch.rand(linear.s.shape) < 0.5, -1.0, 1.0)
            order = torch.stack([torch.randperm(linear.s.shape[1]) for _ in range(4)])
            for name in ("U", "V"):  # the same W through other columns: permuted, and flipped in pairs
                factor = getattr(linear, name)
                columns = factor[:1].expand_as(factor).gather(2, order[:, None].expand_as(factor))
                factor.copy_(columns * signs[:, None])
    x, context = pair(3, 11, 16)
    W = [linear.matrices()[0] for linear in layer.experts.linears()]
    b = [linear.bias[0] for linear in layer.experts.linears()]
    act = layer.experts.act
    hidden = act(x @ W[0] + b[0]) if not gated else act(x @ W[0] + b[0]) * (x @ W[1] + b[1])
    torch.testing.assert_close(layer(x, context), hidden @ W[-1] + b[-1], rtol=0, atol=1e-5)


def test_of_equal_scores_the_lower_id_wins():
    score_TE = torch.tensor([[0.5, 0.7, 0.7, 0.7], [0.1, 0.1, 0.1, 0.1], [0.0, -1.0, 0.0, 0.5]])
    assert stable_top_k(score_TE, 2).tolist() == [[1, 2], [0, 1], [3, 0]]
    wide = torch.zeros(1, 300)  # sorts of long rows take another route inside torch
    assert stable_top_k(wide, 5).tolist() == [[0, 1, 2, 3, 4]]
    router = build(balance="none").router
    assert router.choose(score_TE).expert_TK.tolist() == [[1, 2], [0, 1], [3, 0]]


def test_weights_follow_the_plain_scores_even_where_offsets_chose():
    router = build(top_k=2).router
    router.balance.offset_E.copy_(torch.tensor([0.0, 0.0, 2.0, 0.0]))
    routing = router.choose(torch.tensor([[0.799, 0.3, 0.199, -0.5]]))
    assert routing.expert_TK.tolist() == [[2, 0]]
    torch.testing.assert_close(routing.weight_TK, torch.tensor([[0.2, 0.8]]))


def test_a_floor_evens_the_mixture_out():
    """(0.5 + ε) : (0 + ε), the second score being negative."""
    for floor, expected in ((1e-3, [0.501 / 0.502, 0.001 / 0.502]), (1.0, [0.6, 0.4])):
        layer = EigenMoE(8, num_experts=2, route_rank=2, weight_floor=floor)
        weight = layer.router.choose(torch.tensor([[0.5, -0.5]])).weight_TK
        torch.testing.assert_close(weight, torch.tensor([expected]))
    with pytest.raises(ValueError, match="weight_floor=0: need a positive number"):
        EigenMoE(8, num_experts=2, route_rank=2, weight_floor=0)


def test_weights_of_hopeless_scores_are_shared_equally():
    routing = build().router.choose(torch.full((1, 4), -0.3))
    torch.testing.assert_close(routing.weight_TK, torch.full((1, 2), 0.5))
    assert routing.fell_back_T.tolist() == [True]


def test_a_token_falls_back_strictly_below_the_threshold():
    routing = build(threshold=0.5, balance="none").router.choose(torch.tensor([[0.5, 0, 0, 0], [0.4999, 0, 0, 0]]))
    assert routing.fell_back_T.tolist() == [False, True]


def test_capacity_drops_are_counted():
    layer = build(top_k=1, balance="none", capacity_factor=0.5, threshold=0.0)
    routing = layer.router.choose(torch.tensor([[1.0, 0, 0, 0]]).expand(8, 4), num_groups=1)
    assert int(routing.num_dropped) == 7
    assert routing.count_E.tolist() == [1, 0, 0, 0]
    assert routing.kept_TK.flatten().tolist() == [True] + [False] * 7


def test_the_dense_weights_are_the_flat_assignment():
    routing = Routing.from_choice(torch.tensor([[2, 0], [1, 2]]), torch.tensor([[0.7, 0.3], [0.4, 0.6]]), num_experts=3)
    torch.testing.assert_close(routing.dense_weights(), torch.tensor([[0.3, 0, 0.7], [0, 0.4, 0.6]]))


@pytest.mark.parametrize("score", SCORES)
def test_permuting_tokens_permutes_the_output(score):
    layer = build(score=score)
    x, context = pair(50, 16)
    order = torch.randperm(50, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(layer(x[order], context[order]), layer(x, context)[order], rtol=0, atol=1e-6)


def test_two_runs_with_one_seed_are_bit_identical():
    runs = []
    for _ in range(2):
        layer = build(dim=32, drop=0.1, below_threshold="prune")
        torch.manual_seed(5)
        x, context = pair(8, 40, 32, requires_grad=True)
        y = layer(x, context)
        y.square().sum().backward()
        runs.append([y, x.grad, context.grad, *(p.grad for p in layer.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("shape", [(0, 5, 16), (2, 0, 16), (0, 16), (1, 1, 16), (1, 16), (7, 16), (2, 3, 4, 16)])
@pytest.mark.parametrize("score", SCORES)
def test_any_number_of_tokens_in_any_shape(score, shape):
    layer = build(score=score, capacity_factor=1.0)
    x, context = pair(*shape, requires_grad=True)
    y = layer(x, context)
    y.sum().backward()
    alpha = torch.rand(*shape[:-1], shape[-2])
    assert layer(x, Context(alpha)).shape == layer(x, Context(alpha, context)).shape == x.shape
    assert y.shape == x.shape
    assert torch.isfinite(y).all()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in layer.parameters())


@pytest.mark.parametrize("below_threshold", ["fill", "prune"])
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("case", ["equal", "zero", "zero context", "huge", "tiny", "orthogonal"])
def test_degenerate_tokens_give_finite_outputs_and_gradients(case, score, below_threshold):
    layer = build(score=score, below_threshold=below_threshold)
    x, context = pair(2, 6, 16)
    if case == "equal":
        x, context = x[:1, :1].expand(2, 6, 16).clone(), context[:1, :1].expand(2, 6, 16).clone()
    elif case == "zero":
        x, context = torch.zeros(2, 6, 16), torch.zeros(2, 6, 16)
    elif case == "zero context":
        context = torch.zeros(2, 6, 16)
    elif case == "orthogonal":  # to every routing column of expert 0
        basis = layer.experts.token_basis[0, :, : layer.router.score.route_rank or 1].detach()
        x = x - x @ basis @ basis.T
    else:
        x = x * (1e12 if case == "huge" else 1e-12)
    x, context = x.requires_grad_(), context.requires_grad_()
    y = layer(x, context)
    y.sum().backward()
    assert torch.isfinite(y).all()
    assert torch.isfinite(x.grad).all()
    assert all(torch.isfinite(p.grad).all() for p in layer.parameters())


def test_padded_tokens_get_zeros_and_change_nothing_for_the_others():
    layer = build(capacity_factor=0.6).train()
    x, context = pair(3, 8, 16)
    mask = torch.ones(3, 8, dtype=torch.bool)
    mask[0, 3:] = False
    mask[2] = False
    noisy_x, noisy_context = x.clone(), context.clone()
    noisy_x[~mask], noisy_context[~mask] = 1e6, -1e6
    y = layer(x, context, mask)
    assert (y[~mask] == 0).all()
    assert torch.equal(layer(noisy_x, noisy_context, mask)[mask], y[mask])
    routing = layer.route(x, context, mask)
    assert set(routing.token_A.tolist()) <= set(mask.flatten().nonzero().flatten().tolist())
    assert not routing.fell_back_T[~mask.flatten()].any()
    before = layer.router.balance._accumulator.clone()
    layer(x[2:], context[2:], mask[2:])
    assert torch.equal(layer.router.balance._accumulator, before)


@pytest.mark.parametrize("every_expert", [False, True])
def test_not_even_nan_leaks_out_of_padding(every_expert):
    layer = build().train()
    layer.every_expert = every_expert
    x, context = pair(2, 8, 16)
    mask = torch.ones(2, 8, dtype=torch.bool)
    mask[0, 3:] = False
    expected = layer(x, context, mask)
    x[~mask], context[~mask] = torch.nan, torch.inf
    y = layer(x, context, mask)
    assert torch.equal(y, expected)
    y.square().sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in layer.parameters())
    assert layer.router.balance._accumulator.isfinite().all()


@pytest.mark.parametrize("route_rank", [2, 7])  # 16 and 56 columns for a width of 32: before the average, or after it
@pytest.mark.parametrize("of_tokens", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_a_context_yet_to_be_averaged_is_one_that_was(route_rank, of_tokens, masked):
    torch.manual_seed(0)
    layer = EigenMoE(32, num_experts=8, route_rank=route_rank).double()
    x, z = (torch.randn(2, 3, 9, 32, dtype=torch.float64, requires_grad=True) for _ in range(2))
    alpha = torch.rand(2, 3, 9, 9, dtype=torch.float64).softmax(-1).requires_grad_()
    mask = torch.arange(9) < torch.tensor([9, 5, 7]).unsqueeze(-1) if masked else None
    mask = None if mask is None else mask.expand(2, 3, 9)
    seen = x if of_tokens else z
    results = []
    for given in (Context(alpha, None if of_tokens else z), context(alpha, _real(seen, mask))):
        y = layer(x, given, mask)
        leaves = [x, alpha, *([] if of_tokens else [z]), layer.experts.up.U]
        results.append((y, *torch.autograd.grad(y.square().sum(), leaves)))
    for yet, was in zip(*results, strict=True):
        torch.testing.assert_close(yet, was, rtol=0, atol=1e-9)


def _real(x, mask):
    return x if mask is None else x.masked_fill(~mask.unsqueeze(-1), 0)


def test_routing_counts_nothing_and_evaluation_neither():
    layer = build()
    x, context = pair(2, 6, 16)
    layer.route(x, context)
    layer.eval()(x, context)
    assert not layer.router.balance._accumulator.any()
    layer.train()(x, context)
    assert layer.router.balance._accumulator[:4].sum() == 2 * 12


def test_routing_gives_the_bases_a_gradient_unless_k_is_one():
    x, context = pair(20, 16)
    largest = {}
    for top_k in (1, 2):
        layer = build(top_k=top_k, experts="dense")
        layer(x, context).square().sum().backward()
        largest[top_k] = layer.router.score.basis.grad.abs().max()
    assert largest[2] > 0.1
    assert largest[1] < 1e-4 * largest[2]  # rounding only


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 5}, "top_k=5: need 1 <= top_k <= num_experts=4"),
        ({"top_k": 0}, "top_k=0"),
        ({"num_experts": 0}, "num_experts=0: need at least one"),
        ({"threshold": 1.0}, "threshold=1.0: need 0 <= threshold < 1"),
        ({"threshold": -0.1}, "threshold=-0.1"),
        ({"threshold": float("nan")}, "threshold=nan"),
        ({"rank": 17}, "rank=17: .* use 1 <= rank <= 16"),
        ({"rank": 0}, "rank=0"),
        ({"rank": 9, "hidden_dim": 8}, "rank=9: .* use 1 <= rank <= 8"),
        ({"route_rank": 9, "rank": 8}, "route_rank=9: .* use 1 <= route_rank <= 8"),
        ({"route_rank": 0}, "route_rank=0"),
        ({"score": "cosine"}, "score='cosine': use 'eigenbasis', 'prototype', 'energy' or 'logit'"),
        ({"balance": "loss"}, "balance='loss': use 'offset', 'mean' or 'none'"),
        ({"below_threshold": "drop"}, "below_threshold='drop': use 'fill'"),
        ({"capacity_factor": 0.0}, "capacity_factor=0.0: use a positive number, or None"),
        ({"capacity_factor": float("nan")}, "capacity_factor=nan"),
        ({"experts": "lora"}, "experts='lora': use 'eigen' or 'dense'"),
    ],
    ids=lambda value: "" if isinstance(value, str) else "-".join(map(str, value)),
)
def test_bad_arguments_name_the_remedy(options, message):
    with pytest.raises(ValueError, match=message):
        build(**options)


def test_bad_inputs_name_the_remedy():
    with pytest.raises(ValueError, match="need a weight for each two tokens"):
        EigenMoE(16, num_experts=2)(torch.randn(1, 5, 16), Context(torch.rand(1, 5, 4)))
    layer = build()
    x, context = pair(2, 5, 16)
    with pytest.raises(ValueError, match=r"context has shape \(2, 4, 16\), x has \(2, 5, 16\)"):
        layer(x, context[:, :4])
    with pytest.raises(ValueError, match=r"mask has shape \(2, 4\): need \(2, 5\), True for real tokens"):
        layer(x, context, torch.ones(2, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"mask is torch.float32: need torch.bool"):
        layer(x, context, torch.ones(2, 5))
    with pytest.raises(ValueError, match=r"x has shape \(16,\): need \(..., tokens, width\)"):
        layer(x[0, 0], context[0, 0])
    with pytest.raises(ValueError, match="x has width 15, the experts have 16"):
        layer(x[..., :15], context[..., :15])


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_nan_is_refused_when_anomaly_detection_is_on():
    layer = build()
    x, context = pair(2, 5, 16)
    context[0, 0, 0] = float("nan")
    layer(x, context)
    with torch.autograd.set_detect_anomaly(True), pytest.raises(ValueError, match="context holds NaN or infinity"):
        layer(x, context)


def test_router_and_experts_must_agree():
    router = build().router
    assert isinstance(router, TopKRouter)
    with pytest.raises(ValueError, match="chooses among 4 experts, but there are 3"):
        MoE(router, build_experts(16, 32, num_experts=3))


def test_state_dict_round_trip_keeps_the_offsets():
    layer = build()
    layer.router.balance.offset_E.copy_(torch.tensor([0.1, -0.2, 0.3, 0.0]))
    copy = build(seed=9)
    copy.load_state_dict(layer.state_dict())
    x, context = pair(30, 16)
    assert torch.equal(copy(x, context), layer(x, context))
    assert "router.balance.offset_E" in layer.state_dict()


def test_dropout_and_activation_are_the_ones_asked_for():
    layer = build(drop=0.5, act_layer=nn.ReLU)
    assert isinstance(layer.experts.act, nn.ReLU)
    x, context = pair(30, 16)
    torch.manual_seed(0)
    assert not torch.equal(layer(x, context), layer(x, context))
    layer.eval()
    assert torch.equal(layer(x, context), layer(x, context))
