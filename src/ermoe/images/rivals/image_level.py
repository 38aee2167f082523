"""The image-level rivals on a ResNet-18, in a form that `ermoe.save` can write down and build again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torchvision.models import ResNet
from torchvision.models.resnet import BasicBlock

from ermoe.errors import UserError
from ermoe.images.rivals.deep_moe import DeepMoEStyle
from ermoe.images.rivals.single_gated import SingleGatedMoEStyle

ImageLevel = SingleGatedMoEStyle | DeepMoEStyle
STYLES: dict[str, type[SingleGatedMoEStyle] | type[DeepMoEStyle]] = {
    "single-gated": SingleGatedMoEStyle,
    "deep-moe": DeepMoEStyle,
}


def image_level(
    style: str, *, num_classes: int, img_size: int = 224, blocks: Sequence[int] = (2, 2, 2, 2), **options: Any
) -> ImageLevel:
    """A "single-gated" or "deep-moe" network.

    Args:
        style: which of the two.
        img_size: side of the images it is meant for.
        blocks: residual blocks of the four stages; ResNet-18 by default.
        options: of `SingleGatedMoEStyle` or `DeepMoEStyle`.

    >>> image_level("deep-moe", num_classes=10, img_size=32, blocks=(1, 1, 1, 1)).num_classes
    10
    """
    if style not in STYLES:
        raise UserError(f"there is no image-level network {style!r}: use one of {', '.join(STYLES)}")
    model = STYLES[style](ResNet(BasicBlock, list(blocks), num_classes=num_classes), **options)
    if isinstance(model, SingleGatedMoEStyle):
        model.gate.requires_grad_(False)  # it is the nearest centroid; the hard choice sends it no gradient
    model.config = {"style": style, "img_size": img_size, "blocks": list(blocks), **options}  # type: ignore[assignment]
    model.pretrained_cfg = {  # type: ignore[assignment]
        "input_size": (3, img_size, img_size),
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
        "crop_pct": 1.0 if img_size <= 64 else 0.875,
    }
    return model
