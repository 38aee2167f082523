"""timm's Beit: BEiT and BEiT v2, whose attention is biased by relative positions.

Letters: B sequences, N tokens, D model width, h heads.
"""

from __future__ import annotations

from timm.models.beit import Attention, Block
from torch import Tensor

from ermoe.models.families.timm_eva import heads, scaled
from ermoe.models.families.timm_vit import SparseTimmBlock, Timm


class SparseBeitBlock(SparseTimmBlock, Block):
    """timm's BEiT block with experts."""

    dense_class = Block

    def forward(self, x: Tensor, shared_rel_pos_bias: Tensor | None = None) -> Tensor:
        attended, alpha_BNN = self._attention(self.norm1(x), shared_rel_pos_bias)
        x = x + self.drop_path1(scaled(attended, self.gamma_1))
        out: Tensor = x + self.drop_path2(scaled(self.mix(self.norm2(x), alpha_BNN, attended), self.gamma_2))
        return out

    def _attention(self, x_BND: Tensor, shared_bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        attn = self.attn
        if not self.needs_weights:
            return attn(x_BND, shared_rel_pos_bias=shared_bias), None
        bias_hNN = shared_bias
        if attn.relative_position_bias_table is not None:
            own_hNN = attn._get_rel_pos_bias()
            bias_hNN = own_hNN if shared_bias is None else own_hNN + shared_bias
        return self.weighed(*heads(attn, x_BND), x_BND, bias_hNN, is_causal=False)


class TimmBeit(Timm):
    """Blocks with relative positions."""

    sparse_block, attentions = SparseBeitBlock, (Attention,)


FAMILY = TimmBeit()
