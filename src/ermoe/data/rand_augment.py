"""RandAugment for a batch in which every image has operations of its own (Cubuk et al. 2020).

Images that drew the same operation go through torchvision's kernel together: the space and the magnitudes are those of
`torchvision.transforms.v2.RandAugment`.

Letters: B images, C channels, H and W pixels, O operations per image.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchvision.transforms import v2

_BINS = 31
_F = v2.functional


def _affine(image: Tensor, *, angle: float = 0.0, shift: tuple[int, int] = (0, 0), shear: tuple[float, float] = (0, 0)):
    return _F.affine(image, angle=angle, translate=list(shift), scale=1.0, shear=list(shear), center=[0, 0])


# Name -> (kernel, strength at full magnitude, whether the strength has a random sign). Strengths of the shears are in
# radians' tangents, of the shifts in sizes of the image.
_OPERATIONS: dict[str, tuple[Callable[[Tensor, float], Tensor], float, bool]] = {
    "identity": (lambda image, _: image, 0.0, False),
    "shear x": (lambda image, s: _affine(image, shear=(float(np.degrees(np.arctan(s))), 0.0)), 0.3, True),
    "shear y": (lambda image, s: _affine(image, shear=(0.0, float(np.degrees(np.arctan(s))))), 0.3, True),
    "shift x": (lambda image, s: _affine(image, shift=(int(s * image.shape[-1]), 0)), 150 / 331, True),
    "shift y": (lambda image, s: _affine(image, shift=(0, int(s * image.shape[-2]))), 150 / 331, True),
    "rotate": (lambda image, s: _F.rotate(image, s), 30.0, True),
    "brightness": (lambda image, s: _F.adjust_brightness(image, 1 + s), 0.9, True),
    "saturation": (lambda image, s: _F.adjust_saturation(image, 1 + s), 0.9, True),
    "contrast": (lambda image, s: _F.adjust_contrast(image, 1 + s), 0.9, True),
    "sharpness": (lambda image, s: _F.adjust_sharpness(image, 1 + s), 0.9, True),
    "posterize": (lambda image, s: _F.posterize(image, 8 - round(s)), 4.0, False),
    "solarize": (lambda image, s: _F.solarize(image, 255 * (1 - s)), 1.0, False),
    "autocontrast": (lambda image, _: _F.autocontrast(image), 0.0, False),
    "equalize": (lambda image, _: _F.equalize(image), 0.0, False),
}


def rand_augment(image_BCHW: Tensor, choice_BO: NDArray[np.float64], sign_BO: NDArray[np.float64], magnitude: int):
    """Applies O operations of ``magnitude`` (0 to 30) to every image, chosen by numbers in [0, 1).

    >>> image = torch.full((2, 3, 8, 8), 100, dtype=torch.uint8)
    >>> brighter = rand_augment(image, np.array([[0.0], [0.45]]), np.array([[0.9], [0.9]]), magnitude=30)
    >>> brighter[:, 0, 0, 0].tolist()
    [100, 190]
    """
    operations = list(_OPERATIONS.values())
    image_BCHW = image_BCHW.clone()
    for turn in range(choice_BO.shape[1]):
        choice_B = (choice_BO[:, turn] * len(operations)).astype(int)
        for number, (kernel, strongest, is_signed) in enumerate(operations):
            strength = strongest * magnitude / (_BINS - 1)
            drew_B = choice_B == number
            negative_B = (sign_BO[:, turn] < 0.5) & is_signed
            for selected_B, signed in ((drew_B & ~negative_B, strength), (drew_B & negative_B, -strength)):
                if number and selected_B.any():
                    rows = torch.from_numpy(selected_B.nonzero()[0])
                    image_BCHW[rows] = kernel(image_BCHW[rows], signed)
    return image_BCHW
