"""Offsets bring loads to equality without a loss, and count every token once."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ermoe.nn import EigenMoE, update_balance
from support.mixtures import mixture


def test_offsets_are_left_alone_by_a_perfect_balance_and_by_no_tokens():
    layer = EigenMoE(16, num_experts=4)
    update_balance(layer)
    assert not layer.router.balance.offset_E.any()


def test_mean_offsets_are_the_negative_mean_scores():
    generator = torch.Generator().manual_seed(0)
    layer = EigenMoE(32, 32, balance="mean", generator=generator)
    x, context = mixture(generator, 4096, 32, 1.0)
    routing = layer.route(x, context)
    layer.router.observe(routing)
    update_balance(layer)
    torch.testing.assert_close(layer.router.balance.offset_E, -routing.score_TE.mean(0), rtol=0, atol=1e-5)
    for _ in range(30):
        layer.router.observe(routing)
        update_balance(layer)
    torch.testing.assert_close(layer.router.balance.offset_E, -routing.score_TE.mean(0), rtol=0, atol=1e-5)
    before = layer.router.balance.offset_E.clone()
    update_balance(layer)  # nothing seen
    assert torch.equal(layer.router.balance.offset_E, before)


def test_accumulating_gradients_counts_all_batches():
    generator = torch.Generator().manual_seed(0)
    whole, parts = (EigenMoE(32, 32, generator=torch.Generator().manual_seed(1)) for _ in range(2))
    x, context = mixture(generator, 600, 32, 1.0)
    whole(x, context)
    for rows in torch.split(torch.arange(600), [100, 350, 150]):
        parts(x[rows], context[rows])
    update_balance(whole)
    update_balance(parts)
    torch.testing.assert_close(whole.router.balance.offset_E, parts.router.balance.offset_E)
    assert not parts.router.balance._accumulator.any()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_counts_once_and_routes_the_same(use_reentrant):
    x = torch.randn(4, 9, 16, requires_grad=True)
    context = torch.randn(4, 9, 16)
    results = []
    for checkpointed in (False, True):
        layer = EigenMoE(16, num_experts=4, drop=0.2, generator=torch.Generator().manual_seed(1))
        seen = []
        layer.observers.append(lambda routing, seen=seen: seen.append(routing.expert_TK))
        torch.manual_seed(3)
        y = checkpoint(layer, x, context, use_reentrant=use_reentrant) if checkpointed else layer(x, context)
        gradients = torch.autograd.grad(y.square().sum(), [x, *layer.parameters()]) if not use_reentrant else ()
        if use_reentrant:
            x.grad = None
            y.square().sum().backward()
            gradients = [x.grad, *(p.grad for p in layer.parameters())]
        assert len(seen) == 1
        results.append([y, layer.router.balance._accumulator, *gradients])
    for plain, recomputed in zip(*results, strict=True):
        torch.testing.assert_close(plain, recomputed)


def test_offsets_stay_in_float32_and_follow_the_module():
    layer = EigenMoE(16, num_experts=4)
    offsets = torch.tensor([0.1234567, -0.7654321, 0.3, 0.0])
    layer.router.balance.offset_E.copy_(offsets)
    layer.bfloat16()
    assert torch.equal(layer.router.balance.offset_E, offsets)
    assert layer.router.balance._accumulator.dtype == torch.float32
    x = torch.randn(2, 5, 16, dtype=torch.bfloat16)
    assert layer(x, x + 1).dtype == torch.bfloat16
    layer.to("meta")
    assert layer.router.balance.offset_E.is_meta
    assert layer.router.balance._accumulator.is_meta


def test_several_layers_are_updated_together():
    model = nn.ModuleList([EigenMoE(16, num_experts=4), nn.Linear(2, 2), EigenMoE(16, num_experts=2, balance="mean")])
    x, context = torch.randn(64, 16), torch.randn(64, 16)
    model[0](x, context)
    model[2](x, context)
    update_balance(model)
    assert model[0].router.balance.offset_E.any()
    assert model[2].router.balance.offset_E.any()
    update_balance(nn.Linear(2, 2))


@pytest.mark.parametrize("balance", ["offset", "mean"])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_batch_that_overflows_moves_no_offset(balance, poison):
    generator = torch.Generator().manual_seed(0)
    layer = EigenMoE(32, 32, balance=balance, generator=generator)
    x, context = mixture(generator, 64, 32, 1.0)
    layer(x, context)
    update_balance(layer)
    before = layer.router.balance.offset_E.clone()
    assert before.any()
    poisoned = x.clone()
    poisoned[3, 5] = poison
    layer(poisoned, context)
    update_balance(layer)
    assert torch.equal(layer.router.balance.offset_E, before)
    layer(*mixture(generator, 64, 32, 1.0))
    update_balance(layer)
    assert layer.router.balance.offset_E.isfinite().all()
    assert not torch.equal(layer.router.balance.offset_E, before)


@pytest.mark.parametrize("balance", ["offset", "mean"])
def test_counts_survive_whoever_gives_a_layer_on_the_meta_device_its_memory(balance):
    """Some give each buffer memory of its own, and know of nothing but buffers and parameters."""
    real = EigenMoE(16, num_experts=4, balance=balance)
    empty = [EigenMoE(16, num_experts=4, balance=balance, device="meta") for _ in range(2)]
    assert not any(isinstance(v, torch.Tensor) for m in empty[0].modules() for v in vars(m).values())
    empty[0].load_state_dict(copy.deepcopy(real.state_dict()), assign=True)
    empty[1].to_empty(device="cpu").load_state_dict(real.state_dict())
    x, context = torch.randn(2, 9, 16), torch.randn(2, 9, 16)
    for layer in (real, *empty):
        layer(x, context)
        update_balance(layer)
        assert layer.router.balance.offset_E.any()
        assert torch.equal(layer.router.balance.offset_E, real.router.balance.offset_E)
