"""timm's NaFlexVit: images of any shape in one batch, padded to equal numbers of tokens.

Padding reaches blocks as a mask of attention. Experts do not meet it: it is neither routed nor counted.

Letters: B sequences, N tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from timm.layers import Attention, AttentionRope
from timm.models.eva import EvaAttention, EvaBlock
from torch import Tensor

from ermoe.models.backbones import SparseBlock
from ermoe.models.families.timm_eva import SparseEvaBlock
from ermoe.models.families.timm_vit import SparseTimmBlock, SparseViTBlock, Timm


class _Padded(SparseTimmBlock):
    def real_tokens(self, attn_mask: Tensor | None) -> Tensor | None:
        """Tokens that may be looked at: by all, (B, 1, 1, N), or by each other and themselves, (B, 1, N, N)."""
        if attn_mask is None or attn_mask.dim() != 4:
            return None
        one_head = attn_mask[:, 0]
        looked_at_BN = one_head[:, 0] if one_head.shape[1] == 1 else one_head.diagonal(dim1=1, dim2=2)
        if looked_at_BN.dtype == torch.bool:
            return looked_at_BN
        return looked_at_BN > torch.finfo(looked_at_BN.dtype).min / 2


class SparseNaFlexBlock(_Padded, SparseViTBlock):
    """timm's pre-norm block with experts for real tokens."""


class SparseNaFlexEvaBlock(_Padded, SparseEvaBlock):
    """timm's EVA block with experts for real tokens."""


class TimmNaFlex(Timm):
    """Blocks of ViT, or of EVA where positions are rotations."""

    sparse_block, attentions = SparseNaFlexBlock, (Attention, EvaAttention, AttentionRope)

    def sparse_class(self, block: Any) -> type[SparseBlock]:
        return SparseNaFlexEvaBlock if isinstance(block, EvaBlock) else SparseNaFlexBlock

    def num_tokens(self, model: Any) -> int:
        height, width = self.image_size(model)
        patch_height, patch_width = model.embeds.patch_size
        return int((height // patch_height) * (width // patch_width) + model.num_prefix_tokens)

    def image_size(self, model: Any) -> tuple[int, ...]:
        """The size for which positions were learned: the model takes any."""
        embeds = model.embeds
        if embeds.pos_embed_grid_size is None:
            return tuple(model.pretrained_cfg["input_size"][1:])
        return tuple(edge * patch for edge, patch in zip(embeds.pos_embed_grid_size, embeds.patch_size, strict=True))

    def channels(self, model: Any) -> int:
        return int(model.embeds.in_chans)


FAMILY = TimmNaFlex()
