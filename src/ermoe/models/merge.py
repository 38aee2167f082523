"""The same outputs by other weights: factors multiplied out for inference, or experts that are equal as one network.

x U diag(s) Vᵀ costs R (I + O) multiplications a token, x W costs I · O. Merging keeps every output and every choice of
expert: the columns of U that route stay, as a basis of the router's own.

Letters: E experts, D model width, I input and O output width of a weight, R rank, r routing rank.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from ermoe.errors import UserError
from ermoe.models.backbones import SparseBlock, densify, family_of
from ermoe.models.obstacles import refuse_adapters
from ermoe.models.upcycle import Sparsity, mark_sparse, sparsity_of
from ermoe.nn import DenseLinear, EigenLinear, Experts, MixtureLayer, MoE, Score, TopKRouter
from ermoe.nn.sharding import usable_copy

_EQUAL_ENOUGH = 1e-4


def merge(model: nn.Module, *, inplace: bool = False) -> nn.Module:
    """A model with the same outputs whose factored weights are multiplied out where R > I·O / (I + O).

    A copy of a `DistributedDataParallel` is one of the model inside.

    >>> from ermoe.nn import EigenMoE
    >>> layer = EigenMoE(32, num_experts=4).eval()  # full rank: 32 > 32·128 / 160
    >>> x, context = torch.randn(2, 10, 32), torch.randn(2, 10, 32)
    >>> merged = merge(layer)
    >>> torch.allclose(merged(x, context), layer(x, context), atol=1e-5), type(merged.experts.up).__name__
    (True, 'DenseLinear')
    """
    refuse_adapters(model)
    model = model if inplace else usable_copy(model)
    for layer in model.modules():
        if isinstance(layer, MoE):
            _merge_layer(layer)
    for module in model.modules():
        sparsity = getattr(module, "sparsity", None)
        if isinstance(sparsity, Sparsity):
            mark_sparse(module, replace(sparsity, merged=True), model)
    return model


@torch.no_grad()
def _merge_layer(layer: MoE) -> None:
    """Multiplies out the factors of one layer, in place."""
    experts = layer.experts
    entry = experts.entry
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
    dense.W = nn.Parameter(linear.matrices(), requires_grad=linear.U.requires_grad)
    dense.bias = bias
    return dense.train(linear.training)


def _keep_routing_basis(score: Score, entry: EigenLinear) -> None:
    if not score.needs_basis or score.basis is not None:
        return
    routing_columns = entry.U[:, :, : score.route_rank].clone()
    score.basis = nn.Parameter(routing_columns, requires_grad=entry.U.requires_grad)


def to_dense(model: nn.Module, *, inplace: bool = False) -> nn.Module:
    """The dense model whose feed-forward networks the experts of a sparse one still are, not trained apart.

    Beside a shared expert they are that network as long as the others say nothing.

    It has the outputs of the sparse model if the weights of a token's experts sum to 1 and no pair is dropped: with the
    eigen router and without a capacity, but not with V-MoE, expert choice or Soft MoE, which scale what experts say.

    >>> import timm
    >>> from ermoe.models.upcycle import upcycle
    >>> dense = timm.create_model("test_vit").eval()
    >>> again = to_dense(upcycle(dense))
    >>> images = torch.randn(1, 3, 160, 160)
    >>> torch.allclose(again(images), dense(images), atol=1e-5), again.state_dict().keys() == dense.state_dict().keys()
    (True, True)
    """
    refuse_adapters(model)
    sparsity_of(model)
    family = family_of(model)
    model = model if inplace else usable_copy(model)
    sparse = [(name, block) for name, block in family.blocks(model) if isinstance(block, SparseBlock)]
    for name, block in sparse:
        _check_equal(name, block)
    for _, block in sparse:
        weights = [(linear.matrices(), linear.bias) for linear in _networks(block).linears()]
        densify(block)
        family.ffn(block).assign((_mean(W_EIO), None if b_EO is None else _mean(b_EO)) for W_EIO, b_EO in weights)
    backbone = family.backbone(model)
    for name in ("sparsity", "output_error", "group_fits", "no_weight_decay"):
        backbone.__dict__.pop(name, None)
    family_of(backbone).mark(backbone, None, model)
    return model


def _networks(block: SparseBlock) -> Experts:
    """What the dense network has become: all experts, or the one that every token meets."""
    layer: MixtureLayer = block.mlp
    return layer.experts if layer.shared is None else layer.shared


@torch.no_grad()
def _check_equal(name: str, block: SparseBlock) -> None:
    (skeleton,) = block._skeleton
    kept = sum(linear.matrices()[0].numel() for linear in _networks(block).linears())
    if kept < sum(parameter.numel() for parameter in skeleton.parameters() if parameter.dim() > 1):
        raise UserError(
            f"the networks of {name} keep only some of the dense network's hidden units: it cannot be dense again; go "
            "back to the dense model that it was made from"
        )
    if block.mlp.shared is not None:
        last = block.mlp.experts.down
        if bool(last.matrices().any()) or (last.bias is not None and bool(last.bias.any())):
            raise UserError(
                f"the experts of {name} add to the dense network by now: only while they are silent, as right after "
                "ermoe.upcycle, is the model a dense one"
            )
        return
    apart = max(_apart(linear) for linear in block.mlp.experts.linears())
    if apart > _EQUAL_ENOUGH:
        raise UserError(
            f"the experts of {name} differ by {apart:.1e} of their size: only experts that are still equal, as right "
            "after ermoe.upcycle, make a dense model"
        )


def _apart(linear: EigenLinear | DenseLinear) -> float:
    """The largest distance of an expert from the mean expert, relative to the latter."""
    weight_EIO = linear.matrices()
    mean_IO = weight_EIO.mean(0)
    apart = float((weight_EIO - mean_IO).norm(dim=(1, 2)).max() / mean_IO.norm().clamp_min(1e-30))
    if linear.bias is None:
        return apart
    mean_O = linear.bias.mean(0)
    return max(apart, float((linear.bias - mean_O).abs().max() / mean_O.abs().max().clamp_min(1e-30)))


def _mean(stacked: Tensor) -> Tensor:
    return stacked.double().mean(0).to(stacked.dtype)
