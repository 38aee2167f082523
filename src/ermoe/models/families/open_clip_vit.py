"""open_clip's own image tower, VisionTransformer, with plain or custom blocks.

Letters: B sequences, N tokens, D model width, h heads, d width of a head.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from open_clip.transformer import (
    Attention,
    CustomResidualAttentionBlock,
    LayerNorm,
    LayerNormFp32,
    LayerScale,
    PatchDropout,
    QuickGELU,
    ResidualAttentionBlock,
    VisionTransformer,
)
from torch import Tensor, nn

from ermoe.errors import UserError
from ermoe.files import Json
from ermoe.models.backbones import Family, SparseBlock, children_at, dense_network
from ermoe.models.obstacles import packed
from ermoe.nn.ffn import FFN, Linear

_ACTIVATIONS: dict[str, type[nn.Module]] = {"GELU": nn.GELU, "QuickGELU": QuickGELU}
_NORMS: dict[str, type[nn.Module]] = {"LayerNorm": LayerNorm, "LayerNormFp32": LayerNormFp32}


class _SparseBlock(SparseBlock):
    """What both kinds of blocks share; their attention modules have the same names for the same weights."""

    attn: Any
    ln_1: Any
    ln_2: Any
    ls_1: Any
    ls_2: Any

    def _mixed(self, x: Tensor, attended: Tensor, alpha_BNN: Tensor | None) -> Tensor:
        x = x + self.ls_1(attended)
        out: Tensor = x + self.ls_2(self.mix(self.ln_2(x), alpha_BNN, attended))
        return out

    def _heads(self, x_BND: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, (B, h, N, d) each."""
        qkv = F.linear(x_BND, packed(self.attn).in_proj_weight, self.attn.in_proj_bias)
        q, k, v = qkv.unflatten(-1, (3, self.attn.num_heads, self.attn.head_dim)).permute(2, 0, 3, 1, 4)
        return q, k, v

    def get_weight_dtype(self) -> torch.dtype:
        """The precision of its weights, which open_clip reads off the network that experts replace."""
        dtype: torch.dtype = self.attn.in_proj_weight.dtype
        return dtype


class SparseResidualAttentionBlock(_SparseBlock, ResidualAttentionBlock):  # type: ignore[misc] # it is not typed
    """open_clip's plain block with experts."""

    dense_class = ResidualAttentionBlock
    attention: Any

    def forward(
        self,
        q_x: Tensor,
        k_x: Tensor | None = None,
        v_x: Tensor | None = None,
        attn_mask: Tensor | None = None,
    ) -> Tensor:
        z = self.ln_1(q_x)
        if not self.needs_weights:
            return self._mixed(q_x, self.attention(z, attn_mask=attn_mask), None)
        q, k, v = self._heads(z)
        bias = None if attn_mask is None else _by_heads(attn_mask.to(z.dtype), self.attn.num_heads)
        dropout = self.attn.dropout if self.training else 0.0
        out, alpha_BNN = self.attend(q, k, v, bias=bias, scale=self.attn.head_dim**-0.5, dropout=dropout)
        return self._mixed(q_x, self.attn.out_proj(out.transpose(1, 2).flatten(2)), alpha_BNN)


class SparseCustomResidualAttentionBlock(_SparseBlock, CustomResidualAttentionBlock):  # type: ignore[misc]
    """open_clip's block with norms and scales in its attention, with experts."""

    dense_class = CustomResidualAttentionBlock
    ln_attn: Any

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        z = self.ln_1(x)
        if not self.needs_weights:
            return self._mixed(x, self.ln_attn(self.attn(z, attn_mask=attn_mask)), None)
        attn = self.attn
        q, k, v = self._heads(z)
        if attn_mask is not None and attn_mask.dtype == torch.bool:  # True: may not look
            attn_mask = torch.zeros_like(attn_mask, dtype=z.dtype).masked_fill(attn_mask, float("-inf"))
        bias = None if attn_mask is None else _by_heads(attn_mask.to(z.dtype), attn.num_heads)
        dropout = attn.attn_drop.p if self.training else 0.0
        out, alpha_BNN = self.attend(attn.ln_q(q), attn.ln_k(k), v, bias=bias, scale=attn.scale, dropout=dropout)
        out = out if attn.head_scale is None else out * attn.head_scale
        attended = attn.out_drop(attn.out_proj(attn.ln_inner(out.transpose(1, 2).flatten(2))))
        return self._mixed(x, self.ln_attn(attended), alpha_BNN)


def _by_heads(mask: Tensor, num_heads: int) -> Tensor:
    """A mask (N, N) or (B·h, N, N) as one that is added to logits (B, h, N, N)."""
    return mask.unflatten(0, (-1, num_heads)) if mask.dim() == 3 else mask


class OpenClipViT(Family):
    """Blocks are the tower's residual blocks."""

    library = "open_clip's"

    def sparse_class(self, block: Any) -> type[SparseBlock]:
        is_custom = isinstance(block, CustomResidualAttentionBlock)
        return SparseCustomResidualAttentionBlock if is_custom else SparseResidualAttentionBlock

    def blocks(self, model: Any) -> list[tuple[str, nn.Module]]:
        if not isinstance(model, VisionTransformer):
            raise UserError(f"{type(model).__name__} sees no images: pass the image tower, model.visual, or all of it")
        return children_at(model, "transformer.resblocks")

    def refusal(self, block: Any) -> str | None:
        if type(block) not in (ResidualAttentionBlock, CustomResidualAttentionBlock):
            return f"it is a {type(block).__name__}, not {self.library} ResidualAttentionBlock"
        layers = dict(block.mlp.named_children())
        if type(block.mlp) is not nn.Sequential or not {"c_fc", "gelu", "c_proj"} <= layers.keys():
            return f"its feed-forward network is a {type(block.mlp).__name__}, not {self.library}"
        if not isinstance(layers.get("ln", nn.Identity()), nn.Identity):
            return "its feed-forward network has an inner norm, which experts do not have"
        return None

    def no_context(self, block: Any) -> str | None:
        if isinstance(block.attn, Attention) and block.attn.logit_scale is not None:
            return "its attention compares by cosine; use score='prototype' or score='energy', which need no context"
        return None

    def ffn(self, block: Any) -> FFN:
        mlp = block.mlp
        return FFN(up=Linear.of(mlp.c_fc), down=Linear.of(mlp.c_proj), act=mlp.gelu, norm=block.ln_2)

    def num_tokens(self, model: Any) -> int:
        return int(model.positional_embedding.shape[0])

    def image_size(self, model: Any) -> tuple[int, ...]:
        return tuple(model.image_size)

    def describe(self, model: Any) -> Json:
        """The arguments of the tower's constructor, read off it."""
        if not isinstance(model, VisionTransformer):
            raise UserError(f"{type(model).__name__} is a part of a model: save the whole one, or its image tower")
        is_fixed = model.class_embedding.requires_grad and not model.positional_embedding.requires_grad
        drop, pool = model.patch_dropout, model.attn_pool
        described = {
            "image_size": list(model.image_size),
            "patch_size": list(model.patch_size),
            "output_dim": model.output_dim,
            "patch_dropout": drop.prob if isinstance(drop, PatchDropout) else 0.0,
            "no_ln_pre": isinstance(model.ln_pre, nn.Identity),
            "pos_embed_type": "sin_cos_2d" if is_fixed else "learnable",
            "pool_type": model.pool_type,
            "final_ln_after_pool": model.final_ln_after_pool,
            "output_tokens": model.output_tokens,
            **describe_blocks(model.transformer),
        }
        if pool is None:
            return described
        queries, heads = pool.query.shape[0], pool.attn.num_heads
        pooling = model.attn_pool_type or True
        return {**described, "attentional_pool": pooling, "attn_pooler_queries": queries, "attn_pooler_heads": heads}

    def build(self, description: Json, *, device: str = "cpu") -> nn.Module:
        args = dict(description)
        act, norm = (dict(args.pop(name)) for name in ("act", "norm"))
        layers = {
            "act_layer": partial(_ACTIVATIONS[act.pop("class")], **act),
            "norm_layer": partial(_NORMS[norm.pop("class")], **norm),
        }
        with torch.device(device):
            model: nn.Module = VisionTransformer(**args, **layers)
        return model


def describe_blocks(transformer: Any) -> Json:
    """What a stack of open_clip's blocks was made with, of the image or of the text tower."""
    block = transformer.resblocks[0]
    network: Any = dense_network(block)
    act, norm = network.gelu, block.ln_2
    described = {
        "width": transformer.width,
        "layers": len(transformer.resblocks),
        "heads": block.attn.num_heads,
        "mlp_ratio": network.c_fc.out_features / transformer.width,
        "ls_init_value": 1e-5 if isinstance(block.ls_1, LayerScale) else None,
        "act": {"class": type(act).__name__, **_given(act, approximate="none")},
        "norm": {"class": type(norm).__name__, **_given(norm, eps=1e-5)},
    }
    if not isinstance(block, CustomResidualAttentionBlock):
        return described
    norms = {"qk_norm": block.attn.ln_q, "scale_attn_inner": block.attn.ln_inner, "scale_attn": block.ln_attn}
    return {
        **described,
        "block_type": "custom",
        "scale_heads": block.attn.head_scale is not None,
        "scaled_cosine_attn": block.attn.logit_scale is not None,
        **{name: not isinstance(module, nn.Identity) for name, module in norms.items()},
        "scale_fc": not isinstance(network.ln, nn.Identity),
    }


def _given(module: nn.Module, **usual: Any) -> Json:
    """Attributes that are not as usual."""
    return {name: getattr(module, name) for name, value in usual.items() if getattr(module, name, value) != value}


FAMILY = OpenClipViT()
