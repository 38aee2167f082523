"""A dense vision transformer becomes a sparse one that computes the same thing."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ermoe.errors import UserError
from ermoe.models.eigen_init import fill_from_dense, output_error, refuse_equal_experts
from ermoe.models.families import Family, family_of
from ermoe.models.moments import Moments, collect
from ermoe.models.sparse_block import SparseBlock, sparsify
from ermoe.models.sparsity import Sparsity, choose_blocks, mark_sparse
from ermoe.nn.registry import LAYERS, options_of

_log = logging.getLogger("ermoe")

# "empty" leaves experts uninitialised, for weights that are about to be loaded.
_INITS = ("dense", "same", "random", "empty")


def upcycle(
    model: nn.Module,
    *,
    num_experts: int = 8,
    top_k: int = 2,
    blocks: str | Sequence[int] = "every-2",
    rank: int | None = None,
    route_rank: int | None = None,
    experts: str | None = None,
    router: str = "eigen",
    init: str = "dense",
    inplace: bool = False,
    context_of: str = "features",
    context_grad: bool = True,
    calibration: Iterable[Tensor] | None = None,
    generator: torch.Generator | None = None,
    **layer_options: Any,
) -> nn.Module:
    """A sparse model with the outputs of ``model``: some of its feed-forward networks become mixtures of experts.

    Args:
        model: a timm VisionTransformer or Eva, a torchvision VisionTransformer or a Hugging Face ViT.
        num_experts: experts E of each layer.
        top_k: experts per token K.
        blocks: which blocks get experts: "every-2" (1, 3, 5, …), "last-n" (the last n), "all", or a list of indices.
        rank: rank R of the expert weights. Full by default, which keeps outputs exactly; with less, the relative error
            of each layer's output is logged and kept in ``model.output_error``.
        route_rank: columns r of each basis that route; max(8, 8⌊R / 8E⌋) by default.
        experts: "eigen" (U diag(s) Vᵀ) or "dense" (plain weights; an eigen router then keeps a basis of its own).
            By default "eigen" for the eigen router and "dense" for the others, as in their papers.
        router: "eigen", or a baseline of `ermoe.nn.registry.LAYERS`: "v-moe", "expert-choice", "soft", "base", ….
        init: "dense" starts every expert as the dense network. To train from scratch, "same" starts them all as one
            fresh network, of which each routes by other singular directions, and "random" each as another.
        inplace: change ``model`` itself, one block at a time, instead of a copy.
        context_of: the context averages the "features" that enter the expert layer, or the outputs of "attention".
        context_grad: whether routing sends gradients into the attention weights; False saves memory.
        calibration: a few unlabelled batches, to truncate in the metric of the activations when rank is not full.
        generator: source of the random numbers of routers, and of experts that start from scratch.
        layer_options: further options of the layer, such as ``threshold=``, ``balance=`` or ``score=``.

    >>> import timm
    >>> dense = timm.create_model("test_vit").eval()
    >>> sparse = upcycle(dense, num_experts=4)
    >>> images = torch.randn(2, 3, 160, 160)
    >>> torch.allclose(sparse(images), dense(images), atol=1e-5)
    True
    """
    if init not in _INITS:
        raise UserError(f"init={init!r}: use 'dense' (experts start as the dense network), 'same' or 'random'")
    family = family_of(model)
    if router not in LAYERS:
        raise UserError(f"router={router!r}: use one of {', '.join(LAYERS)}")
    if "num_tokens" in options_of(router) and "slots_per_expert" not in layer_options:
        layer_options.setdefault("num_tokens", family.num_tokens(model))  # Soft MoE: as many slots as tokens
    sparsity = Sparsity(
        blocks=choose_blocks(blocks, len(family.blocks(model))),
        num_experts=num_experts,
        top_k=top_k,
        rank=rank,
        route_rank=route_rank,
        experts=experts,
        router=router,
        context_of=context_of,
        context_grad=context_grad,
        layer_options=layer_options,
    )
    _check(family, model, sparsity, init)
    model = model if inplace else copy.deepcopy(model)
    chosen = [family.blocks(model)[index] for index in sparsity.blocks]
    networks = {name: family.ffn(block) for name, block in chosen}
    moments = collect(model, networks, calibration) if calibration is not None else {}
    del networks
    errors = {}
    for name, block in chosen:
        error = _convert(family, block, sparsity, init, moments.pop(name, None), generator)
        if error is not None:
            errors[name] = error
    mark_sparse(model, sparsity)
    _report(model, errors, measured=calibration is not None)
    return model


def _check(family: Family, model: nn.Module, sparsity: Sparsity, init: str) -> None:
    """Refuses what cannot be made sparse, before anything is changed."""
    for index in sparsity.blocks:
        name, block = family.blocks(model)[index]
        if isinstance(block, SparseBlock):
            raise UserError(f"{name} is sparse already: start from the dense model, or from ermoe.to_dense(model)")
        reason = family.refusal(block)
        reason = _defect(family, block, sparsity, init) if reason is None else reason
        if reason is not None:
            raise UserError(f"{name} cannot be made sparse: {reason}")


def _defect(family: Family, block: nn.Module, sparsity: Sparsity, init: str) -> str | None:
    """What is wrong with the block; what is wrong with the options is raised, for it is no block's fault."""
    ffn = family.ffn(block)
    layer = sparsity.layer_like(ffn)
    if init in ("dense", "same"):
        refuse_equal_experts(layer, ffn)
    return ffn.defect() or (family.no_context(block) if layer.needs_context else None)


def _convert(
    family: Family,
    block: nn.Module,
    sparsity: Sparsity,
    init: str,
    moments: Moments | None,
    generator: torch.Generator | None,
) -> float | None:
    """Makes one block sparse; returns the relative error of its output if the rank of its weights was cut."""
    ffn = family.ffn(block)
    layer = sparsity.layer_like(ffn)
    error = None
    if not ffn.up.W.is_meta:
        _materialise(layer, ffn.up.W.device)
        layer.reset_router(generator)
        if init == "random":
            layer.experts.reset_parameters(generator)
        elif init == "same":
            fill_from_dense(layer, ffn.fresh(generator))
        elif init == "dense":
            fill_from_dense(layer, ffn, moments)
            error = output_error(layer, ffn, moments)
    sparsify(block, layer, family.SPARSE_BLOCK, context_of=sparsity.context_of, context_grad=sparsity.context_grad)
    return error


def _materialise(layer: nn.Module, device: torch.device) -> None:
    """Memory for a layer on the meta device. `to_empty` does the same by way of torch's symbolic shapes, whose import
    takes two seconds."""
    layer._apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device=device))


def _report(model: Any, errors: dict[str, float], *, measured: bool) -> None:
    model.output_error = {**getattr(model, "output_error", {}), **errors}
    if errors:
        listed = ", ".join(f"{name} {error:.3f}" for name, error in errors.items())
        tokens = "the calibration batches" if measured else "random tokens; pass calibration= for a better truncation"
        _log.warning("rank below full: relative output error per layer on %s: %s", tokens, listed)
