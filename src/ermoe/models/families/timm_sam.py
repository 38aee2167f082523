"""timm's VisionTransformerSAM: the image encoder of Segment Anything, ViTDet and their kin, with attention in windows.

Tokens stay on their grid. Where attention is windowed, so is the context: a token is compared with what it saw.

Letters: B images, H × W tokens on the grid, W windows of all images, n tokens of a window, D model width, h heads,
d width of a head.
"""

from __future__ import annotations

from typing import Any

from timm.layers import apply_rot_embed_cat
from timm.models.vision_transformer_sam import (
    Attention,
    Block,
    get_decomposed_rel_pos_bias,
    window_partition,
    window_unpartition,
)
from torch import Tensor

from ermoe.models.families.timm_vit import SparseTimmBlock, Timm
from ermoe.nn import context


class SparseSAMBlock(SparseTimmBlock, Block):
    """timm's SAM block with experts."""

    dense_class = Block
    windowed = True

    def forward(self, x: Tensor) -> Tensor:
        grid = (x.shape[1], x.shape[2])
        attended, alpha_Wnn = self._attention(self._windows(self.norm1(x)))
        x = x + self._whole(self.drop_path1(self.ls1(attended)), grid)
        z = self.norm2(x)
        context_BND = None
        if alpha_Wnn is not None:
            seen = self._windows(z) if self.context_of == "features" else attended
            context_Wnd = context(alpha_Wnn, seen.flatten(1, 2))
            context_BND = self._whole(context_Wnd.view_as(seen), grid).flatten(1, 2)
        mixed_BND = self.mlp(z.flatten(1, 2), context_BND)
        out: Tensor = x + self.drop_path2(self.ls2(mixed_BND)).view_as(x)
        return out

    def _windows(self, x: Tensor) -> Tensor:
        """(B, H, W, D) as windows with zeros where they reach beyond the grid; the whole grid where there are none."""
        windows: Tensor = window_partition(x, self.window_size)[0] if self.window_size > 0 else x
        return windows

    def _whole(self, windows: Tensor, grid: tuple[int, int]) -> Tensor:
        """Undoes `_windows`."""
        size = self.window_size
        if size == 0:
            return windows
        height, width = (edge + -edge % size for edge in grid)
        whole: Tensor = window_unpartition(windows, size, grid, (height, width))
        return whole

    def _attention(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        attn: Any = self.attn
        if not self.needs_weights:
            return attn(x), None
        grid = (x.shape[1], x.shape[2])
        x_WnD = x.flatten(1, 2)
        q, k, v = attn.qkv(x_WnD).unflatten(-1, (3, attn.num_heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = attn.q_norm(q), attn.k_norm(k)
        bias = None
        if attn.use_rel_pos:
            biases = get_decomposed_rel_pos_bias(q.flatten(0, 1), attn.rel_pos_h, attn.rel_pos_w, grid, grid)
            bias = biases.unflatten(0, q.shape[:2])
        elif attn.rope is not None:
            rope = attn.rope.get_embed()
            q, k = (apply_rot_embed_cat(part, rope).type_as(v) for part in (q, k))
        attended, alpha_Wnn = self.weighed(q, k, v, x_WnD, bias, is_causal=False)
        return attended.view_as(x), alpha_Wnn


class TimmSAM(Timm):
    """Blocks on a grid of tokens."""

    sparse_block, attentions = SparseSAMBlock, (Attention,)


FAMILY = TimmSAM()
