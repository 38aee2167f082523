"""The fast layer equals the loops of `slow_layer`: outputs and every gradient, in float64, to 1e-9.

Every fast path is forced through these loops in turn, whatever the sizes here would have chosen.
"""

import pytest
import torch
from torch import nn

from ermoe.nn import Context, EigenMoE, Experts, products, scores
from support.slow_layer import slow_expert, slow_layer

DIM, HIDDEN, EXPERTS = 12, 20, 4


def build(seed=0, **options):
    generator = torch.Generator().manual_seed(seed)
    options = {"rank": 10, "route_rank": 5, "num_experts": EXPERTS, "act_layer": nn.GELU} | options
    layer = EigenMoE(DIM, HIDDEN, generator=generator, dtype=torch.float64, **options)
    with torch.no_grad():
        for parameter in layer.parameters():  # nothing at a special value: s, biases and bases all vary
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
        balance = getattr(layer.router, "balance", None)  # a single expert has none
        if balance is not None:
            balance.offset_E.copy_(0.3 * torch.randn(options["num_experts"], generator=generator))
    return layer


def inputs(seed=1, shape=(2, 6)):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, DIM, generator=generator, dtype=torch.float64, requires_grad=True)
    mixed = x.detach() + torch.randn(*shape, DIM, generator=generator, dtype=torch.float64)
    return x, mixed.requires_grad_()


def assert_same(layer, x, context, mask=None, atol=1e-9):
    """Outputs, gradients of x, of the context and of all parameters."""
    generator = torch.Generator().manual_seed(7)
    upstream = torch.randn(x.shape, generator=generator, dtype=x.dtype)
    wanted = [x, context, *layer.parameters()] if context is not None else [x, *layer.parameters()]
    results = []
    for y in (layer(x, context, mask), slow_layer(layer, x, context, mask)):
        gradients = torch.autograd.grad((y * upstream).sum(), wanted, allow_unused=True)
        results.append([y, *(torch.zeros_like(w) if g is None else g for w, g in zip(wanted, gradients, strict=True))])
    for fast, slow in zip(*results, strict=True):
        torch.testing.assert_close(fast, slow, rtol=0, atol=atol)


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
        {"routing_basis": "own"},
        {"routing_basis": "own", "score": "prototype"},
        {"routing_basis": "shared", "score": "prototype"},
    ],
    ids=lambda options: "-".join(f"{k}={getattr(v, '__name__', v)}" for k, v in options.items()),
)
def test_every_kind_of_expert_and_basis(options):
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


@pytest.fixture
def forced(monkeypatch):
    """Makes a layer take one way to its experts and one form of U diag(s) Vᵀ, and proves that it went there."""

    def force(layer, way, form):
        pad, grouped = way == "padded", way == "grouped"
        monkeypatch.setattr(products, "pays_to_pad", lambda count_E, width: pad)
        monkeypatch.setattr(products, "pays_in_turn", lambda *given: False)
        monkeypatch.setattr(Experts, "prefers_grouped", lambda self, x: grouped)
        layer.every_expert, layer.expert_by_expert = way == "every_expert", way == "expert_by_expert"
        # By the number of rows an expert has, s goes with the rows, into the shorter basis, or W is built first.
        rows = {"s with rows": 0, "s in a basis": DIM + 1}.get(form, 10**9)
        for kind in (products._OneExpert, products._RowsInTurn, products._GroupedRows, products._AllExperts):
            monkeypatch.setattr(kind, "rows_per_expert", lambda self, x: rows)
        monkeypatch.setattr(products, "_SMALL_STACK", 0 if form == "W of one" else 2**20)
        taken = {"at_a_time": "expert_at_a_time", "every_expert": "batched", "expert_by_expert": "one_of_many"}
        return spied(monkeypatch, products, taken.get(way, way))

    return force


def spied(monkeypatch, module, name):
    """A list that grows whenever the function runs."""
    calls, function = [], getattr(module, name)
    monkeypatch.setattr(module, name, lambda *given, **named: calls.append(name) or function(*given, **named))
    return calls


@pytest.mark.parametrize("options", [{}, {"gated": True, "act_layer": nn.SiLU}, {"capacity_factor": 0.5}], ids=str)
@pytest.mark.parametrize("form", ["s with rows", "s in a basis", "W of all", "W of one"])
@pytest.mark.parametrize("way", ["at_a_time", "padded", "every_expert", "expert_by_expert", "grouped"])
def test_every_way_to_the_experts(way, form, options, forced):
    layer = build(rank=DIM, **options)  # full rank: W costs fewer operations than its factors
    (x, context), atol = inputs(), 1e-9
    if way == "grouped":  # a kernel that knows no float64
        layer, atol = layer.float(), 1e-4
        x, context = (given.detach().float().requires_grad_() for given in (x, context))
    calls = forced(layer, way, form)
    mask = torch.tensor([[True] * 6, [True, False, True, False, False, True]])
    assert_same(layer, x, context, mask, atol)
    assert calls


@pytest.mark.parametrize("options", [{}, {"gated": True, "act_layer": nn.SiLU}, {"bias": False}, {"top_k": 1}], ids=str)
@pytest.mark.parametrize("form", ["s with rows", "s in a basis", "W of all"])
@pytest.mark.parametrize("offsets", [None, [-9.0, 9.0, -9.0, -9.0]], ids=["all", "one takes all"])
def test_a_product_at_a_time_without_gradients(offsets, form, options, forced, monkeypatch):
    layer = build(rank=DIM, **options).eval()
    if offsets is not None:
        layer.router.balance.offset_E.copy_(torch.tensor(offsets))
    x, context = (given.detach() for given in inputs())
    forced(layer, "at_a_time", form)
    calls = spied(monkeypatch, products, "product_at_a_time")
    monkeypatch.setattr(products, "pays_in_turn", lambda *given: True)
    for mask in (None, torch.tensor([[True] * 6, [True, False, True, False, False, True]])):
        slow = slow_layer(layer, x, context, mask).detach()
        for without_gradients in (torch.no_grad, torch.inference_mode):
            with without_gradients():
                torch.testing.assert_close(layer(x, context, mask), slow, rtol=0, atol=1e-9)
    assert len(calls) == 4
    with torch.no_grad():
        assert layer(x[:0], context[:0]).shape == (0, 6, DIM)
        layer.train()(x, context)
    assert len(calls) == 5, "in training, checkpointing repeats what ran without gradients with them"


def test_a_product_at_a_time_keeps_to_what_it_can():
    x_AD, weight = torch.randn(600, DIM), torch.randn(EXPERTS, DIM, HIDDEN)
    assert not products.pays_in_turn(x_AD, weight, HIDDEN), "products that write into a result have no gradients"
    with torch.no_grad():
        assert products.pays_in_turn(x_AD, weight, HIDDEN)
        assert not products.pays_in_turn(x_AD[:40], weight, HIDDEN), "few rows are faster padded"
        assert not products.pays_in_turn(x_AD, weight, 2**20), "hidden layers of all experts would leave the cache"
        assert not products.pays_in_turn(x_AD.double(), weight, HIDDEN)
        with torch.autocast("cpu", torch.bfloat16):
            assert not products.pays_in_turn(x_AD, weight, HIDDEN)


@pytest.mark.parametrize("form", ["s with rows", "s in a basis", "W of all", "W of one"])
@pytest.mark.parametrize("experts", ["eigen", "dense"])
def test_the_only_expert_of_a_layer(experts, form, forced):
    layer = build(num_experts=1, top_k=1, rank=DIM, experts=experts)
    calls = forced(layer, "alone", form)
    x, _ = inputs()
    upstream = torch.randn(x.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    wanted = [x, *layer.parameters()]
    ways = layer(x), torch.stack([slow_expert(layer.experts, 0, token) for token in x.flatten(0, 1)]).view(x.shape)
    fast, slow = (torch.autograd.grad((y * upstream).sum(), wanted) for y in ways)
    assert calls == ["alone"]
    torch.testing.assert_close(ways[0], ways[1], rtol=0, atol=1e-9)
    torch.testing.assert_close(fast, slow, rtol=0, atol=1e-9)


@pytest.mark.parametrize("averages_first", [False, True])
@pytest.mark.parametrize("of_tokens", [False, True])
def test_contexts_averaged_before_and_after_their_projection(of_tokens, averages_first, monkeypatch):
    """Σ α Uᵀz = Uᵀ Σ α z: the loops get c = Σ α z itself."""
    monkeypatch.setattr(scores, "averages_projections", lambda *given, **named: not averages_first)
    layer = build()
    x, z = inputs()
    logits = torch.randn(2, 6, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64, requires_grad=True)
    alpha = logits.softmax(-1)
    upstream = torch.randn(x.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    wanted = [x, logits, *layer.parameters()] if of_tokens else [x, z, logits, *layer.parameters()]
    averaged = alpha @ (x if of_tokens else z)
    ways = layer(x, Context(alpha, None if of_tokens else z)), slow_layer(layer, x, averaged, None)
    fast, slow = (
        torch.autograd.grad((y * upstream).sum(), wanted, retain_graph=True, materialize_grads=True) for y in ways
    )
    torch.testing.assert_close(ways[0], ways[1], rtol=0, atol=1e-9)
    torch.testing.assert_close(fast, slow, rtol=0, atol=1e-9)
