"""How training images are varied: settings alone, which a command line reads without waiting for torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ermoe.errors import UserError


@dataclass(frozen=True, slots=True)
class Augmentation:
    """How training images are varied.

    Args:
        crop: "pad" shifts by up to an eighth of the side; "resized" takes a random share of the area, as for ImageNet;
            "none".
        flip: mirror every second image, left to right.
        rand_ops: operations of RandAugment on each image; 0 for none.
        rand_magnitude: their strength, 0 to 30.
        erase: chance that a random rectangle is replaced by noise.
        mixup, cutmix: α of the Beta distribution; 0 for none. With both, each pair of images draws one of the two.
    """

    crop: Literal["pad", "resized", "none"] = "pad"
    flip: bool = True
    rand_ops: int = 0
    rand_magnitude: int = 9
    erase: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0

    def __post_init__(self) -> None:
        if self.crop not in ("pad", "resized", "none"):
            raise UserError(f"crop={self.crop!r}: use 'pad', 'resized' or 'none'")
        if not 0 <= self.rand_magnitude <= 30 or self.rand_ops < 0:
            raise UserError(
                f"rand_ops={self.rand_ops}, rand_magnitude={self.rand_magnitude}: need 0 or more operations of "
                "magnitude 0 to 30"
            )
        if not 0 <= self.erase <= 1 or self.mixup < 0 or self.cutmix < 0:
            raise UserError(
                f"erase={self.erase}, mixup={self.mixup}, cutmix={self.cutmix}: need a chance from 0 to 1, and α ≥ 0"
            )

    @property
    def mixes(self) -> bool:
        """Whether images are mixed in pairs, for which a batch must be even."""
        return self.mixup > 0 or self.cutmix > 0


NO_AUGMENTATION = Augmentation(crop="none", flip=False)
