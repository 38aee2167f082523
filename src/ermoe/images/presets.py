"""Named recipes: a model, its augmentation and its training, each a function that says what it is for.

The paper's rows start from a pretrained ViT-B/16 and are fine-tuned on ImageNet-1K for 300 epochs; few-shot figures
come from `ermoe image probe` on the result. DeiT-Tiny is fine-tuned from a file, and the miniatures train from scratch
on CIFAR-10, within minutes on two cores; the presets of a family differ in nothing but the method.

Nothing here imports torch, so that a command can show the values of a preset at once.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from ermoe.errors import UserError, unknown_name
from ermoe.train.settings import NO_AUGMENTATION, STEADY_BASES, Augmentation, Training, from_scratch

if TYPE_CHECKING:
    from torch import nn

    from ermoe.data.images import Images
    from ermoe.images.run import Classification, LabelledImages
    from ermoe.train.compute import Compute

IMAGE_LEVEL = ("single-gated", "deep-moe")
"""The paper's rivals that choose for whole images: networks of their own, trained in two stages."""


@dataclass(frozen=True, slots=True)
class ImageRecipe:
    """Everything but the data.

    Args:
        architecture: a model of timm, or one of `IMAGE_LEVEL`.
        sparsity: options of `ermoe.upcycle`; None for a dense model.
        training: the numbers of the loop.
        augmentation: how training images are varied.
        init: what experts start from, see `ermoe.upcycle`; "same" and "random" are for models without weights.
        model_args: options of the architecture.
        label_smoothing: share of a label that is spread over all classes.
        validation: share of the training images that is held out of training to choose the best epoch; 0 chooses none.
        shuffle: "all" training images, or "shards", where every process reads tar files of its own, each from front to
            back: for storage that is slow to read at random.
        epoch_steps: steps of an epoch, for a budget that is the same for any number of images; 0 for a pass over them.
        calibration: training images, without labels or augmentation, to which experts are fitted at the start.
        head_lr: factor on the learning rate of the classifier, for one that starts afresh on weights that know a lot.
        weights: what the model starts from: a file in any usual format, "timm" for timm's pretrained ones.
        preset: the name it had.
    """

    architecture: Annotated[str, tyro.conf.Suppress]
    sparsity: Annotated[Mapping[str, Any] | None, tyro.conf.Suppress]
    training: Training
    augmentation: Augmentation
    init: Annotated[str, tyro.conf.Suppress] = "dense"
    model_args: Annotated[Mapping[str, Any], tyro.conf.Suppress] = field(default_factory=dict)
    label_smoothing: float = 0.1
    validation: float = 0.05
    shuffle: Literal["all", "shards"] = "all"
    epoch_steps: Annotated[int, tyro.conf.Suppress] = 0
    calibration: int = 0
    head_lr: float = 1.0
    weights: str | None = None
    preset: Annotated[str, tyro.conf.Suppress] = "own"

    def __post_init__(self) -> None:
        if not 0 <= self.validation < 1:
            raise UserError(f"validation={self.validation}: need a share of the images from 0 up to, but not, 1")
        if self.head_lr <= 0:
            raise UserError(f"head_lr={self.head_lr}: need a factor above 0")

    def build(self, num_classes: int, *, weights: str | None = None, images: Images | None = None) -> nn.Module:
        """The model before training; ``weights``, if given, instead of the recipe's; ``images`` to be fitted to."""
        from ermoe.images.run import build

        return build(self if weights is None else replace(self, weights=weights), num_classes, images)

    def task(self, data: LabelledImages, compute: Compute) -> Classification:
        """Classification of ``data``, in two stages where the network asks for it."""
        from ermoe.images.run import Classification
        from ermoe.images.two_stages import TwoStageClassification

        images = data.without_validation(self.validation)[0] if self.calibration else None
        model: Any = self.build(len(data.classes), images=images)
        kind = TwoStageClassification if self.architecture in IMAGE_LEVEL else Classification
        return kind(model, data, self, compute)


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name != "Recipe":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        warnings.warn(f"{__name__}.Recipe is ImageRecipe now", DeprecationWarning, stacklevel=2)
        return ImageRecipe


# Reading the mean of the patches, a small model learns within a few epochs; a class token alone takes many.
_SMALL = {"global_pool": "avg"}
_PAPER_AUGMENTATION = Augmentation(crop="resized", rand_ops=2, rand_magnitude=9, erase=0.25, mixup=0.8, cutmix=1.0)


def paper(sparsity: dict[str, Any] | None) -> ImageRecipe:
    """The paper's recipe on ViT-B/16: AdamW at 1e-4 × batch / 256, batch 100, 300 epochs, 5 of warm-up.

    Run: ``ermoe image train NAME IMAGENET --weights vit_b_16.pth``. Needs GPUs: about 1.3 M images an epoch.
    """
    return ImageRecipe("vit_base_patch16_224", sparsity, Training(), _PAPER_AUGMENTATION, validation=0.01)


def miniature(sparsity: dict[str, Any] | None, *, patch_size: int = 4) -> ImageRecipe:
    """ViT of width 96 and depth 4 for CIFAR, with experts in blocks 1 and 3, from scratch within minutes.

    Run: ``ermoe image train NAME cifar-10-batches-bin``. Patches of 4 pixels make 65 tokens (cifar-METHOD), patches
    of 8 make 17 (cifar17-METHOD). Augmentation is light, because so short a run underfits.
    """
    return ImageRecipe(
        "vit_tiny_patch16_224",
        sparsity,
        Training(epochs=4, base_lr=2.5e-3, warmup_epochs=0.4, ema=0.99, log_every=25, **STEADY_BASES),
        Augmentation(),
        init="same",
        model_args={"img_size": 32, "patch_size": patch_size, "embed_dim": 96, "depth": 4, "num_heads": 3} | _SMALL,
    )


def smallest(sparsity: dict[str, Any] | None) -> ImageRecipe:
    """A toy for scikit-learn's digits, to see a whole run in seconds: ``ermoe image train digits-ermoe digits``."""
    return ImageRecipe(
        "vit_tiny_patch16_224",
        sparsity,
        Training(epochs=20, batch_size=64, base_lr=1.2e-2, warmup_epochs=2.0, ema=0.95, log_every=10, **STEADY_BASES),
        NO_AUGMENTATION,
        init="same",
        model_args={"img_size": 8, "patch_size": 2, "embed_dim": 48, "depth": 4, "num_heads": 3} | _SMALL,
    )


def fine_tuned(sparsity: dict[str, Any] | None) -> ImageRecipe:
    """DeiT-Tiny at 96 pixels from its ImageNet weights, experts in every second block: 400 steps of 64 images.

    Run: ``ermoe image train deit-tiny-METHOD DATA --weights deit_tiny_patch16_224.safetensors``, some minutes on two
    cores. An epoch is 100 steps, after which bases are retracted, whatever the number of images. Experts of lower rank
    are fitted to 1,000 of them at the start.
    """
    options = dict(sparsity or {})
    init = options.pop("init", "dense")
    return ImageRecipe(
        "deit_tiny_patch16_224",
        None if sparsity is None else options,
        Training(epochs=4, batch_size=64, base_lr=1.2e-3, warmup_epochs=0.4, ema=0.0, log_every=25, evaluate_every=4),
        Augmentation(),
        init=init,
        model_args={"img_size": 96},
        validation=0.0,
        epoch_steps=100,
        calibration=1000 if init == "clusters" or "rank" in options else 0,
        head_lr=10.0,
    )


def convolutional(
    style: str, *, img_size: int = 224, epochs: int = 300, blocks: tuple[int, ...] = (2, 2, 2, 2), flip: bool = True
) -> ImageRecipe:
    """The paper's image-level rivals on ResNet-18, in the two stages of their own papers.

    Run: ``ermoe image train resnet18-single-gated IMAGENET``. Their own losses want one label an image: images are not
    mixed, labels not smoothed.
    """
    is_small = img_size < 224
    own_args = {} if is_small or style != "deep-moe" else {"num_convolutions": 5}  # as in DeepMoE's paper
    return ImageRecipe(
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
    "ermoe-shared": {"balance": "offset", "shared": "dense"},
    "v-moe": {"router": "v-moe"},
    "gate": {"router": "logit"},
    "gate-loss-free": {"router": "loss-free"},
    "soft": {"router": "soft"},
    "expert-choice": {"router": "expert-choice"},
    "base": {"router": "base"},
    "cosine": {"router": "cosine"},
    "emoe": {"router": "emoe"},
    "dense": None,
}
# What real weights make possible: experts that are fitted to groups of tokens, or beside the dense network, and the one
# low-rank network for all tokens that they have to beat.
_CLUSTERS = {"init": "clusters", "rank": 96}
PRETRAINED: dict[str, dict[str, Any] | None] = METHODS | {
    "ermoe-clusters": {**_CLUSTERS, "top_k": 1},
    "ermoe-clusters-k2": {**_CLUSTERS, "top_k": 2},
    # As many operations as rank 96, routing counted; what all tokens share learns from all of them.
    "ermoe-clusters-shared": {"init": "clusters", "experts": "dense", "shared": 344, "hidden_dim": 128, "top_k": 1},
    "one-low-rank": {"rank": 96, "num_experts": 1, "top_k": 1},
}
# The paper's own layer: rank inferred from its 243.0 M parameters, no offsets. See ermoe.models.presets.
_PAPER_LAYER = {"rank": 504, "route_rank": 56, "balance": "none"}


def _of_tokens(sparsity: dict[str, Any] | None, num_tokens: int) -> dict[str, Any] | None:
    """Soft MoE with as many slots as tokens, which is what equals the others' cost."""
    return {**sparsity, "num_tokens": num_tokens} if sparsity and sparsity.get("router") == "soft" else sparsity


def _scratch(name: str, num_tokens: int) -> dict[str, Any] | None:
    """A method that starts from random weights."""
    return from_scratch(_of_tokens(METHODS[name], num_tokens))


PRESETS: dict[str, Callable[[], ImageRecipe]] = {
    "paper-ermoe": partial(paper, _PAPER_LAYER),
    **{f"b16-{name}": partial(paper, _of_tokens(sparsity, 197)) for name, sparsity in METHODS.items()},
    **{f"cifar-{name}": partial(miniature, _scratch(name, 65)) for name in METHODS},
    **{f"cifar17-{name}": partial(miniature, _scratch(name, 17), patch_size=8) for name in METHODS},
    **{f"deit-tiny-{name}": partial(fine_tuned, _of_tokens(sparsity, 37)) for name, sparsity in PRETRAINED.items()},
    **{f"resnet18-{style}": partial(convolutional, style) for style in IMAGE_LEVEL},
    **{
        f"cifar-{style}": partial(convolutional, style, img_size=32, epochs=6, blocks=(1, 1, 1, 1))
        for style in IMAGE_LEVEL
    },
    **{
        f"digits-{style}": partial(convolutional, style, img_size=16, epochs=10, blocks=(1, 1, 1, 1), flip=False)
        for style in IMAGE_LEVEL
    },
    **{f"digits-{name}": partial(smallest, _scratch(name, 17)) for name in METHODS},
}


ABOUT_METHODS = {
    "ermoe": "experts route by their own eigenbasis; offsets steer towards equal load",
    "ermoe-mean": "the same, less each expert's mean score instead of offsets",
    "ermoe-none": "the same without any correction: the paper's rule",
    "ermoe-shared": "the dense network stays, and small experts add to it",
    "ermoe-clusters": "experts of rank 96 fitted to groups of tokens, one a token",
    "ermoe-clusters-k2": "the same, two a token",
    "ermoe-clusters-shared": "small experts, one a token, beside a narrow network for all tokens, fitted together",
    "one-low-rank": "one network of rank 96 for all tokens, which clusters have to beat",
    "v-moe": "V-MoE: a learned gate with its losses and its limit on tokens",
    "gate": "a learned gate without a balancing loss",
    "gate-loss-free": "a learned gate with the loss-free bias",
    "soft": "Soft MoE",
    "expert-choice": "experts choose their tokens",
    "base": "BASE layers: an assignment with equal load",
    "cosine": "a learned gate on cosines",
    "emoe": "EMoE",
    "dense": "the backbone without experts",
    "single-gated": "one expert chosen for a whole image",
    "deep-moe": "a gate for every convolution, chosen for a whole image",
}


def recipe(name: str) -> ImageRecipe:
    """The recipe called ``name``.

    >>> recipe("cifar-v-moe").sparsity
    {'router': 'v-moe'}
    """
    if name not in PRESETS:
        raise unknown_name("preset", name, PRESETS, listed_by="ermoe image presets")
    return replace(PRESETS[name](), preset=name)
