"""timm's VisionTransformer: ViT, DeiT, AugReg, DINO, DINOv2 with registers, CLIP and SigLIP towers.

Letters: B sequences, N tokens, D model width.
"""

from __future__ import annotations

from typing import Any

import torch
from timm.layers import Attention, GluMlp, Mlp, RmsNorm, RmsNormFp32, SwiGLU
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from ermoe.files import Json
from ermoe.models.backbones import Family, SparseBlock
from ermoe.models.families import timm_architecture
from ermoe.models.obstacles import not_linear
from ermoe.nn.ffn import FFN, Linear

_LINEARS: dict[type[nn.Module], tuple[str, ...]] = {
    Mlp: ("fc1", "fc2"),
    GluMlp: ("fc1", "fc2"),
    SwiGLU: ("fc1_g", "fc1_x", "fc2"),
}
_INNER_NORMS = (nn.Identity, nn.LayerNorm, nn.RMSNorm, RmsNorm, RmsNormFp32)


class SparseTimmBlock(SparseBlock):
    """A sparse block around one of timm's attention modules."""

    attn: Any

    def weighed(
        self, q: Tensor, k: Tensor, v: Tensor, x_BND: Tensor, attn_mask: Tensor | None, is_causal: bool
    ) -> tuple[Tensor, Tensor]:
        """Attention with its weights α, and what timm does after the heads: merge, normalise, gate, project."""
        attn = self.attn
        if is_causal:  # a token may look at itself and at what came before
            attn_mask = torch.ones(x_BND.shape[1], x_BND.shape[1], dtype=torch.bool, device=x_BND.device).tril()
        dropout = attn.attn_drop.p if self.training else 0.0
        out_BhNd, alpha_BNN = self.attend(q, k, v, bias=attn_mask, scale=attn.scale, dropout=dropout)
        merged = out_BhNd.transpose(1, 2).flatten(2)
        if getattr(attn, "norm", None) is not None:
            merged = attn.norm(merged)
        if getattr(attn, "gate", None) is not None:
            merged = merged * attn.gate(x_BND).sigmoid()
        return attn.proj_drop(attn.proj(merged)), alpha_BNN

    def real_tokens(self, attn_mask: Tensor | None) -> Tensor | None:
        """Which tokens are no padding, (B, N), where a mask of attention tells it; None for all."""
        return None


class SparseViTBlock(SparseTimmBlock, Block):
    """timm's pre-norm block with experts."""

    dense_class = Block

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        attended, alpha_BNN = self._attention(self.norm1(x), attn_mask, is_causal)
        x = x + self.drop_path1(self.ls1(attended))
        mixed = self.mix(self.norm2(x), alpha_BNN, attended, self.real_tokens(attn_mask))
        out: Tensor = x + self.drop_path2(self.ls2(mixed))
        return out

    def _attention(self, x_BND: Tensor, attn_mask: Tensor | None, is_causal: bool) -> tuple[Tensor, Tensor | None]:
        attn = self.attn
        if not self.needs_weights:
            return attn(x_BND, attn_mask=attn_mask, is_causal=is_causal), None
        q, k, v = attn.qkv(x_BND).unflatten(-1, (3, attn.num_heads, attn.head_dim)).permute(2, 0, 3, 1, 4)
        return self.weighed(attn.q_norm(q), attn.k_norm(k), v, x_BND, attn_mask, is_causal)


class Timm(Family):
    """What timm's backbones share: feed-forward networks, plain, gated, or gated with both maps packed into one."""

    attentions: tuple[type[nn.Module], ...]  # those whose weights can be had

    def refusal(self, block: Any) -> str | None:
        known = self.sparse_class(block).dense_class
        if type(block) is not known:
            kind = type(block).__name__
            return (
                f"it is a {kind}, and only timm's sequential pre-norm {known.__name__} has one place for experts; "
                "choose other blocks with blocks=, or another architecture"
            )
        mlp: Any = block.mlp
        if type(mlp) not in _LINEARS:
            return f"its feed-forward network is a {type(mlp).__name__}; ermoe knows Mlp, GluMlp and SwiGLU"
        if not isinstance(mlp.norm, _INNER_NORMS):
            return f"its inner norm is a {type(mlp.norm).__name__}; experts have LayerNorm and RMSNorm"
        for name in ("drop1", "drop2"):
            if not isinstance(getattr(mlp, name), nn.Dropout):
                return f"its mlp.{name} is a {type(getattr(mlp, name)).__name__}, not Dropout"
        for name in _LINEARS[type(mlp)]:
            if isinstance(getattr(mlp, name), nn.Conv2d):
                return "its feed-forward network is made of convolutions"
            if not isinstance(getattr(mlp, name), nn.Linear):
                return f"mlp.{name} {not_linear(getattr(mlp, name))}"
        if mlp.drop1.p != mlp.drop2.p:
            return "its feed-forward network has two different dropout rates"
        return None

    def no_context(self, block: Any) -> str | None:
        if type(block.attn) in self.attentions:
            return None
        return (
            f"its {type(block.attn).__name__} has no attention weights to average a context with; "
            "use score='prototype' or score='energy', which need none"
        )

    def ffn(self, block: Any) -> FFN:
        mlp = block.mlp
        inner_norm = None if isinstance(mlp.norm, nn.Identity) else mlp.norm
        shared: dict[str, Any] = {"act": mlp.act, "norm": block.norm2, "inner_norm": inner_norm}
        shared |= {"drop": mlp.drop1.p, "down": Linear.of(mlp.fc2)}
        kind = type(mlp)
        if kind is SwiGLU:
            return FFN(up=Linear.of(mlp.fc1_x), gate=Linear.of(mlp.fc1_g), **shared)
        if kind is GluMlp:
            half = mlp.fc1.out_features // 2
            first, second = Linear.of(mlp.fc1, slice(0, half)), Linear.of(mlp.fc1, slice(half, None))
            up, gate = (first, second) if mlp.gate_last else (second, first)
            return FFN(up=up, gate=gate, **shared)
        return FFN(up=Linear.of(mlp.fc1), **shared)

    def num_tokens(self, model: Any) -> int:
        return int(model.patch_embed.num_patches + getattr(model, "num_prefix_tokens", 0))

    def image_size(self, model: Any) -> tuple[int, ...]:
        return tuple(model.patch_embed.img_size)

    def channels(self, model: Any) -> int:
        return int(model.in_chans)

    def unsavable(self, model: Any) -> str | None:
        return timm_architecture.unsavable(model)

    def describe(self, model: Any) -> Json:
        return timm_architecture.describe(model)

    def build(self, description: Json, *, device: str = "cpu") -> nn.Module:
        return timm_architecture.build(description, device=device)


class TimmViT(Timm):
    """Sequential pre-norm blocks."""

    sparse_block, attentions = SparseViTBlock, (Attention,)


FAMILY = TimmViT()
