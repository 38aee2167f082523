"""AdamW with the parameters that must not decay set apart, and the learning rate as a function of the step."""

from __future__ import annotations

import math
from typing import Any

import torch
from timm.optim import param_groups_layer_decay, param_groups_weight_decay
from torch import nn

from ermoe.nn import no_weight_decay
from ermoe.nn.orthogonality import bases
from ermoe.train.settings import Training


def build_optimizer(model: nn.Module, settings: Training) -> torch.optim.AdamW:
    """AdamW. Bases, s, ψ, norms, biases and what the backbone itself exempts (position embeddings) do not decay.

    Each group carries ``lr_scale``, by which `set_learning_rate` multiplies: its layer's decay, times ``basis_lr``.
    """
    exempt = no_weight_decay(model)
    if callable(own := getattr(model, "no_weight_decay", None)):
        exempt |= set(own())
    groups: list[dict[str, Any]]
    if settings.layer_decay < 1:
        groups = param_groups_layer_decay(
            model, settings.weight_decay, no_weight_decay_list=exempt, layer_decay=settings.layer_decay
        )
    else:
        groups = param_groups_weight_decay(model, settings.weight_decay, no_weight_decay_list=exempt)
    for group in groups:
        group.setdefault("lr_scale", 1.0)
    is_basis = {id(basis) for basis in bases(model)}
    if settings.basis_lr != 1:
        groups = [part for group in groups for part in _bases_apart(group, is_basis, settings.basis_lr)]
    return torch.optim.AdamW(groups, lr=settings.lr, fused=True)


def _bases_apart(group: dict[str, Any], is_basis: set[int], factor: float) -> list[dict[str, Any]]:
    """A group of parameters as two, of which the one with the bases learns at ``factor`` times the rate."""
    own = [parameter for parameter in group["params"] if id(parameter) in is_basis]
    others = [parameter for parameter in group["params"] if id(parameter) not in is_basis]
    slowed = {**group, "params": own, "lr_scale": factor * group["lr_scale"]}
    return [part for part in ({**group, "params": others}, slowed) if part["params"]]


def learning_rate(step: int, *, total_steps: int, warmup_steps: int, peak: float) -> float:
    """Linear from zero to ``peak``, then half a cosine to zero.

    >>> [round(learning_rate(s, total_steps=10, warmup_steps=2, peak=1.0), 3) for s in (0, 1, 2, 6, 9)]
    [0.5, 1.0, 1.0, 0.5, 0.038]
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    return peak * 0.5 * (1 + math.cos(math.pi * progress))


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Gives every group its share of ``rate``."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["lr_scale"]
