"""Autocast, torch.compile, the meta device."""

import pytest
import torch
from torch import nn

from ermoe.nn import EigenMoE, orthogonality_loss, retract, update_balance

OPTIONS = [
    {},
    {"below_threshold": "prune"},
    {"capacity_factor": 0.8},
    {"score": "prototype"},
    {"score": "energy"},
    {"score": "logit"},
    {"experts": "dense"},
    {"gated": True, "act_layer": nn.SiLU},
    {"balance": "none"},
]
ids = [str(options) for options in OPTIONS]


def build(dim=16, **options):
    layer = EigenMoE(dim, **{"num_experts": 4, "generator": torch.Generator().manual_seed(0)} | options)
    generator = torch.Generator().manual_seed(1)
    x, context = (torch.randn(2, 12, dim, generator=generator) for _ in range(2))
    return layer, x, context


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", OPTIONS, ids=ids)
def test_autocast_keeps_the_choice_of_float32(options, dtype):
    layer, x, context = build(**options)
    reference, expected = layer.route(x, context), layer(x, context)
    with torch.autocast("cpu", dtype):
        routing, y = layer.route(x, context), layer(x, context)
    assert routing.score_TE.dtype == torch.float32
    assert routing.weight_A.dtype == torch.float32
    assert torch.equal(routing.expert_TK, reference.expert_TK)
    assert y.dtype == x.dtype
    torch.testing.assert_close(y, expected, rtol=0.05, atol=0.05)
    y.square().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in layer.parameters())


@pytest.mark.parametrize("options", OPTIONS, ids=ids)
def test_compiled_without_graph_breaks(options):
    layer, x, context = build(**options)
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[1, 5:] = False
    expected = layer(x, context, mask)
    expected_gradients = torch.autograd.grad(expected.square().sum(), list(layer.parameters()))
    counts = None if layer.router.balance is None else layer.router.balance._accumulator.clone()
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    y = compiled(x, context, mask)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-5)
    gradients = torch.autograd.grad(y.square().sum(), list(layer.parameters()))
    for fast, slow in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(fast, slow, rtol=1e-4, atol=1e-5)
    if counts is not None:
        torch.testing.assert_close(layer.router.balance._accumulator, 2 * counts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_compiled_with_inductor(dtype):
    layer, x, context = build()
    layer, x, context = layer.to(dtype), x.to(dtype), context.to(dtype)
    torch._dynamo.reset()
    y = torch.compile(layer, fullgraph=True)(x, context)
    torch.testing.assert_close(y, layer(x, context), rtol=0, atol=1e-5)


def test_compiled_with_widths_that_grouped_products_cannot_take():
    layer, x, context = build(dim=18, route_rank=8)
    torch._dynamo.reset()
    y = torch.compile(layer, fullgraph=True, backend="aot_eager")(x, context)
    torch.testing.assert_close(y, layer(x, context), rtol=0, atol=1e-5)


@pytest.mark.parametrize("options", OPTIONS, ids=ids)
def test_built_on_the_meta_device(options):
    layer = EigenMoE(16, num_experts=4, device="meta", **options)
    assert all(tensor.is_meta for tensor in (*layer.parameters(), *layer.buffers()))
    layer.to_empty(device="cpu")
    layer.reset_parameters(torch.Generator().manual_seed(0))
    straight, x, context = build(**options)
    assert layer.state_dict().keys() == straight.state_dict().keys()
    assert orthogonality_loss(layer) < 1e-8
    y = layer(x, context)
    assert torch.isfinite(y).all()
    update_balance(layer)


def test_half_precision_weights():
    layer, x, context = build()
    layer.bfloat16()
    y = layer(x.bfloat16(), context.bfloat16())
    assert y.dtype == torch.bfloat16
    y.float().square().sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in layer.parameters())
    assert all(report.error_after < 0.05 for report in retract(layer).values())  # as orthonormal as bfloat16 can be
