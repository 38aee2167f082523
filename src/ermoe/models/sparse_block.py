"""What the sparse blocks of all backbone families share: how they become sparse, and the context they route with.

A block becomes sparse in place. It keeps its modules, parameter names, hooks and settings; its feed-forward network
``mlp`` becomes an expert layer, and its class a subclass whose forward hands that layer the context.

Letters: B sequences, N tokens, D model width, h heads, d width of a head.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn

from ermoe.nn import MixtureLayer, attend, context

CONTEXT_SOURCES = ("features", "attention")


class SparseBlock(nn.Module):
    """Mixin of a transformer block whose feed-forward network ``mlp`` is a mixture of experts.

    ``context_of`` says what the attention weights average: the "features" that enter the expert layer, or the output
    of the "attention". With ``context_grad=False`` the weights α carry no gradient, and attention itself stays fused.
    """

    dense_class: type[nn.Module]
    mlp: Any  # a MixtureLayer, where the dense block has a network of its own
    context_of: str
    context_grad: bool

    # The dense network without its weights, in a tuple so that torch does not take it for a submodule.
    _skeleton: tuple[nn.Module]

    @property
    def needs_weights(self) -> bool:
        """Whether the router asks where tokens looked; if not, the backbone's own attention runs untouched."""
        layer: MixtureLayer = self.mlp
        return layer.needs_context

    def mix(
        self, z_BND: Tensor, alpha_BNN: Tensor | None, attended_BND: Tensor, mask_BN: Tensor | None = None
    ) -> Tensor:
        """The expert layer on ``z_BND``, with the context its router asks for (Eq. 2)."""
        context_BND = None
        if alpha_BNN is not None:
            context_BND = context(alpha_BNN, z_BND if self.context_of == "features" else attended_BND)
        mixed_BND: Tensor = self.mlp(z_BND, context_BND, mask_BN)
        return mixed_BND

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, bias: Tensor | None = None, scale: float, dropout: float
    ) -> tuple[Tensor, Tensor]:
        """Attention outputs (B, h, N, d) and the head-mean weights α (B, N, N)."""
        return attend(q, k, v, bias=bias, scale=scale, dropout=dropout, weights_grad=self.context_grad)


def dense_network(block: Any) -> nn.Module:
    """The feed-forward module of a dense block, or what is left of it in a sparse one: everything but its weights."""
    return block._skeleton[0] if isinstance(block, SparseBlock) else block.mlp


def sparsify(
    block: Any, layer: MixtureLayer, sparse_class: type[SparseBlock], *, context_of: str, context_grad: bool
) -> None:
    """Puts an expert layer in the place of the block's feed-forward network."""
    skeleton = copy.deepcopy(block.mlp.to("meta"))
    block.__class__ = sparse_class
    block.context_of, block.context_grad = context_of, context_grad
    block._skeleton = (skeleton,)
    block.mlp = layer.train(block.training)


def densify(block: Any) -> None:
    """Undoes `sparsify`, except that the weights of the dense network are yet to be written."""
    reference = next(block.mlp.parameters())
    (skeleton,) = block._skeleton
    block.mlp = copy.deepcopy(skeleton).to_empty(device=reference.device).to(reference.dtype).train(block.training)
    block.__class__ = block.dense_class
    for name in ("_skeleton", "context_of", "context_grad"):
        delattr(block, name)
