"""How large a model is, and what one image costs it: parameters and multiply-adds, part by part.

Everything but the experts is counted by torch's own counter, which knows matrix products and convolutions, in a pass
over tensors without data. Experts follow from their shapes, because how many tokens each of them gets does not.

Letters: N tokens of an image, D model width, E experts, K experts per token.
"""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ermoe.errors import UserError
from ermoe.models.backbones import SparseBlock, family_of
from ermoe.models.obstacles import refuse_adapters
from ermoe.models.passes import input_shape, run_without_data
from ermoe.nn import Experts, MixtureLayer, MoE, moe_layers
from ermoe.nn.rivals.soft import SoftMoE
from ermoe.nn.scores import averages_projections

_EMBEDDINGS = ("patch_embed", "conv_proj", "embeddings", "conv1")


@dataclass(frozen=True, slots=True)
class Work:
    """Multiply-adds of one image, by part: a multiplication and the addition after it are one."""

    embedding: int = 0
    attention: int = 0
    context: int = 0
    routing: int = 0
    experts: int = 0
    shared_expert: int = 0
    dense_ffn: int = 0
    head: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return sum(asdict(self).values())


@dataclass(frozen=True, slots=True)
class Count:
    """Parameters of a model, and multiply-adds per image.

    ``active_parameters`` are those that one token's computation reads: all but the experts it does not meet, of which
    it reads only the columns that route.
    """

    total_parameters: int
    active_parameters: int
    multiply_adds: Work

    @property
    def flops(self) -> Work:
        """Twice the multiply-adds, as this was counted before version 0.1."""
        warnings.warn("count(…).flops is twice count(…).multiply_adds: use that", DeprecationWarning, stacklevel=2)
        return Work(**{name: 2 * work for name, work in asdict(self.multiply_adds).items()})


def count(model: nn.Module, image_size: int | tuple[int, ...] | None = None) -> Count:
    """Counts a model, dense or sparse, for images of the given size; by default the model's own.

    >>> import timm
    >>> counted = count(timm.create_model("vit_tiny_patch16_224"))
    >>> counted.total_parameters, round(counted.multiply_adds.total / 1e9, 2)
    (5717416, 1.25)
    """
    refuse_adapters(model)
    blocks = family_of(model).blocks(model)
    if not blocks:
        raise UserError(f"this {type(model).__name__} has no transformer blocks, which are what ermoe counts")
    flops, num_tokens = measure(model, (1, *input_shape(model, image_size)))
    part = asdict(Work())
    for name, block in blocks:
        ffn = flops[f"{name}.mlp"]
        part["attention"] += flops[name] - ffn
        if not isinstance(block, SparseBlock):
            part["dense_ffn"] += ffn
            continue
        layer: MixtureLayer = block.mlp
        shared = 0 if layer.shared is None else num_tokens * _flops_per_row(layer.shared)
        part["shared_expert"] += shared
        if isinstance(layer, MoE):
            part["routing"] += flops[f"{name}.mlp.router"]
            part["experts"] += round(num_tokens * layer.router.experts_per_token) * _flops_per_row(layer.experts)
        elif isinstance(layer, SoftMoE):  # all of its slots are always full
            experts = layer.experts.num_experts * layer.slots_per_expert * _flops_per_row(layer.experts)
            part["routing"] += ffn - experts - shared
            part["experts"] += experts
        if layer.needs_context and not block.windowed:
            context = 2 * num_tokens**2 * _averaged_columns(block, num_tokens)
            part["context"] += context
            part["routing"] -= context
    part["embedding"] = sum(flops[name] for name in list(flops) if name.split(".")[-1] in _EMBEDDINGS)
    part["head"] = flops["Global"] - part["embedding"] - sum(flops[name] for name, _ in blocks)
    total = sum(p.numel() for p in model.parameters())
    return Count(total, total - idle_parameters(model), Work(**{name: work // 2 for name, work in part.items()}))


def _averaged_columns(block: SparseBlock, num_tokens: int) -> int:
    """Of how many numbers a context is the average: of tokens, or of their projections."""
    layer: MoE = block.mlp
    assert layer.score is not None
    basis_EDr = layer.score.routing_basis(layer.experts.token_basis)
    assert basis_EDr is not None
    of_tokens = block.context_of == "features"
    if not averages_projections(num_tokens, basis_EDr, of_tokens=of_tokens):
        return layer.experts.dim
    return basis_EDr.shape[0] * basis_EDr.shape[2]


def _flops_per_row(experts: Experts) -> int:
    """What one expert costs one token: two operations for every entry of its matrices, multiplied out or not."""
    return 2 * sum(p.numel() for p in experts.parameters() if p.dim() == 3) // experts.num_experts


def measure(model: nn.Module, shape: tuple[int, ...]) -> tuple[Counter[str], int]:
    """Operations by module name along the static path ("Global" for all), and the number of tokens in the blocks.

    A module without products has none.
    """
    lengths = []
    first_block: Any = family_of(model).blocks(model)[0][1]
    counter = FlopCounterMode(display=False)
    hook = first_block.mlp.register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[-2]))
    try:
        with counter:
            run_without_data(model, shape)
    finally:
        hook.remove()
    # Names are those in the Eye that shows the model its images.
    counted = {name.removeprefix("Eye.model."): sum(ops.values()) for name, ops in counter.get_flop_counts().items()}
    return Counter(counted), lengths[0]


def idle_parameters(model: nn.Module) -> int:
    """Parameters of experts that a token does not meet, without the columns by which it decided so."""
    idle = 0
    for layer in moe_layers(model).values():
        if isinstance(layer, MoE):
            num_experts = layer.experts.num_experts
            per_expert = sum(p.numel() for p in layer.experts.parameters()) // num_experts
            score, basis = layer.score, layer.experts.token_basis
            if basis is not None and score is not None and score.needs_basis and score.basis is None:
                per_expert -= basis[0, :, : score.route_rank].numel()
            idle += round((num_experts - layer.router.experts_per_token) * per_expert)
    return idle
