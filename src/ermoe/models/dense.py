"""The way back: experts that are still equal are one dense network."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from ermoe.errors import UserError
from ermoe.models.backbones import SparseBlock, densify, family_of
from ermoe.models.upcycle import sparsity_of
from ermoe.nn import DenseLinear, EigenLinear

_EQUAL_ENOUGH = 1e-4


def to_dense(model: nn.Module, *, inplace: bool = False) -> nn.Module:
    """The dense model whose feed-forward networks the experts of a sparse one still are, not trained apart.

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
    sparsity_of(model)
    family = family_of(model)
    model = model if inplace else copy.deepcopy(model)
    sparse = [(name, block) for name, block in family.blocks(model) if isinstance(block, SparseBlock)]
    for name, block in sparse:
        _check_equal(name, block)
    for _, block in sparse:
        weights = [(linear.weight(), linear.bias) for linear in block.mlp.experts.linears()]
        densify(block)
        with torch.no_grad():
            for dense, (weight_EIO, bias_EO) in zip(family.ffn(block).linears(), weights, strict=True):
                dense.assign(_mean(weight_EIO), None if bias_EO is None else _mean(bias_EO))
    for name in ("sparsity", "output_error", "no_weight_decay"):
        model.__dict__.pop(name, None)
    return model


@torch.no_grad()
def _check_equal(name: str, block: SparseBlock) -> None:
    apart = max(_apart(linear) for linear in block.mlp.experts.linears())
    if apart > _EQUAL_ENOUGH:
        raise UserError(
            f"the experts of {name} differ by {apart:.1e} of their size: only experts that are still equal, as right "
            "after ermoe.upcycle, make a dense model"
        )


def _apart(linear: EigenLinear | DenseLinear) -> float:
    """The largest distance of an expert from the mean expert, relative to the latter."""
    weight_EIO = linear.weight()
    mean_IO = weight_EIO.mean(0)
    apart = float((weight_EIO - mean_IO).norm(dim=(1, 2)).max() / mean_IO.norm().clamp_min(1e-30))
    if linear.bias is None:
        return apart
    mean_O = linear.bias.mean(0)
    return max(apart, float((linear.bias - mean_O).abs().max() / mean_O.abs().max().clamp_min(1e-30)))


def _mean(stacked: Tensor) -> Tensor:
    return stacked.double().mean(0).to(stacked.dtype)
