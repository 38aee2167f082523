"""How a model is sparse: which blocks, what layers. Enough to build the layers again, and plain enough for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, TypeAlias

from torch import nn

from ermoe.errors import UserError
from ermoe.models.ffn import FFN
from ermoe.models.sparse_block import CONTEXT_SOURCES
from ermoe.nn import MixtureLayer, no_weight_decay
from ermoe.nn.registry import build_layer, options_of

Options: TypeAlias = dict[str, Any]
"""Keywords of `ermoe.upcycle` or of timm, by name; plain values where a model is to be saved."""

# Options of expert layers that follow from the network they replace.
_GIVEN = ("dim", "hidden_dim", "gated", "act_layer", "bias", "drop", "device", "dtype")


@dataclass(frozen=True, slots=True)
class Sparsity:
    """The options of `ermoe.upcycle`, with ``blocks`` as indices. A sparse model carries it as ``model.sparsity``."""

    blocks: tuple[int, ...]
    num_experts: int = 8
    top_k: int = 2
    rank: int | None = None
    route_rank: int | None = None
    experts: str | None = None
    router: str = "eigen"
    context_of: str = "features"
    context_grad: bool = True
    merged: bool = False
    layer_options: Options = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.context_of not in CONTEXT_SOURCES:
            raise UserError(f"context_of={self.context_of!r}: use 'features' or 'attention'")
        if self.experts is None:  # what the routers' own papers have
            object.__setattr__(self, "experts", "eigen" if self.router == "eigen" else "dense")
        self._check_numbers()
        self._check_layer_options()

    def _check_numbers(self) -> None:
        for name in ("num_experts", "top_k", "rank", "route_rank"):
            value = getattr(self, name)
            if not (isinstance(value, int) or (value is None and name.endswith("rank"))):
                raise UserError(f"{name}={value!r}: need a whole number")
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

    def layer_like(self, ffn: FFN) -> MixtureLayer:
        """An expert layer of the shape and precision of ``ffn``, on the meta device."""
        known = options_of(self.router)
        options = {"num_experts": self.num_experts, "experts": self.experts, **self.layer_options}
        options |= {"top_k": self.top_k} if "top_k" in known else {}  # Soft MoE has no experts per token
        ranks = {"rank": self.rank, "route_rank": self.route_rank}
        options |= {name: rank for name, rank in ranks.items() if rank is not None}
        mlp = {"gated": ffn.gate is not None, "act_layer": ffn.act_layer(), "bias": ffn.has_bias, "drop": ffn.drop}
        placement = {"device": "meta", "dtype": ffn.up.W.dtype}
        try:
            return build_layer(self.router, ffn.dim, ffn.hidden_dim, **options, **mlp, **placement)
        except ValueError as problem:
            raise UserError(str(problem)) from problem

    def as_options(self) -> Options:
        """The keywords with which `ermoe.upcycle` makes a model sparse in this way, as plain as JSON."""
        names = {option.name for option in fields(self)} - {"merged", "layer_options"}
        own = {name: getattr(self, name) for name in sorted(names)}
        return {**self.layer_options, **own, "blocks": list(self.blocks)}


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


def mark_sparse(model: Any, sparsity: Sparsity) -> None:
    """Lets a model say how it is sparse, and tells timm's optimisers which of its parameters not to decay.

    A model that became sparse block by block, always in the same way, is as one that became so at once.
    """
    before = getattr(model, "sparsity", sparsity)
    if replace(before, blocks=sparsity.blocks, merged=sparsity.merged) == sparsity:
        sparsity = replace(sparsity, blocks=tuple(sorted({*before.blocks, *sparsity.blocks})))
    model.sparsity = sparsity
    if hasattr(model, "no_weight_decay"):
        names = frozenset(type(model).no_weight_decay(model)) | no_weight_decay(model)
        model.no_weight_decay = partial(set, names)  # the names, not the model: a cycle would delay its release


def sparsity_of(model: nn.Module) -> Sparsity:
    """How a model was made sparse."""
    sparsity = getattr(model, "sparsity", None)
    if not isinstance(sparsity, Sparsity):
        raise UserError(f"this {type(model).__name__} is not sparse: make it so with ermoe.upcycle(model)")
    return sparsity
