"""What holds for every router of the registry."""

import copy
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import ermoe
from ermoe.nn import Experts, MoE, Router, Routing
from ermoe.nn.registry import LAYERS, build_layer, made_of, options_of
from ermoe.nn.settings import RouterSettings
from support.routers import CASES, DIM, EXPERTS, HIDDEN, IDS, VARIANTS, build, inputs, is_per_token, without_noise

every_router = pytest.mark.parametrize(("name", "options"), CASES, ids=IDS)
one_of_each = pytest.mark.parametrize(("name", "options"), [(n, v[0]) for n, v in VARIANTS.items()], ids=list(VARIANTS))


@every_router
def test_forward_takes_any_leading_axes(name, options):
    layer = build(name, options).eval()
    x, context = inputs(batch=6)
    y = layer(x, context)
    assert y.shape == x.shape
    assert y.isfinite().all()
    shape = (2, 3, *x.shape[1:])
    assert_close(layer(x.view(shape), context.view(shape)), y.view(shape))
    assert layer(x[0], context[0]).shape == x[0].shape


@every_router
def test_backward_reaches_every_parameter(name, options):
    layer = build(name, options)
    x, context = inputs()
    x.requires_grad_()
    (layer(x, context).square().mean() + ermoe.auxiliary_loss(layer)).backward()
    for parameter_name, parameter in layer.named_parameters():
        assert parameter.grad.isfinite().all(), parameter_name
        assert parameter.grad.abs().sum() > 0, parameter_name
    assert x.grad.abs().sum() > 0


@every_router
def test_methods_that_route_tokens_share_one_layer_and_one_kind_of_experts(name, options):
    layer = build(name, options)
    assert isinstance(layer.experts, Experts)
    assert isinstance(layer, MoE) or name == "soft"


@every_router
def test_autocast_keeps_the_choice_of_float32(name, options):
    layer = build(name, options).eval()
    x, context = inputs()
    expected, y_expected = layer.route(x, context), layer(x, context)
    with torch.autocast("cpu", torch.bfloat16):
        routing, y = layer.route(x, context), layer(x, context)
    assert torch.equal(routing.token_A, expected.token_A)
    assert torch.equal(routing.expert_A, expected.expert_A)
    assert routing.weight_A.dtype == torch.float32
    assert y.dtype == x.dtype
    assert_close(y, y_expected, rtol=0.05, atol=0.05)
    layer.train()
    with torch.autocast("cpu", torch.bfloat16):
        loss = layer(x, context).square().mean()
    (loss + ermoe.auxiliary_loss(layer)).backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in layer.parameters())


@every_router
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_parameters_of_another_precision(name, options, dtype):
    layer = build(name, options, dtype=dtype)
    x, context = inputs(dtype=dtype)
    y = layer(x, context)
    assert y.dtype == dtype
    y.sum().backward()
    assert all(parameter.grad.dtype == dtype for parameter in layer.parameters())


@every_router
@pytest.mark.parametrize("shape", [(0, 12), (3, 0)])
def test_no_tokens(name, options, shape):
    layer = build(name, options)
    x, context = inputs(*shape)
    y = layer(x, context)
    assert y.shape == (*shape, DIM)
    (y.sum() + ermoe.auxiliary_loss(layer)).backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in layer.parameters())


@every_router
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_padding_changes_nothing_for_the_real_tokens(name, options, mode):
    layer = without_noise(build(name, options)).train(mode == "train")
    x, context = inputs(batch=1, tokens=9)
    expected, routing = layer(x, context), layer.route(x, context)
    for padding in (0.0, 7.0, torch.nan):
        padded_x, padded_context = (nn.functional.pad(t, (0, 0, 2, 5), value=padding) for t in (x, context))
        mask = torch.zeros(1, 16, dtype=torch.bool)
        mask[:, 2:11] = True
        y = layer(padded_x, padded_context, mask)
        assert_close(y[:, 2:11], expected, rtol=0, atol=1e-6)
        assert not y[~mask].any()
        padded_routing = layer.route(padded_x, padded_context, mask)
        assert torch.equal(padded_routing.count_E, routing.count_E)
        assert torch.equal(padded_routing.token_A.sort().values - 2, routing.token_A.sort().values)
        assert not padded_routing.dense_weights()[~mask.view(-1)].any()


@every_router
def test_losses_do_not_see_padding(name, options):
    layer = without_noise(build(name, options))
    x, context = inputs(batch=2, tokens=9)
    layer(x, context)
    expected = ermoe.auxiliary_loss(layer)
    padded_x, padded_context = (nn.functional.pad(t, (0, 0, 0, 4), value=5.0) for t in (x, context))
    mask = torch.arange(13).expand(2, -1) < 9
    layer(padded_x, padded_context, mask)
    assert_close(ermoe.auxiliary_loss(layer), expected, rtol=0, atol=1e-6)


@every_router
def test_an_image_of_nothing_but_padding(name, options):
    layer = build(name, options)
    x, context = inputs()
    mask = torch.ones(4, 12, dtype=torch.bool)
    mask[1] = False
    y = layer(x, context, mask)
    assert not y[1].any()
    (y.square().sum() + ermoe.auxiliary_loss(layer)).backward()
    assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())


@every_router
def test_equal_tokens_tie_without_harm(name, options):
    layer = without_noise(build(name, options))
    x = torch.zeros(2, 12, DIM, requires_grad=True)
    y = layer(x, torch.zeros(2, 12, DIM))
    first, second = layer.route(x, x), layer.route(x, x)
    assert torch.equal(first.expert_A, second.expert_A)
    if name in ("eigen", "logit", "loss-free"):
        assert (first.expert_TK == torch.arange(first.expert_TK.shape[1])).all()  # of equals, the lower id
    (y.sum() + ermoe.auxiliary_loss(layer)).backward()
    assert x.grad.isfinite().all()
    assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())


@every_router
def test_state_survives_saving(name, options, tmp_path):
    layer, other = build(name, options).eval(), build(name, options, seed=5).eval()
    x, context = inputs()
    torch.save(layer.state_dict(), tmp_path / "layer.pt")
    other.load_state_dict(torch.load(tmp_path / "layer.pt", weights_only=True))
    assert torch.equal(other(x, context), layer(x, context))


@every_router
def test_the_generator_decides_the_start(name, options):
    one, same, other = (build(name, options, seed=seed).state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(one[key], same[key]) for key in one)
    assert any(not torch.equal(one[key], other[key]) for key in one)


@every_router
def test_a_layer_from_the_meta_device(name, options):
    layer = build(name, options, device="meta")
    assert all(parameter.is_meta for parameter in layer.parameters())
    layer.to_empty(device="cpu")
    layer.reset_parameters(torch.Generator().manual_seed(0))
    x, context = inputs()
    assert layer(x, context).isfinite().all()


@every_router
def test_a_copy_does_not_share_pending_losses(name, options):
    layer = build(name, options)
    x, context = inputs()
    layer(x, context)
    twin = copy.deepcopy(layer)
    assert float(ermoe.auxiliary_loss(twin)) == 0
    assert torch.equal(twin.eval()(x, context), layer.eval()(x, context))


@every_router
def test_the_slow_path_agrees(name, options):
    layer = without_noise(build(name, options))
    x, context = inputs()
    y = layer(x, context)
    layer.every_expert = True
    assert_close(layer(x, context), y, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("name", "options"), [case for case in CASES if case[0] != "v-moe" or is_per_token(*case)])
def test_inference_depends_on_the_image_alone_or_on_less(name, options):
    """Of V-MoE this holds without a capacity only: see test_vmoe.py."""
    layer = build(name, options).eval()
    x, context = inputs(batch=5)
    together, routing = layer(x, context), layer.route(x, context).dense_weights().view(5, 12, EXPERTS)
    for image in range(5):
        own = slice(image, image + 1)
        assert_close(layer(x[own], context[own]), together[own], rtol=1e-6, atol=1e-6)
        alone = layer.route(x[own], context[own]).dense_weights().view(1, 12, EXPERTS)
        assert torch.equal(alone > 0, routing[own] > 0)


@every_router
def test_inference_of_per_token_methods_depends_on_the_token_alone(name, options):
    layer = build(name, options).eval()
    x, context = inputs(batch=5)
    together, routing = layer(x, context), layer.route(x, context)
    token, alone_token = x[3, 4].view(1, 1, DIM), context[3, 4].view(1, 1, DIM)
    alone = layer(token, alone_token).view(-1)
    if is_per_token(name, options):
        assert_close(alone, together[3, 4], rtol=1e-6, atol=1e-6)
        chosen = layer.route(token, alone_token).expert_TK
        assert torch.equal(chosen[0], routing.expert_TK[3 * 12 + 4])
    elif name in ("soft", "expert-choice"):
        assert not torch.allclose(alone, together[3, 4], atol=1e-3)


@one_of_each
def test_observers_see_each_forward_once(name, options):
    layer = build(name, options)
    seen = []
    layer.observers.append(seen.append)
    x, context = inputs()
    x.requires_grad_()
    y = torch.utils.checkpoint.checkpoint(layer, x, context, use_reentrant=False)
    y.sum().backward()
    assert len(seen) == 1
    assert seen[0].num_tokens == 48
    assert seen[0].score_TE.shape == (48, EXPERTS)
    assert int(seen[0].count_E.sum()) == len(seen[0].token_A)


@pytest.mark.parametrize("name", sorted(set(LAYERS) - {"soft"}))
def test_a_single_expert_is_not_routed(name):
    layer = build(name, {"num_experts": 1, **({"top_k": 1} if "top_k" in options_of(name) else {})})
    assert not list(layer.router.parameters())
    assert not layer.needs_context
    x, _ = inputs()
    mask = (torch.arange(12) < 9).expand(4, -1)
    y, routing = layer(x, mask=mask), layer.route(x, mask=mask)
    assert not y[:, 9:].any()
    assert_close(y[:, :9], layer.experts(x[:, :9].reshape(-1, DIM), torch.tensor([36])).view(4, 9, DIM))
    assert routing.count_E.tolist() == [36]
    if "top_k" in options_of(name):
        with pytest.raises(ValueError, match="top_k=2: need 1 <= top_k <= num_experts=1"):
            build(name, {"num_experts": 1, "top_k": 2})


def test_a_shared_expert_is_one_of_the_same_width():
    router, experts = build("base").router, build("base").experts
    for wrong in (experts, ermoe.nn.build_experts(DIM + 1, 8, num_experts=1)):
        with pytest.raises(ValueError, match=f"need one of width {DIM}"):
            MoE(router, experts, wrong)


def test_context_is_ignored_by_all_but_eigen():
    x, context = inputs()
    for name in set(LAYERS) - {"eigen"}:
        layer = build(name).eval()
        assert torch.equal(layer(x), layer(x, context)), name


def test_ablations_of_the_paper_are_options():
    x, context = inputs()
    for options in ({"experts": "dense"}, {"score": "logit"}, {"balance": "none"}, {"balance": "mean"}):
        layer = build_layer("eigen", DIM, HIDDEN, num_experts=EXPERTS, **options)
        assert layer(x, context).shape == x.shape
    dense = build_layer("eigen", DIM, HIDDEN, num_experts=EXPERTS, experts="dense")
    assert dense.router.score.basis is not None
    assert dense.experts.token_basis is None


@dataclass(frozen=True)
class RoundRobin(RouterSettings):
    first: int = 0

    def router(self, dim, num_experts, **start):
        return RoundRobinRouter(num_experts, self.first)


class RoundRobinRouter(Router):
    """Token t goes to expert (t + first) mod E."""

    experts_per_token = 1

    def __init__(self, num_experts, first):
        super().__init__()
        self.num_experts, self.first = num_experts, first

    def forward(self, x_GSD, context_GSD=None, mask_GS=None, basis_EDR=None):
        num_tokens = x_GSD.shape[0] * x_GSD.shape[1]
        expert_T1 = (torch.arange(num_tokens).unsqueeze(1) + self.first) % self.num_experts
        kept_T1 = None if mask_GS is None else mask_GS.reshape(-1, 1)
        return Routing.from_choice(expert_T1, torch.ones(num_tokens, 1), num_experts=self.num_experts, kept_TK=kept_T1)


def test_adding_a_router_is_a_class_and_a_line(monkeypatch):
    monkeypatch.setitem(LAYERS, "round-robin", made_of(RoundRobin))
    layer = build_layer("round-robin", DIM, num_experts=EXPERTS, first=1, experts="eigen", gated=True)
    x, _ = inputs()
    assert layer.route(x).expert_TK[:4, 0].tolist() == [1, 2, 3, 0]
    mask = (torch.arange(12) < 9).expand(4, -1)
    assert not layer(x, mask=mask)[:, 9:].any()
    with pytest.raises(ValueError, match="has no option second: it has first, num_experts, "):
        build_layer("round-robin", DIM, second=2)


def test_unknown_names_and_options_are_refused():
    with pytest.raises(ValueError, match="use one of eigen, "):
        build_layer("switch", DIM)
    with pytest.raises(ValueError, match=r"'base' has no option top_k: it has num_experts, "):
        build_layer("base", DIM, top_k=2)
    with pytest.raises(ValueError, match="'eigen' or 'dense'"):
        build_layer("v-moe", DIM, experts="sparse")
    with pytest.raises(ValueError, match="at least one expert"):
        build_layer("v-moe", DIM, num_experts=0)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("v-moe", {"top_k": 9}),
        ("v-moe", {"capacity_factor": 0}),
        ("v-moe", {"eval_capacity_factor": "none"}),
        ("v-moe", {"batch_priority": "often"}),
        ("v-moe", {"group_size": 0}),
        ("expert-choice", {"capacity_factor": -1}),
        ("expert-choice", {"capacity_multiple": 0}),
        ("soft", {"slots_per_expert": 0}),
        ("loss-free", {"score": "tanh"}),
        ("loss-free", {"top_k": 0}),
        ("cosine", {"temperature": 0}),
        ("cosine", {"top_k": 0}),
        ("emoe", {"temperature": 0}),
        ("emoe", {"route_rank": 17}),
    ],
)
def test_nonsense_is_refused_by_name(name, options):
    with pytest.raises(ValueError, match=f"{next(iter(options))}="):
        build(name, options)


def test_every_option_is_accepted_by_its_router():
    for name in LAYERS:
        assert {"num_experts", "experts", "rank", "gated", "act_layer", "bias", "drop"} <= set(options_of(name))
        assert {"generator", "device", "dtype"} <= set(options_of(name))
    layer = build("v-moe", {"experts": "eigen", "rank": 8, "gated": True, "act_layer": nn.SiLU, "bias": False})
    x, _ = inputs()
    assert layer(x).shape == x.shape


def test_v_moe_experts_start_from_one_draw():
    experts = build("v-moe").experts
    assert torch.equal(experts.up.W[0], experts.up.W[3])
    assert not torch.equal(*build("v-moe", {"same_start": False}).experts.up.W[:2])
    assert not torch.equal(*build("expert-choice").experts.up.W[:2])


@every_router
def test_gradients_per_sample_are_those_of_a_loop(name, options):
    """Under torch.func every sample is a batch of its own; what is counted is counted for all of them."""
    layer, looped = (without_noise(build(name, options)) for _ in range(2))
    x, context = inputs(batch=3)

    def loss(parameters, x, context):
        y = torch.func.functional_call(layer, parameters, (x.unsqueeze(0), context.unsqueeze(0)))
        return y.square().mean() + ermoe.auxiliary_loss(layer)

    parameters = dict(layer.named_parameters())
    per_sample = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(parameters, x, context)
    for sample in range(3):
        looped.zero_grad()
        (looped(x[[sample]], context[[sample]]).square().mean() + ermoe.auxiliary_loss(looped)).backward()
        for parameter_name, parameter in looped.named_parameters():
            assert_close(per_sample[parameter_name][sample], parameter.grad, rtol=1e-4, atol=1e-6, msg=parameter_name)
    assert float(ermoe.auxiliary_loss(layer)) == 0  # nothing of torch.func's is left behind
    for one in (layer, looped):
        ermoe.update_balance(one)
    for offset, expected in zip(layer.buffers(), looped.buffers(), strict=True):
        assert_close(offset, expected)


@one_of_each
def test_a_trace_is_refused(name, options):
    layer = build(name, options).eval()
    with pytest.raises(ValueError, match=r"torch\.jit\.trace.*ermoe\.export\(model, 'model\.onnx'\)"):
        torch.jit.trace(layer, inputs(), check_trace=False)
