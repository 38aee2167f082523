"""Named recipes: a model, its augmentation and its training, each a function that says what it is for.

The paper's rows start from a pretrained ViT-B/16 and are fine-tuned on ImageNet-1K for 300 epochs; few-shot figures
come from `ermoe image probe` on the result. The miniatures train from scratch on CIFAR-10 within minutes on two cores,
and differ in nothing but the router.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import timm
import torch
from torch import nn

import ermoe.models.vit  # noqa: F401 (its import tells timm of the sparse models)
from ermoe.data.augment import NO_AUGMENTATION, Augmentation
from ermoe.errors import UserError
from ermoe.images.rivals.image_level import STYLES, image_level
from ermoe.models.scratch import from_scratch, restart_ffns
from ermoe.models.upcycle import upcycle
from ermoe.models.weights.foreign import load_weights
from ermoe.train.settings import STEADY_BASES, Training


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything but the data.

    ``sparsity`` holds options of `ermoe.upcycle`, None for a dense model; ``init`` is "dense" where the model starts
    from pretrained weights, "same" from scratch.
    """

    architecture: str
    sparsity: dict[str, Any] | None
    training: Training
    augmentation: Augmentation
    init: str = "dense"
    model_args: dict[str, Any] = field(default_factory=dict)
    label_smoothing: float = 0.1

    def build(self, num_classes: int, *, weights: str | None = None) -> nn.Module:
        """The model before training.

        ``weights`` is a file in any usual format, "timm" for timm's pretrained ones, or None for random ones.
        """
        torch.manual_seed(self.training.seed)
        if self.architecture in STYLES:
            return _image_level(self, num_classes, weights)
        generator = torch.Generator().manual_seed(self.training.seed)
        model = _timm_model(self, num_classes, pretrained=weights == "timm")
        if self.init == "same" and weights is None:
            restart_ffns(model, generator)
        if weights is not None and weights != "timm":
            _start_from(model, weights)
        if self.sparsity is None:
            return model
        return upcycle(model, init=self.init, inplace=True, generator=generator, **self.sparsity)


def _image_level(recipe: Recipe, num_classes: int, weights: str | None) -> nn.Module:
    if weights is not None:
        raise UserError(f"weights={weights}: {recipe.architecture} networks start from scratch; leave the option out")
    return image_level(recipe.architecture, num_classes=num_classes, **recipe.model_args)


def _timm_model(recipe: Recipe, num_classes: int, *, pretrained: bool) -> nn.Module:
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


# Reading the mean of the patches, a small model learns within a few epochs; a class token alone takes many.
_SMALL = {"global_pool": "avg"}
_PAPER_AUGMENTATION = Augmentation(crop="resized", rand_ops=2, rand_magnitude=9, erase=0.25, mixup=0.8, cutmix=1.0)


def paper(sparsity: dict[str, Any] | None) -> Recipe:
    """The paper's recipe on ViT-B/16: AdamW at 1e-4 × batch / 256, batch 100, 300 epochs, 5 of warm-up.

    Run: ``ermoe image train NAME IMAGENET --weights vit_b_16.pth``. Needs GPUs: about 1.3 M images an epoch.
    """
    return Recipe("vit_base_patch16_224", sparsity, Training(), _PAPER_AUGMENTATION)


def miniature(sparsity: dict[str, Any] | None, *, patch_size: int = 4) -> Recipe:
    """ViT of width 96 and depth 4 for CIFAR, with experts in blocks 1 and 3, from scratch within minutes.

    Run: ``ermoe image train NAME cifar-10-batches-bin``. Patches of 4 pixels make 65 tokens (cifar-METHOD), patches
    of 8 make 17 (cifar17-METHOD). Augmentation is light, because so short a run underfits.
    """
    return Recipe(
        "vit_tiny_patch16_224",
        sparsity,
        Training(epochs=4, base_lr=2.5e-3, warmup_epochs=0.4, ema=0.99, log_every=25, **STEADY_BASES),
        Augmentation(),
        init="same",
        model_args={"img_size": 32, "patch_size": patch_size, "embed_dim": 96, "depth": 4, "num_heads": 3} | _SMALL,
    )


def smallest(sparsity: dict[str, Any] | None) -> Recipe:
    """A toy for scikit-learn's digits, to see a whole run in seconds: ``ermoe image train digits-ermoe digits``."""
    return Recipe(
        "vit_tiny_patch16_224",
        sparsity,
        Training(epochs=20, batch_size=64, base_lr=1.2e-2, warmup_epochs=2.0, ema=0.95, log_every=10, **STEADY_BASES),
        NO_AUGMENTATION,
        init="same",
        model_args={"img_size": 8, "patch_size": 2, "embed_dim": 48, "depth": 4, "num_heads": 3} | _SMALL,
    )


def convolutional(
    style: str, *, img_size: int = 224, epochs: int = 300, blocks: tuple[int, ...] = (2, 2, 2, 2), flip: bool = True
) -> Recipe:
    """The paper's image-level rivals on ResNet-18, in the two stages of their own papers.

    Run: ``ermoe image train resnet18-single-gated IMAGENET``. Their own losses want one label an image: images are not
    mixed, labels not smoothed.
    """
    is_small = img_size < 224
    own_args = {} if is_small or style != "deep-moe" else {"num_convolutions": 5}  # as in DeepMoE's paper
    return Recipe(
        style,
        None,
        Training(
            epochs=epochs, base_lr=2.5e-3, warmup_epochs=5 if epochs > 50 else 0.1 * epochs, ema=0.0, log_every=25
        ),
        Augmentation(crop="pad" if is_small else "resized", flip=flip),
        init="random",
        model_args={"img_size": img_size, "blocks": blocks, **own_args},
        label_smoothing=0.0,
    )


# What stands between two rows of a table: the options of `ermoe.upcycle`.
METHODS: dict[str, dict[str, Any] | None] = {
    "ermoe": {"balance": "offset"},
    "ermoe-mean": {"balance": "mean"},
    "ermoe-none": {"balance": "none"},
    "v-moe": {"router": "v-moe"},
    "gate": {"router": "logit"},
    "gate-loss-free": {"router": "loss-free"},
    "soft": {"router": "soft"},
    "expert-choice": {"router": "expert-choice"},
    "base": {"router": "base"},
    "cosine": {"router": "cosine"},
    "dense": None,
}
# The paper's own layer: rank inferred from its 243.0 M parameters, no offsets. See ermoe.models.presets.
_PAPER_LAYER = {"rank": 504, "route_rank": 56, "balance": "none"}


def _of_tokens(sparsity: dict[str, Any] | None, num_tokens: int) -> dict[str, Any] | None:
    """Soft MoE with as many slots as tokens, which is what equals the others' cost."""
    return {**sparsity, "num_tokens": num_tokens} if sparsity and sparsity.get("router") == "soft" else sparsity


def _scratch(name: str, num_tokens: int) -> dict[str, Any] | None:
    """A method that starts from random weights."""
    return from_scratch(_of_tokens(METHODS[name], num_tokens))


PRESETS: dict[str, Callable[[], Recipe]] = {
    "paper-ermoe": partial(paper, _PAPER_LAYER),
    **{f"b16-{name}": partial(paper, _of_tokens(sparsity, 197)) for name, sparsity in METHODS.items()},
    **{f"cifar-{name}": partial(miniature, _scratch(name, 65)) for name in METHODS},
    **{f"cifar17-{name}": partial(miniature, _scratch(name, 17), patch_size=8) for name in METHODS},
    **{f"resnet18-{style}": partial(convolutional, style) for style in STYLES},
    **{f"cifar-{style}": partial(convolutional, style, img_size=32, epochs=6, blocks=(1, 1, 1, 1)) for style in STYLES},
    **{
        f"digits-{style}": partial(convolutional, style, img_size=16, epochs=10, blocks=(1, 1, 1, 1), flip=False)
        for style in STYLES
    },
    **{f"digits-{name}": partial(smallest, _scratch(name, 17)) for name in METHODS},
}


def recipe(name: str) -> Recipe:
    """The recipe called ``name``.

    >>> recipe("cifar-v-moe").sparsity
    {'router': 'v-moe'}
    """
    if name not in PRESETS:
        raise UserError(f"there is no preset {name!r}: use one of {', '.join(PRESETS)}")
    return PRESETS[name]()
