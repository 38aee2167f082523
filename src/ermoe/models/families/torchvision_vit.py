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
from ermoe.files import Json
from ermoe.models.backbones import Family, SparseBlock, children_at
from ermoe.models.obstacles import packed
from ermoe.nn.ffn import FFN, Linear


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
        qkv = F.linear(x_BND, packed(attn).in_proj_weight, attn.in_proj_bias)
        q, k, v = qkv.unflatten(-1, (3, attn.num_heads, attn.head_dim)).permute(2, 0, 3, 1, 4)
        dropout = attn.dropout if self.training else 0.0
        out, alpha_BNN = self.attend(q, k, v, scale=attn.head_dim**-0.5, dropout=dropout)
        return attn.out_proj(out.transpose(1, 2).flatten(2)), alpha_BNN


class TorchvisionViT(Family):
    """Blocks are the layers of the encoder."""

    sparse_block, network, library = SparseEncoderBlock, MLPBlock, "torchvision's"

    def blocks(self, model: Any) -> list[tuple[str, nn.Module]]:
        return children_at(model, "encoder.layers")

    def ffn(self, block: Any) -> FFN:
        up, act, drop, down, _ = block.mlp
        return FFN(up=Linear.of(up), down=Linear.of(down), act=act, norm=block.ln_2, drop=drop.p)

    def num_tokens(self, model: Any) -> int:
        return int(model.seq_length)

    def image_size(self, model: Any) -> tuple[int, ...]:
        return (model.image_size, model.image_size)

    def describe(self, model: Any) -> Json:
        """The arguments of torchvision's constructor."""
        if not isinstance(model.conv_proj, nn.Conv2d):
            raise UserError(
                "this torchvision model has a convolutional stem, which ermoe does not know how to write down"
            )
        layers = model.encoder.layers
        args = ("image_size", "patch_size", "hidden_dim", "mlp_dim", "dropout", "attention_dropout", "num_classes")
        own = {name: getattr(model, name) for name in (*args, "representation_size")}
        head = getattr(model.heads, "head", None)
        if isinstance(head, nn.Linear):  # people replace it without telling the model
            own["num_classes"] = head.out_features
        return {**own, "num_layers": len(layers), "num_heads": layers[0].num_heads}

    def build(self, description: Json, *, device: str = "cpu") -> nn.Module:
        with torch.device(device):
            model: nn.Module = VisionTransformer(**description)
        return model


FAMILY = TorchvisionViT()
