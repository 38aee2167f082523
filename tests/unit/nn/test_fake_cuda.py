"""Every layer on a GPU that is not there: nothing of it stays on the CPU, and it waits only where it must."""

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

import ermoe
from ermoe.nn import ContextAttention, EigenMoE, context
from support.fake_cuda import fake_cuda
from support.routers import CASES, DIM, IDS, build

MORE = [
    ("eigen", {"score": "prototype", "gated": True}),
    ("eigen", {"score": "energy", "experts": "dense"}),
    ("v-moe", {"capacity_factor": None, "experts": "eigen"}),
    ("expert-choice", {"experts": "eigen"}),
    ("soft", {"experts": "eigen"}),
    ("eigen", {"threshold": 0.9}),
    ("eigen", {"threshold": 0.9, "below_threshold": "prune"}),
    ("eigen", {"capacity_factor": 1.0}),
]


def leaves_pairs_out(name, options, masked):
    """These wait once, for the number of pairs that are left: every pair too many would be an expert's work in vain."""
    if name == "soft":  # mixes all tokens, padded ones with weight zero
        return False
    limited = options.get("capacity_factor", 1.05 if name == "v-moe" else None) is not None and name != "expert-choice"
    return masked or limited or options.get("below_threshold") == "prune"


def tokens():
    return torch.randn(2, 12, DIM, device="cuda")


def run(layer, masked):
    mask = torch.ones(2, 12, dtype=torch.bool, device="cuda") if masked else None
    y = layer(tokens(), tokens(), mask)
    assert y.device.type == "cuda"
    assert y.shape == (2, 12, DIM)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("name", "options"), CASES + MORE, ids=[*IDS, *(f"{name}-{options}" for name, options in MORE)]
)
def test_forward_losses_and_offsets(name, options, masked, training):
    layer = build(name, options).train(training)
    waits = leaves_pairs_out(name, options, masked)
    with fake_cuda(layer, may_wait=waits):
        run(layer, masked)
        loss = ermoe.auxiliary_loss(layer) + ermoe.orthogonality_loss(layer) + tokens().mean()
        assert loss.device.type == "cuda"
        ermoe.update_balance(layer)
    if waits:
        layer = build(name, options).train(training)
        with fake_cuda(layer), pytest.raises(DynamicOutputShapeException):
            run(layer, masked)


def test_what_is_left_on_the_cpu_is_found():
    layer = EigenMoE(DIM, num_experts=4, score="energy")
    with fake_cuda(layer):
        layer.router.balance.offset_E = torch.zeros(4)
        with pytest.raises(RuntimeError, match="device"):
            layer(tokens())


def test_attention_with_weights():
    attention = ContextAttention(DIM, num_heads=4)
    with fake_cuda(attention):
        out, alpha = attention(tokens(), torch.ones(2, 12, dtype=torch.bool, device="cuda"), need_weights=True)
        assert out.device.type == context(alpha, out).device.type == "cuda"


def test_retraction_waits_because_it_reports_numbers_once_an_epoch():
    layer = EigenMoE(DIM, num_experts=4)
    with fake_cuda(layer), pytest.raises(DataDependentOutputException):
        ermoe.retract(layer)


def test_widths_that_the_grouped_kernel_does_not_take_wait_for_the_counts():
    layer = EigenMoE(DIM, 25, num_experts=4)
    with fake_cuda(layer), pytest.raises(DataDependentOutputException):
        layer(tokens(), tokens())
