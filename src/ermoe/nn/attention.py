"""Self-attention that can also say where each token looked.

Letters: B sequences (G, where images are called groups), N tokens (S), D model width, h heads, d width of a head.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ermoe.nn.precision import full_precision, widen
from ermoe.nn.tracing import is_transformed

_FEW_QUERIES = 256  # up to here, keeping the weights of one pass costs less time than a second pass


def attend(
    q_BhNd: Tensor,
    k_BhNd: Tensor,
    v_BhNd: Tensor,
    *,
    bias: Tensor | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    chunk: int | None = 1024,
    weights_grad: bool = True,
) -> tuple[Tensor, Tensor]:
    """Attention outputs (B, h, N, d) and the head-mean weights α (B, N, N), after masking and before dropout.

    ``bias`` is boolean (True: may look) or added to the logits, broadcastable to (B, h, N, N). Queries are taken
    ``chunk`` at a time, and recomputed in the backward pass when there are several chunks, so that no tensor of size
    (B, h, N, N) is ever held. With ``weights_grad=False`` α carries no gradient; of more than 256 tokens, the outputs
    then come from the fused kernel in training: nothing of size N² is kept for the backward pass, at the price of one
    more product.

    >>> q = k = v = torch.randn(2, 4, 6, 8)
    >>> out, alpha = attend(q, k, v)
    >>> (
    ...     torch.allclose(out, F.scaled_dot_product_attention(q, k, v), atol=1e-5),
    ...     alpha.sum(-1).allclose(torch.ones(2, 6)),
    ... )
    (True, True)
    """
    num_queries = q_BhNd.shape[2]
    scale = q_BhNd.shape[-1] ** -0.5 if scale is None else scale
    if not weights_grad and torch.is_grad_enabled() and num_queries > _FEW_QUERIES:
        with torch.no_grad():  # outputs as narrow as can be: they are not used
            alpha_BNN = attend(q_BhNd, k_BhNd, v_BhNd[..., :1], bias=bias, scale=scale, chunk=chunk)[1]
        fused = F.scaled_dot_product_attention(q_BhNd, k_BhNd, v_BhNd, attn_mask=bias, dropout_p=dropout, scale=scale)
        return fused, alpha_BNN
    if chunk is None or num_queries <= chunk:
        output, alpha_BNN = _attend_chunk(q_BhNd, k_BhNd, v_BhNd, bias, scale, dropout)
        return output, alpha_BNN if weights_grad else alpha_BNN.detach()
    parts = []
    for start in range(0, num_queries, chunk):
        rows = slice(start, start + chunk)
        row_bias = bias if bias is None or bias.shape[-2] == 1 else bias[..., rows, :]
        inputs = (q_BhNd[:, :, rows], k_BhNd, v_BhNd, row_bias, scale, dropout)
        parts.append(
            checkpoint(_attend_chunk, *inputs, use_reentrant=False)
            if torch.is_grad_enabled() and not is_transformed()
            else _attend_chunk(*inputs)
        )
    outputs, weights = zip(*parts, strict=True)
    return torch.cat(outputs, dim=2), torch.cat(weights, dim=1)


def _attend_chunk(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, dropout: float
) -> tuple[Tensor, Tensor]:
    logits = (q * scale) @ k.mT
    if bias is not None:
        logits = _masked(logits, bias) if bias.dtype == torch.bool else logits + bias
    weights = logits.softmax(-1)
    if bias is not None and bias.dtype == torch.bool:
        weights = _masked(weights, bias, 0.0)  # a row that may look nowhere looks nowhere, instead of at NaN
    return F.dropout(weights, dropout) @ v, weights.mean(1)


def _masked(values: Tensor, may_look: Tensor, fill: float | None = None) -> Tensor:
    return values.masked_fill(~may_look, torch.finfo(values.dtype).min if fill is None else fill)


def context(alpha_BNN: Tensor, z_BND: Tensor) -> Tensor:
    """c_i = Σ_j α_ij z_j (Eq. 2), (B, N, D), in at least float32: it only serves to score."""
    with full_precision(z_BND):
        return widen(alpha_BNN) @ widen(z_BND)


class Context(NamedTuple):
    """Where tokens look, α (G, S, S), and at what, z (G, S, D): a context c = α z that is yet to be averaged.

    Without z it is the tokens themselves, as they enter the layer. A score that sees contexts through a projection
    alone has them from this at less cost, because Uᵀ Σ α z = Σ α Uᵀz.

    >>> from ermoe.nn import EigenMoE
    >>> alpha, x = torch.rand(2, 5, 5).softmax(-1), torch.randn(2, 5, 16)
    >>> layer = EigenMoE(16, num_experts=2)
    >>> torch.allclose(layer(x, Context(alpha)), layer(x, context(alpha, x)), atol=1e-5)
    True
    """

    alpha_GSS: Tensor
    z_GSD: Tensor | None = None

    def averaged(self, x_GSD: Tensor) -> Tensor:
        """c (G, S, D) of the tokens ``x_GSD``."""
        return context(self.alpha_GSS, x_GSD if self.z_GSD is None else self.z_GSD)


class ContextAttention(nn.Module):
    """Multi-head self-attention. With ``need_weights`` it returns the head-mean weights too; without, it is fused.

    >>> attention = ContextAttention(32, num_heads=4)
    >>> x = torch.randn(2, 10, 32)
    >>> attention(x).shape
    torch.Size([2, 10, 32])
    >>> out, alpha = attention(x, need_weights=True)
    >>> context(alpha, x).shape
    torch.Size([2, 10, 32])
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        qkv_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        context_grad: bool = True,
        chunk: int | None = 1024,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if dim % num_heads:
            raise ValueError(f"num_heads={num_heads} does not divide dim={dim}: use one of its divisors")
        self.num_heads = num_heads
        self.attn_drop = attn_drop
        self.context_grad = context_grad
        self.chunk = chunk
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias, device=device, dtype=dtype)
        self.proj = nn.Linear(dim, dim, device=device, dtype=dtype)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(
        self,
        x_BND: Tensor,
        mask_BN: Tensor | None = None,
        *,
        need_weights: bool = False,
        context_grad: bool | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention over real tokens (``mask_BN`` True); a tensor, or with ``need_weights`` a pair (out, α).

        ``context_grad``, if given, overrides the module's own.
        """
        q, k, v = self.qkv(x_BND).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        may_look = None if mask_BN is None else mask_BN[:, None, None, :]
        dropout = self.attn_drop if self.training else 0.0
        if need_weights:
            weights_grad = self.context_grad if context_grad is None else context_grad
            out, alpha_BNN = attend(
                q, k, v, bias=may_look, dropout=dropout, chunk=self.chunk, weights_grad=weights_grad
            )
            return self._project(out), alpha_BNN
        return self._project(F.scaled_dot_product_attention(q, k, v, attn_mask=may_look, dropout_p=dropout))

    def _project(self, out_BhNd: Tensor) -> Tensor:
        out: Tensor = self.proj_drop(self.proj(out_BhNd.transpose(1, 2).flatten(2)))
        return out
