"""Autocast, half precision, the meta device, torch.func. torch.compile: training/nn/test_compiled.py."""

import pytest
import torch

from ermoe.nn import EigenMoE, orthogonality_loss, retract, update_balance
from support.eigen_layers import IDS, OPTIONS, build


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", OPTIONS, ids=IDS)
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


@pytest.mark.parametrize("options", OPTIONS, ids=IDS)
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


@pytest.mark.parametrize("options", OPTIONS, ids=IDS)
def test_mapped_over_samples(options):
    """torch.func.vmap, with padding: the numbers of a plain pass."""
    layer, x, context = build(**options)
    layer.eval()
    mask = torch.arange(12) < torch.tensor([[12], [7]])
    expected = layer(x, context, mask)
    torch.testing.assert_close(torch.func.vmap(layer)(x, context, mask), expected, rtol=1e-4, atol=1e-6)


def test_recording_inside_torch_func_is_refused():
    layer, x, context = build()
    layer.observers.append(print)
    with pytest.raises(ValueError, match=r"cannot be recorded inside torch\.func"):
        torch.func.vmap(layer)(x, context)
