"""torchvision's VisionTransformer: vit_b_16, vit_b_32, vit_l_16, vit_l_32 and vit_h_14.

Letters: B sequences, N tokens, D model width, h heads, d width of a head.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.vision_transformer import EncoderBlock, MLPBlock, VisionTransformer

from ermoe.errors import UserError
from ermoe.models.families import named_blocks
from ermoe.models.ffn import FFN, Linear
from ermoe.models.sparse_block import SparseBlock
from ermoe.plain import Json


class SparseEncoderBlock(SparseBlock, EncoderBlock):  # type: ignore[misc] # torchvision is not typed
    """torchvision's encoder block with experts."""

    dense_class = EncoderBlock
    ln_1: nn.Module
    ln_2: nn.Module
    dropout: nn.Module

    def forward(self, input: Tensor) -> Tensor:
        attended, alpha_BNN = self._attention(self.ln_1(input))
        x = input + self.dropout(attended)
        out: Tensor = x + self.mix(self.ln_2(x), alpha_BNN, attended)
        return out

    def _attention(self, x_BND: Tensor) -> tuple[Tensor, Tensor | None]:
        attn: Any = self.self_attention  # an nn.MultiheadAttention
        if not self.needs_weights:
            return attn(x_BND, x_BND, x_BND, need_weights=False)[0], None
        qkv = F.linear(x_BND, attn.in_proj_weight, attn.in_proj_bias)
        q, k, v = qkv.unflatten(-1, (3, attn.num_heads, attn.head_dim)).permute(2, 0, 3, 1, 4)
        dropout = attn.dropout if self.training else 0.0
        out, alpha_BNN = self.attend(q, k, v, scale=attn.head_dim**-0.5, dropout=dropout)
        return attn.out_proj(out.transpose(1, 2).flatten(2)), alpha_BNN


SPARSE_BLOCK = SparseEncoderBlock


def blocks(model: Any) -> list[tuple[str, nn.Module]]:
    """The transformer blocks with their names."""
    return list(named_blocks(model, "encoder.layers"))


def refusal(block: Any) -> str | None:
    """Why this block cannot be made sparse; None if it can."""
    if type(block) is not EncoderBlock:
        return f"it is a {type(block).__name__}, not torchvision's EncoderBlock"
    if type(block.mlp) is not MLPBlock:
        return f"its feed-forward network is a {type(block.mlp).__name__}, not torchvision's MLPBlock"
    return None


def no_context(block: Any) -> str | None:
    """None: every block of torchvision can say where its tokens looked."""
    return None


def ffn(block: Any) -> FFN:
    """The block's dense feed-forward network."""
    up, act, drop, down, _ = block.mlp
    return FFN(up=Linear.of(up), down=Linear.of(down), act=act, norm=block.ln_2, drop=drop.p)


def num_tokens(model: Any) -> int:
    """Length of the sequence."""
    return int(model.seq_length)


def image_size(model: Any) -> tuple[int, ...]:
    """The model's own size of images."""
    return (model.image_size, model.image_size)


def describe(model: Any) -> Json:
    """The arguments of torchvision's constructor."""
    if not isinstance(model.conv_proj, nn.Conv2d):
        raise UserError("this torchvision model has a convolutional stem, which ermoe does not know how to write down")
    blocks_ = model.encoder.layers
    args = ("image_size", "patch_size", "hidden_dim", "mlp_dim", "dropout", "attention_dropout", "num_classes")
    return {
        **{name: getattr(model, name) for name in (*args, "representation_size")},
        "num_layers": len(blocks_),
        "num_heads": blocks_[0].num_heads,
    }


def build(description: Json, *, device: str = "cpu") -> nn.Module:
    """The dense model a description means, freshly initialised."""
    with torch.device(device):
        model: nn.Module = VisionTransformer(**description)
    return model
