"""The layer under torch.compile and torch.export: every option of ours, and every router."""

import pytest
import torch
from torch.testing import assert_close

import ermoe
from support import eigen_layers, routers
from support.routers import VARIANTS, without_noise

pytestmark = pytest.mark.no_cover  # lines that torch traces are not run, and tracing takes twice as long when watched
one_of_each = pytest.mark.parametrize(("name", "options"), [(n, v[0]) for n, v in VARIANTS.items()], ids=list(VARIANTS))


@pytest.mark.parametrize("options", eigen_layers.OPTIONS, ids=eigen_layers.IDS)
def test_compiled_without_graph_breaks(options):
    layer, x, context = eigen_layers.build(**options)
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


@pytest.mark.parametrize(("backend", "dtype"), [("inductor", torch.float32), ("aot_eager", torch.float64)])
def test_compiled_in_either_precision(backend, dtype):
    layer, x, context = eigen_layers.build()
    layer, x, context = layer.to(dtype), x.to(dtype), context.to(dtype)
    torch._dynamo.reset()
    y = torch.compile(layer, fullgraph=True, backend=backend)(x, context)
    torch.testing.assert_close(y, layer(x, context), rtol=0, atol=1e-5)


def test_compiled_with_widths_that_grouped_products_cannot_take():
    layer, x, context = eigen_layers.build(dim=18, route_rank=8)
    torch._dynamo.reset()
    y = torch.compile(layer, fullgraph=True, backend="aot_eager")(x, context)
    torch.testing.assert_close(y, layer(x, context), rtol=0, atol=1e-5)


@one_of_each
@pytest.mark.parametrize("masked", [False, True])
def test_export(name, options, masked):
    layer = routers.build(name, options).eval()
    layer.every_expert = True
    x, context = routers.inputs()
    mask = (torch.arange(12) < 9).expand(4, -1) if masked else None
    program = torch.export.export(layer, (x, context, mask))
    assert_close(program.module()(x, context, mask), layer(x, context, mask), rtol=0, atol=1e-6)


@one_of_each
def test_compiled_training_step(name, options):
    layer = without_noise(routers.build(name, options))
    x, context = routers.inputs()
    mask = (torch.arange(12) < 9).expand(4, -1)
    expected = layer(x, context, mask).square().mean() + ermoe.auxiliary_loss(layer)
    expected_gradients = torch.autograd.grad(expected, list(layer.parameters()))
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    loss = compiled(x, context, mask).square().mean() + ermoe.auxiliary_loss(layer)
    assert_close(loss, expected, rtol=0, atol=1e-5)
    for fast, slow in zip(torch.autograd.grad(loss, list(layer.parameters())), expected_gradients, strict=True):
        assert_close(fast, slow, rtol=1e-4, atol=1e-5)
