"""Factors multiplied out for inference, wherever the product is cheaper than its factors.

x U diag(s) Vᵀ costs R (I + O) multiplications a token, x W costs I · O. Merging keeps every output and every choice of
expert: the columns of U that route stay, as a basis of the router's own.

Letters: E experts, D model width, I input and O output width of a weight, R rank, r routing rank.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import nn

from ermoe.models.upcycle import Sparsity, mark_sparse
from ermoe.nn import DenseLinear, EigenLinear, MoE, Score, TopKRouter


def merge(model: nn.Module, *, inplace: bool = False) -> nn.Module:
    """A model with the same outputs whose factored weights are multiplied out where R > I·O / (I + O).

    >>> from ermoe.nn import EigenMoE
    >>> layer = EigenMoE(32, num_experts=4).eval()  # full rank: 32 > 32·128 / 160
    >>> x, context = torch.randn(2, 10, 32), torch.randn(2, 10, 32)
    >>> merged = merge(layer)
    >>> torch.allclose(merged(x, context), layer(x, context), atol=1e-5), type(merged.experts.up).__name__
    (True, 'DenseLinear')
    """
    model = model if inplace else copy.deepcopy(model)
    for layer in model.modules():
        if isinstance(layer, MoE):
            _merge_layer(layer)
    sparsity = getattr(model, "sparsity", None)
    if isinstance(sparsity, Sparsity):
        mark_sparse(model, replace(sparsity, merged=True))
    return model


@torch.no_grad()
def _merge_layer(layer: MoE) -> None:
    """Multiplies out the factors of one layer, in place."""
    experts = layer.experts
    entry = experts.up if experts.gate is None else experts.gate
    for name, linear in list(experts.named_children()):
        if isinstance(linear, EigenLinear) and _is_cheaper_merged(linear):
            if linear is entry and isinstance(layer.router, TopKRouter):
                _keep_routing_basis(layer.router.score, linear)
            setattr(experts, name, _merged(linear))


def _is_cheaper_merged(linear: EigenLinear) -> bool:
    """Whether R (I + O) > I · O."""
    (_, in_dim, rank), out_dim = linear.U.shape, linear.V.shape[1]
    return rank * (in_dim + out_dim) > in_dim * out_dim


def _merged(linear: EigenLinear) -> DenseLinear:
    num_experts, in_dim, _ = linear.U.shape
    bias = linear.bias
    dense = DenseLinear(
        num_experts, in_dim, linear.V.shape[1], bias=bias is not None, device="meta", dtype=linear.U.dtype
    )
    dense.W = nn.Parameter(linear.weight(), requires_grad=linear.U.requires_grad)
    dense.bias = bias
    return dense.train(linear.training)


def _keep_routing_basis(score: Score, entry: EigenLinear) -> None:
    if not score.needs_basis or score.basis is not None:
        return
    routing_columns = entry.U[:, :, : score.route_rank].clone()
    score.basis = nn.Parameter(routing_columns, requires_grad=entry.U.requires_grad)
