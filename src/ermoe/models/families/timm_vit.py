"""timm's VisionTransformer: ViT, DeiT, AugReg, DINO, DINOv2 with registers, CLIP and SigLIP towers.

Letters: B sequences, N tokens, D model width.
"""

from __future__ import annotations

from typing import Any

import torch
from timm.layers import Attention
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from ermoe.models.families import named_blocks, timm_architecture, timm_ffn
from ermoe.models.sparse_block import SparseBlock


class SparseViTBlock(SparseBlock, Block):
    """timm's pre-norm block with experts."""

    dense_class = Block

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        attended, alpha_BNN = self._attention(self.norm1(x), attn_mask, is_causal)
        x = x + self.drop_path1(self.ls1(attended))
        out: Tensor = x + self.drop_path2(self.ls2(self.mix(self.norm2(x), alpha_BNN, attended)))
        return out

    def _attention(self, x_BND: Tensor, attn_mask: Tensor | None, is_causal: bool) -> tuple[Tensor, Tensor | None]:
        attn: Any = self.attn
        if not self.needs_weights:
            return attn(x_BND, attn_mask=attn_mask, is_causal=is_causal), None
        q, k, v = attn.qkv(x_BND).unflatten(-1, (3, attn.num_heads, attn.head_dim)).permute(2, 0, 3, 1, 4)
        out, alpha_BNN = self.attend(
            attn.q_norm(q),
            attn.k_norm(k),
            v,
            bias=causal_mask(x_BND) if is_causal else attn_mask,
            scale=attn.scale,
            dropout=attn.attn_drop.p if self.training else 0.0,
        )
        return project(attn, out, x_BND), alpha_BNN


def causal_mask(x_BND: Tensor) -> Tensor:
    """True where a token may look: at itself and at what came before, (N, N)."""
    length = x_BND.shape[1]
    return torch.ones(length, length, dtype=torch.bool, device=x_BND.device).tril()


def project(attn: Any, out_BhNd: Tensor, x_BND: Tensor) -> Tensor:
    """What timm's attention modules do after the heads: merge, normalise, gate, project."""
    merged = attn.norm(out_BhNd.transpose(1, 2).flatten(2))
    if attn.gate is not None:
        merged = merged * attn.gate(x_BND).sigmoid()
    projected: Tensor = attn.proj_drop(attn.proj(merged))
    return projected


SPARSE_BLOCK = SparseViTBlock


def blocks(model: Any) -> list[tuple[str, nn.Module]]:
    """The transformer blocks with their names."""
    return list(named_blocks(model, "blocks"))


def refusal(block: Any) -> str | None:
    """Why this block cannot be made sparse; None if it can."""
    if type(block) is not Block:
        return f"it is a {type(block).__name__}, and only timm's sequential pre-norm Block has one place for experts"
    return timm_ffn.refusal(block.mlp)


def no_context(block: Any) -> str | None:
    """Why its attention cannot say where tokens looked; None if it can."""
    if type(block.attn) is not Attention:
        return timm_ffn.no_weights(block.attn)
    return None


ffn = timm_ffn.of_block
num_tokens = timm_architecture.num_tokens
image_size = timm_architecture.image_size
describe = timm_architecture.describe
build = timm_architecture.build
