"""From a recipe to the head and the network before training."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ermoe.brain.ages import AgeBins, AgeHead, AgeRegression
from ermoe.brain.recipes import WITHOUT_CUBES, Recipe, num_channels, reduction
from ermoe.brain.rivals.sfcn import SFCN
from ermoe.brain.rivals.swin3d import Swin3D
from ermoe.models.scratch import restart_ffns
from ermoe.models.upcycle import upcycle
from ermoe.models.vit3d import ViT3D


def age_head(recipe: Recipe, ages: Iterable[float]) -> AgeHead:
    """The head for people of these ages: bins reach five years beyond them, and over the phantoms' range."""
    known = [*ages, *recipe.phantoms.ages]
    if recipe.head == "regression":
        return AgeRegression(mean=sum(known) / len(known), scale=max(1.0, (max(known) - min(known)) / 4))
    low, high = 5 * math.floor((min(known) - 5) / 5), 5 * math.ceil((max(known) + 5) / 5)
    if recipe.head == "bins-l1":
        return AgeBins(low, high, recipe.step, labels="hard", l1=recipe.l1 or 0.1)
    return AgeBins(low, high, recipe.step, sigma=recipe.sigma, l1=recipe.l1)


def build(recipe: Recipe, head: AgeHead) -> nn.Module:
    """The network before training; its weights are a function of the seed."""
    seed = recipe.training.seed
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = _dense(recipe, head.num_outputs)
    generator = torch.Generator().manual_seed(seed)
    if recipe.method not in WITHOUT_CUBES:
        restart_ffns(network, generator)
    if not recipe.has_experts:
        return network
    score = "eigenbasis" if recipe.method == "ermoe-context" else "prototype"
    return upcycle(network, init="same", inplace=True, generator=generator, score=score, **recipe.sparsity)


def _dense(recipe: Recipe, num_outputs: int) -> nn.Module:
    common: dict[str, Any] = {"num_classes": num_outputs, "in_chans": num_channels(recipe.input)}
    own = recipe.rivals.get(recipe.method, {})
    if recipe.method == "sfcn":
        return SFCN(**common, **own)
    if recipe.method == "swin3d":
        return Swin3D(**common, **own)
    coarser = reduction(recipe.input)
    volume_size = [math.ceil(edge / coarser) for edge in recipe.preprocessing.shape]
    return ViT3D(volume_size, **common, **{**recipe.size, "patch_size": recipe.patch_size // coarser})
