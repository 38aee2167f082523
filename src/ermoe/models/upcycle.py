"""A dense vision transformer becomes a sparse one that computes the same thing.

`Sparsity` is how: which blocks, what layers. Enough to build the layers again, and plain enough for JSON.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ermoe.errors import UserError
from ermoe.models.backbones import CONTEXT_SOURCES, Family, SparseBlock, dense_network, family_of, sparsify
from ermoe.models.calibrate import settle_offsets
from ermoe.models.clusters import GroupFit, fill_from_groups
from ermoe.models.eigen_init import fill_beside_dense, fill_from_dense, output_error, refuse_equal_experts
from ermoe.models.fitting import fitted
from ermoe.models.inside import bare
from ermoe.models.obstacles import bypassed, obstacle, refuse_adapters, refuse_to_copy
from ermoe.models.tokens import Tokens, sample_tokens
from ermoe.nn import MixtureLayer, no_weight_decay
from ermoe.nn.ffn import FFN
from ermoe.nn.registry import LAYERS, build_layer, options_of

Options: TypeAlias = dict[str, Any]
"""Keywords of `ermoe.upcycle` or of timm, by name; plain values where a model is to be saved."""

# Options of expert layers that follow from the network they replace.
_GIVEN = ("dim", "hidden_dim", "gated", "act_layer", "norm_layer", "bias", "drop", "shared_dim", "device", "dtype")

_BY_BLOCK = ("num_experts", "rank", "hidden_dim", "shared")  # options of which there may be one for each block

# "empty" leaves experts uninitialised, for weights that are about to be loaded.
_INITS = ("dense", "clusters", "same", "random", "empty")
_log = logging.getLogger("ermoe")


@dataclass(frozen=True, slots=True)
class Sparsity:
    """The options of `ermoe.upcycle`, with ``blocks`` as indices. A sparse model carries it as ``model.sparsity``."""

    blocks: tuple[int, ...]
    num_experts: int | tuple[int, ...] = 8
    top_k: int = 2
    rank: int | tuple[int, ...] | None = None
    hidden_dim: int | tuple[int, ...] | None = None
    route_rank: int | None = None
    experts: str | None = None
    shared: str | int | tuple[int, ...] | None = None
    router: str = "eigen"
    context_of: str = "features"
    context_grad: bool = True
    merged: bool = False
    layer_options: Options = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.context_of not in CONTEXT_SOURCES:
            raise UserError(f"context_of={self.context_of!r}: use 'features' or 'attention'")
        if isinstance(self.shared, str) and self.shared != "dense":
            raise UserError(
                f"shared={self.shared!r}: use 'dense', which keeps the dense network, a hidden width, or leave it out"
            )
        if self.experts is None:  # what the routers' own papers have
            object.__setattr__(self, "experts", "eigen" if self.router == "eigen" else "dense")
        for name in _BY_BLOCK:
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        self._check_numbers()
        self._check_layer_options()

    def _check_numbers(self) -> None:
        for name in ("top_k", "route_rank", *_BY_BLOCK):
            value = getattr(self, name)
            values = value if isinstance(value, tuple) and name in _BY_BLOCK else (value,) * len(self.blocks)
            others = {"num_experts": (), "top_k": (), "shared": (None, "dense")}.get(name, (None,))
            is_whole = all(isinstance(number, int) or number in others for number in values)
            if not is_whole or len(values) != len(self.blocks):
                each = f", or one for each of the {len(self.blocks)} blocks that get experts"
                raise UserError(f"{name}={value!r}: need a whole number{each if name in _BY_BLOCK else ''}")
        if self.rank is not None and self.experts == "dense":
            raise UserError(f"rank={self.rank}: dense experts have no rank; use experts='eigen', or leave rank out")

    def _check_layer_options(self) -> None:
        given = [name for name in self.layer_options if name in _GIVEN]
        if given:
            raise UserError(f"{', '.join(given)}: experts take this from the feed-forward network they replace")
        known = [name for name in options_of(self.router) if name not in _GIVEN]
        unknown = sorted(set(self.layer_options) - set(known))
        if unknown:
            raise UserError(f"router={self.router!r} has no option {', '.join(unknown)}: it has {', '.join(known)}")

    def of_block(self, name: str, block: int | None) -> Any:
        """An option of which there may be one for each block."""
        value = getattr(self, name)
        return value[self.blocks.index(block)] if isinstance(value, tuple) and block is not None else value

    def width(self, ffn: FFN, block: int | None = None) -> int:
        """Hidden width of the experts that replace ``ffn``."""
        width: int | None = self.of_block("hidden_dim", block)
        if width is None:
            is_whole = self.shared_width(ffn, block) is None
            return ffn.hidden_dim if is_whole else min(max(1, ffn.dim // 2), ffn.hidden_dim)
        return width

    def shared_width(self, ffn: FFN, block: int | None = None) -> int | None:
        """Hidden width of the network that every token meets beside the experts; None where there is none."""
        width: str | int | None = self.of_block("shared", block)
        return ffn.hidden_dim if width == "dense" else int(width or 0) or None

    def _rank(self, ffn: FFN, width: int, block: int | None) -> int | None:
        """Rank of the experts; None for full. Beside the dense network they are small."""
        rank: int | None = self.of_block("rank", block)
        is_small = self.shared_width(ffn, block) is not None and self.experts == "eigen"
        return min(max(1, ffn.dim // 4), width) if rank is None and is_small else rank

    def layer_like(self, ffn: FFN, block: int | None = None) -> MixtureLayer:
        """An expert layer of the shape and precision of ``ffn``, on the meta device; of its ``block``'s own sizes."""
        width = self.width(ffn, block)
        if not 1 <= width <= ffn.hidden_dim:
            raise UserError(
                f"hidden_dim={width}: the dense network has {ffn.hidden_dim} hidden units; use 1 to {ffn.hidden_dim}"
            )
        shared_width = self.shared_width(ffn, block)
        if shared_width is not None and not 1 <= shared_width <= ffn.hidden_dim:
            raise UserError(
                f"shared={shared_width}: the dense network has {ffn.hidden_dim} hidden units; use 1 to {ffn.hidden_dim}"
            )
        known = options_of(self.router)
        options = {"num_experts": self.of_block("num_experts", block), "experts": self.experts, **self.layer_options}
        options |= {"top_k": self.top_k} if "top_k" in known else {}  # Soft MoE has no experts per token
        options |= {} if shared_width is None else {"shared_dim": shared_width}
        ranks = {"rank": self._rank(ffn, width, block), "route_rank": self.route_rank}
        options |= {name: rank for name, rank in ranks.items() if rank is not None}
        mlp = {"gated": ffn.gate is not None, "act_layer": ffn.act_layer(), "norm_layer": ffn.norm_layer()}
        mlp |= {"bias": ffn.has_bias, "drop": ffn.drop}
        placement = {"device": "meta", "dtype": ffn.up.W.dtype}
        try:
            return build_layer(self.router, ffn.dim, width, **options, **mlp, **placement)
        except ValueError as problem:
            raise UserError(str(problem)) from problem

    def as_options(self) -> Options:
        """The keywords with which `ermoe.upcycle` makes a model sparse in this way, as plain as JSON."""
        names = {option.name for option in fields(self)} - {"merged", "layer_options"}
        own = {name: getattr(self, name) for name in sorted(names)}
        listed = {name: list(value) for name, value in own.items() if isinstance(value, tuple)}
        return {**self.layer_options, **own, **listed}


def upcycle(
    model: nn.Module,
    *,
    num_experts: int | Sequence[int] = 8,
    top_k: int = 2,
    blocks: str | Sequence[int] = "every-2",
    rank: int | Sequence[int] | None = None,
    hidden_dim: int | Sequence[int] | None = None,
    route_rank: int | None = None,
    experts: str | None = None,
    shared: str | int | Sequence[int] | None = None,
    router: str = "eigen",
    init: str = "dense",
    inplace: bool = False,
    is_new: bool = False,
    context_of: str = "features",
    context_grad: bool = True,
    calibration: Iterable[Tensor] | None = None,
    generator: torch.Generator | None = None,
    **layer_options: Any,
) -> nn.Module:
    """A sparse model with the outputs of ``model``: some of its feed-forward networks become mixtures of experts.

    Args:
        model: a vision transformer of timm, torchvision, Hugging Face or open_clip (docs/reference/backbones.md), or a
            module that holds one.
        num_experts: experts E of each layer, or one number for each block.
        top_k: experts per token K.
        blocks: which blocks get experts: "every-2" (1, 3, 5, …), "last-n" (the last n), "all", or a list of indices.
        rank: rank R of the expert weights. Full by default, which keeps outputs exactly; with less, the relative error
            of each layer's output is logged and kept in ``model.output_error``. Or one for each block.
        hidden_dim: hidden width of the experts, or one for each block; by default that of the dense network. With
            less, each expert keeps the hidden units that its tokens use; needs ``calibration``.
        route_rank: columns r of each basis that route; max(8, 8⌊R / 8E⌋) by default.
        experts: "eigen" (U diag(s) Vᵀ) or "dense" (plain weights; an eigen router then keeps a basis of its own).
            By default "eigen" for the eigen router and "dense" for the others, as in their papers.
        shared: "dense" keeps the dense network as an expert that every token meets. The others are small, hidden width
            D / 2 and rank D / 4 unless given, and add nothing at the start: outputs stay exactly. A number, or one for
            each block (0 for none), is the hidden width of a shared network that is fitted together with the experts,
            with ``init="clusters"`` and ``experts="dense"``.
        router: "eigen", or a baseline of `ermoe.nn.registry.LAYERS`: "v-moe", "expert-choice", "soft", "base", ….
        init: "dense" starts every expert as the dense network. "clusters" groups the tokens of ``calibration`` and
            makes each expert the best version of the dense network for its group, which the router then chooses: the
            way to narrower experts or lower ranks; by default with prototype scores in a basis that experts share. To
            train from scratch, "same" starts all experts as one fresh network, of which each routes by other singular
            directions, and "random" each as another.
        inplace: change ``model`` itself, one block at a time, instead of a copy.
        is_new: the model was built a moment ago, to become sparse: do not look for what only its use could have added,
            nor whether it can be saved.
        context_of: the context averages the "features" that enter the expert layer, or the outputs of "attention".
        context_grad: whether routing sends gradients into the attention weights; False saves memory.
        calibration: unlabelled batches, a list or a data loader, to which experts of lower rank or less width are
            fitted. Memory does not grow with their number.
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
        raise UserError(
            f"init={init!r}: use 'dense' (experts start as the dense network), 'clusters', 'same' or 'random'"
        )
    if not isinstance(model, nn.Module):
        raise UserError(f"upcycle takes a model, not a {type(model).__name__}: build one, for example with timm")
    if not is_new:
        refuse_adapters(model)
        model = bare(model, inplace=inplace)
    family = family_of(model)
    if router not in LAYERS:
        raise UserError(f"router={router!r}: use one of {', '.join(LAYERS)}")
    if init == "clusters":
        _refuse_to_group(router, calibration)
        layer_options = {"score": "prototype", "routing_basis": "shared"} | layer_options
        if layer_options["routing_basis"] == "shared" and route_rank is None:
            most = num_experts if isinstance(num_experts, int) else max(num_experts)
            route_rank = max(8, most)  # groups differ in E − 1 directions
    elif shared == "dense" and calibration is not None:
        raise UserError(
            f"shared={shared!r}, init={init!r}: the dense network is kept, so nothing is fitted to calibration=; leave "
            "it out, or group its tokens with init='clusters'"
        )
    if "num_tokens" in options_of(router) and "slots_per_expert" not in layer_options:
        layer_options.setdefault("num_tokens", family.num_tokens(model))  # Soft MoE: as many slots as tokens
    sparsity = Sparsity(
        blocks=choose_blocks(blocks, len(family.blocks(model))),
        num_experts=_each(num_experts),
        top_k=top_k,
        rank=_each(rank),
        hidden_dim=_each(hidden_dim),
        route_rank=route_rank,
        experts=experts,
        shared=_each(shared),
        router=router,
        context_of=context_of,
        context_grad=context_grad,
        layer_options=layer_options,
    )
    _check(family, model, sparsity, init, is_calibrated=calibration is not None, is_new=is_new)
    if not is_new:
        _warn_of_saving(family, model)
    if not (is_new or inplace):
        refuse_to_copy(model)
    model = model if inplace else copy.deepcopy(model)
    chosen = {index: family.blocks(model)[index] for index in sparsity.blocks}
    taught = {name: (block, family.ffn(block)) for name, block in chosen.values()}
    tokens = {} if calibration is None else sample_tokens(model, taught, calibration)
    del taught
    fits = {}
    for index, (name, block) in chosen.items():
        fits[name] = _convert(family, block, index, sparsity, init, tokens.pop(name, None), generator)
    backbone = family.backbone(model)
    mark_sparse(backbone, sparsity, model)
    if init == "clusters" and calibration is not None:
        settle_offsets(model, calibration)  # tokens meet other experts before, so they come as others
    _report(backbone, fits)
    return model


def _each(value: Any) -> Any:
    """One number, or a tuple with one for each block."""
    return tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else value


def _refuse_to_group(router: str, calibration: object) -> None:
    if router != "eigen":
        raise UserError(f"init='clusters', router={router!r}: groups are routed by prototypes; use router='eigen'")
    if calibration is None or iter(calibration) is calibration:  # type: ignore[call-overload]
        raise UserError(
            "init='clusters' groups tokens, and goes through them twice: pass calibration=, a list of unlabelled "
            "batches or a data loader"
        )


def _check(
    family: Family, model: nn.Module, sparsity: Sparsity, init: str, *, is_calibrated: bool, is_new: bool
) -> None:
    """Refuses what cannot be made sparse, before anything is changed."""
    for index in sparsity.blocks:
        name, block = family.blocks(model)[index]
        if isinstance(block, SparseBlock):
            raise UserError(f"{name} is sparse already: start from the dense model, or from ermoe.to_dense(model)")
        reason = family.refusal(block)
        if reason is None and not is_new:
            reason = obstacle(block) or _tie(family, model, index) or _bypass(family, block, index, sparsity)
        reason = _defect(family, block, index, sparsity, init, is_calibrated) if reason is None else reason
        if reason is not None:
            raise UserError(f"{name} cannot be made sparse: {reason}")


def _warn_of_saving(family: Family, model: nn.Module) -> None:
    """Says before any training what `ermoe.save` would say after it."""
    is_dense = not any(isinstance(block, SparseBlock) for _, block in family.blocks(model))
    reason = family.unsavable(model) if is_dense else None
    if reason is not None:
        _log.warning(reason)


def _defect(
    family: Family, block: nn.Module, index: int, sparsity: Sparsity, init: str, is_calibrated: bool
) -> str | None:
    """What is wrong with the block; what is wrong with the options is raised, for it is no block's fault."""
    ffn = family.ffn(block).folded()
    layer = sparsity.layer_like(ffn, index)
    _refuse_widths(sparsity, ffn, index, init, is_calibrated)
    if init in ("dense", "same"):
        refuse_equal_experts(layer, ffn)
    return ffn.defect() or (family.no_context(block) if layer.needs_context else None)


def _refuse_widths(sparsity: Sparsity, ffn: FFN, index: int, init: str, is_calibrated: bool) -> None:
    """Refuses narrow networks that nothing could be fitted to, or that are no part of the dense one."""
    width, shared = sparsity.width(ffn, index), sparsity.shared_width(ffn, index)
    is_fitted_together = shared is not None and shared < ffn.hidden_dim
    if shared is not None and is_fitted_together:
        if init in ("dense", "same"):
            raise UserError(
                f"shared={shared}: a shared network narrower than the dense one is fitted together with its experts; "
                "use init='clusters', or shared='dense'"
            )
        if init == "clusters" and sparsity.experts == "eigen":
            raise UserError(f"shared={shared}: hidden units are shared out among plain weights; use experts='dense'")
        if shared + width > ffn.hidden_dim:
            raise UserError(
                f"shared={shared}, hidden_dim={width}: together these are more than the {ffn.hidden_dim} hidden units "
                "of the dense network"
            )
    is_narrow = is_fitted_together or (shared is None and width < ffn.hidden_dim)
    if is_narrow and ffn.inner_norm is not None and init not in ("random", "empty"):
        raise UserError(
            f"hidden_dim={width}: the dense network normalises its hidden layer, and fewer units have another norm; "
            "cut the rank instead, with rank="
        )
    if is_narrow and (init == "same" or (init == "dense" and not is_calibrated)):
        raise UserError(
            f"hidden_dim={width}: narrower experts are fitted to tokens; pass calibration=, unlabelled batches, with "
            "init='dense' or 'clusters', or start from init='random'"
        )


def _tie(family: Family, model: nn.Module, index: int) -> str | None:
    """Which other block shares the network, if one does: experts in one would be lost to the other."""
    networks = [dense_network(block) for _, block in family.blocks(model)]
    shares = [other for other, network in enumerate(networks) if network is networks[index] and other != index]
    return f"its feed-forward network is that of block {shares[0]} too; give each a copy first" if shares else None


def _bypass(family: Family, block: nn.Module, index: int, sparsity: Sparsity) -> str | None:
    """What would no longer be called, where the block has to compute attention itself."""
    attention = family.attention(block)
    needs_context = sparsity.layer_like(family.ffn(block).folded(), index).needs_context
    return bypassed(attention) if needs_context and attention is not None else None


def _convert(
    family: Family,
    block: nn.Module,
    index: int,
    sparsity: Sparsity,
    init: str,
    tokens: Tokens | None,
    generator: torch.Generator | None,
) -> GroupFit | float | None:
    """Makes one block sparse; returns how near its output comes to the dense one, if experts are smaller or differ."""
    ffn = family.ffn(block).folded()
    dtype = ffn.up.W.dtype
    if tokens is not None:
        ffn = ffn.to(torch.float32)  # as tokens are
    layer = sparsity.layer_like(ffn, index)
    fit: GroupFit | float | None = None
    if not ffn.up.W.is_meta:
        _materialise(layer, ffn.up.W.device)
        layer.reset_router(generator)
        if init == "random":
            layer.reset_experts(generator)
        elif init == "clusters":
            assert tokens is not None
            fit = fill_from_groups(layer, ffn, tokens, generator)
        elif init in ("dense", "same") and layer.shared is not None:
            fill_beside_dense(layer, ffn if init == "dense" else ffn.fresh(generator))
        elif init == "same":
            fill_from_dense(layer, ffn.fresh(generator))
        elif init == "dense":
            fill_from_dense(layer, ffn if tokens is None else fitted(ffn, tokens, *layer.experts.size))
            fit = output_error(layer, ffn, None if tokens is None else tokens.x_TD)
        layer.to(dtype)
    sparse_class = family.sparse_class(block)
    sparsify(block, layer, sparse_class, context_of=sparsity.context_of, context_grad=sparsity.context_grad)
    return fit


def _materialise(layer: nn.Module, device: torch.device) -> None:
    """Memory for a layer on the meta device. `to_empty` does the same by way of torch's symbolic shapes, whose import
    takes two seconds."""
    layer._apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device=device))


def _report(model: Any, fits: dict[str, GroupFit | float | None]) -> None:
    groups = {name: fit for name, fit in fits.items() if isinstance(fit, GroupFit)}
    errors = {name: fit.error if isinstance(fit, GroupFit) else fit for name, fit in fits.items() if fit is not None}
    model.group_fits = {**getattr(model, "group_fits", {}), **groups}
    model.output_error = {**getattr(model, "output_error", {}), **errors}
    if groups:
        listed = ", ".join(f"{name} {fit.error:.3f} ({fit.one_expert_error:.3f})" for name, fit in groups.items())
        _log.info("relative output error per layer on tokens kept apart (one expert of that size): %s", listed)
    elif errors:
        listed = ", ".join(f"{name} {error:.3f}" for name, error in errors.items())
        _log.warning("experts smaller than the dense network: relative output error per layer: %s", listed)


def choose_blocks(blocks: str | Sequence[int], depth: int) -> tuple[int, ...]:
    """The indices that ``blocks`` means in a model of ``depth`` blocks; "last-n-odd" is what V-MoE calls "last-n".

    >>> choose_blocks("every-2", 12), choose_blocks("last-2", 12), choose_blocks([-1, 3], 12)
    ((1, 3, 5, 7, 9, 11), (10, 11), (3, 11))
    >>> choose_blocks("last-2-odd", 12), choose_blocks("last-2-odd", 8)
    ((9, 11), (5, 7))
    """
    if isinstance(blocks, str):
        if blocks == "all":
            return tuple(range(depth))
        kind, _, digits = blocks.removesuffix("-odd").partition("-")
        number = int(digits) if digits.isdigit() else 0
        if kind == "every" and 1 <= number <= depth and not blocks.endswith("-odd"):
            return tuple(range(number - 1, depth, number))
        candidates = range(1, depth, 2) if blocks.endswith("-odd") else range(depth)
        if kind == "last" and 1 <= number <= len(candidates):
            return tuple(candidates[-number:])
    elif isinstance(blocks, (list, tuple, range)) and blocks and all(_is_index(index, depth) for index in blocks):
        return tuple(sorted({index % depth for index in blocks}))
    raise UserError(
        f"blocks={blocks!r}: use 'every-n', 'last-n', 'last-n-odd', 'all' or a list of indices; "
        f"this model has {depth} blocks"
    )


def _is_index(index: object, depth: int) -> bool:
    return isinstance(index, int) and -depth <= index < depth


def mark_sparse(model: Any, sparsity: Sparsity, whole: nn.Module) -> None:
    """Lets a model, a part of ``whole``, say how it is sparse, and timm's optimisers which parameters not to decay.

    A model that became sparse block by block, always in the same way, is as one that became so at once.
    """
    before = getattr(model, "sparsity", sparsity)
    if replace(before, blocks=sparsity.blocks, merged=sparsity.merged) == sparsity:
        sparsity = replace(sparsity, blocks=tuple(sorted({*before.blocks, *sparsity.blocks})))
    model.sparsity = sparsity
    family_of(model).mark(model, sparsity, whole)
    if hasattr(model, "no_weight_decay"):
        names = frozenset(type(model).no_weight_decay(model)) | no_weight_decay(model)
        model.no_weight_decay = partial(set, names)  # the names, not the model: a cycle would delay its release


def sparsity_of(model: nn.Module) -> Sparsity:
    """How a model, or the backbone that it holds, was made sparse."""
    sparsity = getattr(family_of(model).backbone(model), "sparsity", None)
    if not isinstance(sparsity, Sparsity):
        raise UserError(f"this {type(model).__name__} is not sparse: make it so with ermoe.upcycle(model)")
    return sparsity


@torch.no_grad()
def restart_ffns(model: nn.Module, generator: torch.Generator | None = None) -> None:
    """Gives every feed-forward network of a dense ViT Xavier-uniform weights and zero biases, in place.

    Backbones start them at a deviation of 0.02, whatever their width: in a narrow model that is a third of Xavier's,
    and it takes hundreds of steps until they do anything.
    """
    family = family_of(model)
    for _, block in family.blocks(model):
        ffn = family.ffn(block)
        ffn.assign((fresh.W, fresh.b) for fresh in ffn.fresh(generator).linears())
