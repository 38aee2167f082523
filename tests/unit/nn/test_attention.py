"""Attention with head-mean weights equals the fused kind, whole or in chunks."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from ermoe.nn import ContextAttention, attend, context


def heads(tokens=13, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(2, 4, tokens, 8, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(3)
    ]


@pytest.mark.parametrize("chunk", [None, 5, 1, 13, 100])
@pytest.mark.parametrize("masked", [False, True])
def test_chunks_change_nothing(chunk, masked):
    q, k, v = heads()
    bias = torch.ones(2, 1, 1, 13, dtype=torch.bool)
    bias[1, ..., 6:] = False
    out, alpha = attend(q, k, v, bias=bias if masked else None, chunk=chunk)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=bias if masked else None)
    torch.testing.assert_close(out, expected)
    logits = q @ k.mT / 8**0.5
    slow = torch.stack(
        [(logits.masked_fill(~bias, -torch.inf) if masked else logits)[:, h].softmax(-1) for h in range(4)]
    )
    torch.testing.assert_close(alpha, slow.mean(0))
    fast_gradients = torch.autograd.grad(out.square().sum() + alpha.square().sum(), [q, k, v])
    slow_gradients = torch.autograd.grad(expected.square().sum() + slow.mean(0).square().sum(), [q, k, v])
    for fast, wanted in zip(fast_gradients, slow_gradients, strict=True):
        torch.testing.assert_close(fast, wanted)


def test_an_additive_bias_is_sliced_by_query():
    q, k, v = heads()
    bias = torch.randn(2, 4, 13, 13, dtype=torch.float64)
    out, _ = attend(q, k, v, bias=bias, chunk=5)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v, attn_mask=bias))


def test_rows_that_may_look_nowhere_are_zero_with_finite_gradients():
    q, k, v = heads()
    bias = torch.zeros(2, 1, 1, 13, dtype=torch.bool)
    bias[0] = True
    out, alpha = attend(q, k, v, bias=bias)
    assert (out[1] == 0).all()
    assert (alpha[1] == 0).all()
    for gradient in torch.autograd.grad(out.sum() + alpha.square().sum(), [q, k, v]):
        assert torch.isfinite(gradient).all()


def test_fused_and_explicit_module_agree():
    torch.manual_seed(0)
    attention = ContextAttention(32, num_heads=4)
    x = torch.randn(2, 9, 32)
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[0, 4:] = False
    out, alpha = attention(x, mask, need_weights=True)
    torch.testing.assert_close(attention(x, mask), out, rtol=0, atol=1e-5)
    torch.testing.assert_close(context(alpha, x), torch.einsum("bij,bjd->bid", alpha, x), rtol=0, atol=1e-5)
    assert alpha.requires_grad


@pytest.mark.parametrize("num_tokens", [9, 300])
def test_weights_without_gradient_are_kept_for_the_backward_pass_of_few_tokens_alone(num_tokens):
    torch.manual_seed(0)
    plain = ContextAttention(32, num_heads=4).double()
    lean = ContextAttention(32, num_heads=4, context_grad=False).double()
    lean.load_state_dict(plain.state_dict())
    x, mask = torch.randn(2, num_tokens, 32, dtype=torch.float64), torch.ones(2, num_tokens, dtype=torch.bool)
    mask[0, 4:] = False
    results, kept = {}, {}
    for name, attention in (("plain", plain), ("lean", lean)):
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, s=sizes: s.append(t.shape) or t, lambda t: t):
            out, alpha = attention(x, mask, need_weights=True)
        results[name], kept[name] = (out, alpha, *torch.autograd.grad(out.sum(), attention.parameters())), sizes
        assert alpha.requires_grad == (name == "plain")
    for ours, reference in zip(results["lean"], results["plain"], strict=True):
        torch.testing.assert_close(ours, reference, rtol=0, atol=1e-9)
    square = (num_tokens, num_tokens)
    assert any(shape[-2:] == square for shape in kept["plain"])
    assert any(shape[-2:] == square for shape in kept["lean"]) == (num_tokens == 9)


def test_dropout_leaves_the_context_weights_alone():
    torch.manual_seed(0)
    attention = ContextAttention(32, num_heads=4, attn_drop=0.5)
    x = torch.randn(2, 9, 32)
    (first, alpha), (second, same) = attention(x, need_weights=True), attention(x, need_weights=True)
    assert not torch.equal(first, second)
    assert torch.equal(alpha, same)


def test_contexts_stay_in_float32_under_autocast():
    attention, x = ContextAttention(32, num_heads=4), torch.randn(2, 9, 32)
    with torch.autocast("cpu", torch.bfloat16):
        _, alpha = attention(x, need_weights=True)
        assert context(alpha, x).dtype == torch.float32


def test_heads_must_divide_the_width():
    with pytest.raises(ValueError, match="num_heads=5 does not divide dim=32"):
        ContextAttention(32, num_heads=5)


def test_chunks_under_torch_func_are_not_recomputed():
    """Checkpoints cannot be differentiated there; the gradients are those of attention in one piece."""
    x = torch.randn(3, 2, 10, 4, generator=torch.Generator().manual_seed(0))

    def loss(x, chunk):
        out, alpha = attend(*x.expand(3, 1, *x.shape), chunk=chunk)
        return out.square().sum() + alpha.square().sum()

    in_chunks, at_once = (torch.func.vmap(torch.func.grad(partial(loss, chunk=chunk)))(x) for chunk in (4, None))
    torch.testing.assert_close(in_chunks, at_once)
