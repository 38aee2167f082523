"""From a recipe to a model before training."""

from __future__ import annotations

import logging

import timm
import torch
from torch import nn

import ermoe.models.vit  # noqa: F401 (its import tells timm of the sparse models)
from ermoe.errors import UserError
from ermoe.images.presets import IMAGE_LEVEL, Recipe
from ermoe.images.rivals.image_level import image_level
from ermoe.models.upcycle import restart_ffns, upcycle
from ermoe.models.weights.foreign import load_weights


def build(recipe: Recipe, num_classes: int) -> nn.Module:
    """The model of a recipe; its random numbers are a function of the seed."""
    torch.manual_seed(recipe.training.seed)
    if recipe.architecture in IMAGE_LEVEL:
        return _image_level(recipe, num_classes)
    generator = torch.Generator().manual_seed(recipe.training.seed)
    model = _timm_model(recipe, num_classes)
    if recipe.init == "same" and recipe.weights is None:
        restart_ffns(model, generator)
    if recipe.weights is not None and recipe.weights != "timm":
        _start_from(model, recipe.weights)
    if recipe.sparsity is None:
        return model
    return upcycle(model, init=recipe.init, inplace=True, generator=generator, **recipe.sparsity)


def _image_level(recipe: Recipe, num_classes: int) -> nn.Module:
    if recipe.weights is not None:
        raise UserError(
            f"weights={recipe.weights}: {recipe.architecture} networks start from scratch; leave the option out"
        )
    return image_level(recipe.architecture, num_classes=num_classes, **recipe.model_args)


def _timm_model(recipe: Recipe, num_classes: int) -> nn.Module:
    pretrained = recipe.weights == "timm"
    try:
        return timm.create_model(
            recipe.architecture, pretrained=pretrained, num_classes=num_classes, **recipe.model_args
        )
    except OSError as problem:  # what every failure to reach the hub is
        if not pretrained:
            raise
        raise UserError(
            f"weights=timm: timm's weights of {recipe.architecture} cannot be fetched ({type(problem).__name__}); "
            "connect to the network, or give a file with weights"
        ) from problem


def _start_from(model: nn.Module, weights: str) -> None:
    """Loads everything but a classifier for other classes, which stays fresh."""
    fit = load_weights(model, weights, strict=False)
    if lacking := [name for name in fit.missing if not name.startswith("head.")]:
        raise UserError(f"{weights} lacks {lacking[0]} ({len(lacking)} such): it holds weights of another model")
    if fit.missing:
        logging.getLogger("ermoe").warning("%s has a classifier for other classes: ours starts afresh", weights)
