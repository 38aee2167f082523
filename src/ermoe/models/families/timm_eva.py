"""timm's Eva: EVA, EVA-02, DINOv3 and other ViTs with rotary positions and gated feed-forward networks.

Letters: B sequences, N tokens, D model width, h heads, d width of a head.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import AttentionRope, apply_rot_embed_cat
from timm.models.eva import EvaAttention, EvaBlock
from torch import Tensor

from ermoe.models.families.timm_vit import SparseTimmBlock, Timm


class SparseEvaBlock(SparseTimmBlock, EvaBlock):
    """timm's pre-norm EVA block with experts."""

    dense_class = EvaBlock

    def forward(
        self, x: Tensor, rope: Tensor | None = None, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        attended, alpha_BNN = self._attention(self.norm1(x), rope, attn_mask, is_causal)
        x = x + self.drop_path1(scaled(attended, self.gamma_1))
        mixed = self.mix(self.norm2(x), alpha_BNN, attended, self.real_tokens(attn_mask))
        out: Tensor = x + self.drop_path2(scaled(mixed, self.gamma_2))
        return out

    def _attention(
        self, x_BND: Tensor, rope: Tensor | None, attn_mask: Tensor | None, is_causal: bool
    ) -> tuple[Tensor, Tensor | None]:
        attn = self.attn
        if not self.needs_weights:
            return attn(x_BND, rope=rope, attn_mask=attn_mask, is_causal=is_causal), None
        q, k, v = heads(attn, x_BND)
        q, k = (_rotated(attn, x, rope).type_as(v) for x in (attn.q_norm(q), attn.k_norm(k)))
        return self.weighed(q, _every_head(attn, k), _every_head(attn, v), x_BND, attn_mask, is_causal)


def scaled(x: Tensor, gamma: Tensor | None) -> Tensor:
    """What LayerScale makes of x."""
    return x if gamma is None else gamma * x


def heads(attn: Any, x_BND: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, (B, h, N, d) each, before rotation; keys and values may have fewer heads."""
    if attn.qkv is None:
        q, k, v = (
            projection(x_BND).unflatten(-1, (-1, attn.head_dim)).transpose(1, 2)
            for projection in (attn.q_proj, attn.k_proj, attn.v_proj)
        )
        return q, k, v
    if getattr(attn, "q_bias", None) is None:
        qkv = attn.qkv(x_BND)
    else:  # keys have no bias
        qkv = F.linear(x_BND, attn.qkv.weight, torch.cat((attn.q_bias, attn.k_bias, attn.v_bias)))
    q, k, v = qkv.unflatten(-1, (3, attn.num_heads, -1)).permute(2, 0, 3, 1, 4)
    return q, k, v


def _rotated(attn: Any, x_BhNd: Tensor, rope: Tensor | None) -> Tensor:
    """Patches turned by their position; class and register tokens have none."""
    if rope is None:
        return x_BhNd
    prefix, patches = x_BhNd.tensor_split((attn.num_prefix_tokens,), dim=2)
    return torch.cat([prefix, apply_rot_embed_cat(patches, rope, half=attn.rotate_half)], dim=2)


def _every_head(attn: Any, x_BhNd: Tensor) -> Tensor:
    """Keys or values repeated for the queries that share them (grouped-query attention)."""
    groups = attn.num_heads // x_BhNd.shape[1]
    return x_BhNd.repeat_interleave(groups, dim=1) if groups > 1 else x_BhNd


class TimmEva(Timm):
    """Pre-norm blocks with rotary positions."""

    sparse_block, attentions = SparseEvaBlock, (EvaAttention, AttentionRope)


FAMILY = TimmEva()
