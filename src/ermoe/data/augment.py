"""What is done to an image before the model sees it. Every random number is looked up by (seed, epoch, image).

Images are worked on in batches. `Transform.host` reads, crops, flips and distorts bytes, in worker processes if there
are any; `Transform.device` does what is cheaper on the training device: it makes numbers of them, erases and mixes.

Letters: B images, C channels, H and W pixels, S pixels of a side of a square image, O operations per image.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from rich.progress import track
from torch import Tensor
from torchvision.transforms import v2

from ermoe.data.images import Images, ImagesInMemory
from ermoe.data.order import Indices, uniform
from ermoe.errors import UserError
from ermoe.train.settings import NO_AUGMENTATION, Augmentation

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_F = v2.functional
_SMOOTH: dict[str, Any] = {"interpolation": v2.InterpolationMode.BICUBIC, "antialias": True}
_BINS = 31  # of magnitudes
_GEOMETRY, _DISTORTION, _ERASING, _MIXING = range(4)  # independent streams of numbers for each image


@dataclass(slots=True)
class Batch:
    """Images (B, 3, S, S), labels (B,), and where images were mixed, the other label and the own one's share (B,)."""

    image: Tensor
    label: Tensor
    other_label: Tensor | None = None
    share: Tensor | None = None
    index: Tensor | None = None

    def __len__(self) -> int:
        return len(self.label)


@dataclass(frozen=True, slots=True)
class Transform:
    """From indices to batches for a model whose images have ``size`` pixels a side.

    Without augmentation, the shorter side of an image becomes size / ``crop_share`` and the middle is cut out; an image
    that has ``size`` pixels a side is taken as it is. Where images lie, in memory or in files, makes no difference.
    """

    size: int
    augmentation: Augmentation = NO_AUGMENTATION
    seed: int = 0
    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD
    crop_share: float = 1.0

    def of(self, images: Images) -> ImageSource:
        """Images as this transform shows them, for a `ermoe.train.loader.Loader`."""
        return ImageSource(images, self)

    def host(self, images: Images, index_B: Indices, epoch: int) -> Tensor:
        """Reads, crops, flips and distorts: uint8 (B, 3, S, S)."""
        if not len(index_B):
            return torch.empty(0, 3, self.size, self.size, dtype=torch.uint8)
        number_BK = uniform(6, self.seed, epoch, index_B, _GEOMETRY)
        if isinstance(images, ImagesInMemory):
            image_BCSS = self._cut(images.image_NCHW[torch.from_numpy(index_B)], number_BK)
        else:  # each has its own size
            rows = zip(index_B.tolist(), number_BK[:, None], strict=True)
            image_BCSS = torch.cat([self._cut(images.read(index)[None], number_1K) for index, number_1K in rows])
        recipe = self.augmentation
        if recipe.rand_ops:
            draw = uniform(2 * recipe.rand_ops, self.seed, epoch, index_B, _DISTORTION)
            choice_BO, sign_BO = np.split(draw, 2, axis=1)
            image_BCSS = rand_augment(image_BCSS, choice_BO, sign_BO, recipe.rand_magnitude)
        return image_BCSS

    def device(self, image_BCSS: Tensor, label_B: Tensor, index_B: Indices, epoch: int) -> Batch:
        """Numbers instead of bytes; erases and mixes. Stays on the device of ``image_BCSS``."""
        mean, std = (torch.tensor(v, device=image_BCSS.device).view(3, 1, 1) for v in (self.mean, self.std))
        value_BCSS = torch.addcmul(-mean / std, image_BCSS, 1 / (255 * std))
        if self.augmentation.erase:
            value_BCSS = self._erase(value_BCSS, uniform(4, self.seed, epoch, index_B, _ERASING), index_B, epoch)
        batch = Batch(value_BCSS, label_B, index=torch.from_numpy(index_B))
        return self._mix(batch, index_B, epoch) if self.augmentation.mixes and len(index_B) else batch

    def pixels(self, value_BCSS: Tensor) -> Tensor:
        """The bytes that `device` made these numbers of, where it neither erased nor mixed."""
        mean, std = (torch.tensor(v, device=value_BCSS.device).view(3, 1, 1) for v in (self.mean, self.std))
        return (255 * (value_BCSS * std + mean)).round().clamp(0, 255).to(torch.uint8)

    def _cut(self, image_BCHW: Tensor, number_BK: NDArray[np.float64]) -> Tensor:
        """Crops, shifts and flips images of one size, by looked-up numbers."""
        if self.augmentation.crop == "resized":
            height, width = image_BCHW.shape[-2:]
            least = self.augmentation.least_area
            boxes = (resized_crop(height, width, number_K, least) for number_K in number_BK)
            pairs, size = zip(image_BCHW, boxes, strict=True), [self.size, self.size]
            image_BCSS = torch.stack([_F.resized_crop(image, *box, size, **_SMOOTH) for image, box in pairs])
        else:
            image_BCSS = _middle(image_BCHW, self.size, self.crop_share)
        margin = self.size // 8 if self.augmentation.crop == "pad" else 0
        mirrored_B = number_BK[:, 5] < 0.5 if self.augmentation.flip else np.zeros(len(number_BK), bool)
        if margin:
            shift_B2 = (number_BK[:, :2] * (2 * margin + 1)).astype(np.int64)
            image_BCSS = _shifted(image_BCSS, shift_B2, mirrored_B, margin)
        elif mirrored_B.any():
            image_BCSS = torch.where(torch.from_numpy(mirrored_B).view(-1, 1, 1, 1), image_BCSS.flip(-1), image_BCSS)
        return image_BCSS.expand(-1, 3, -1, -1)

    def _erase(self, value_BCSS: Tensor, number_BK: NDArray[np.float64], index_B: Indices, epoch: int) -> Tensor:
        """A rectangle of 2 to 33 % of the area and of aspect 0.3 to 3.3 becomes Gaussian noise (Zhong et al. 2020)."""
        side = self.size
        for row in (number_BK[:, 0] < self.augmentation.erase).nonzero()[0]:
            _, area, aspect, place = number_BK[row]
            ratio = math.exp(math.log(0.3) * (1 - 2 * aspect))
            height = min(side, max(1, round(side * math.sqrt((0.02 + 0.31 * area) * ratio))))
            width = min(side, max(1, round(side * math.sqrt((0.02 + 0.31 * area) / ratio))))
            cell = int(place * (side - height + 1) * (side - width + 1))
            top, left = divmod(cell, side - width + 1)
            noise = _gaussian(3 * height * width, self.seed, epoch, int(index_B[row]))
            value_BCSS[row, :, top : top + height, left : left + width] = noise.view(3, height, width).to(value_BCSS)
        return value_BCSS

    def _mix(self, batch: Batch, index_B: Indices, epoch: int) -> Batch:
        """Mixes each image with its neighbour in the order of the epoch, both ways, by one draw for the pair.

        Pairs stay together however a batch is shared out, so mixing does not depend on the number of processes.
        """
        from scipy.special import betaincinv  # slow to import, and nothing else needs it

        if len(index_B) % 2:
            raise UserError(f"images are mixed in pairs, and a process got {len(index_B)}: use an even batch size")
        recipe, side = self.augmentation, self.size
        number_P4 = uniform(4, self.seed, epoch, index_B[::2], _MIXING)
        cuts_P = number_P4[:, 0] * (bool(recipe.mixup) + bool(recipe.cutmix)) >= bool(recipe.mixup)
        alpha_P = np.where(cuts_P, recipe.cutmix, recipe.mixup)
        share_P = betaincinv(alpha_P, alpha_P, number_P4[:, 1])
        swapped = batch.image.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)
        keep_P1SS = np.empty((len(cuts_P), 1, side, side), np.float32)
        for pair, (cuts, share) in enumerate(zip(cuts_P, share_P, strict=True)):
            keep_P1SS[pair] = _window(side, share, *number_P4[pair, 2:]) if cuts else share
        share_P = np.where(cuts_P, keep_P1SS.mean((1, 2, 3)), share_P)
        keep_B1SS = torch.from_numpy(keep_P1SS).to(batch.image).repeat_interleave(2, 0)
        return Batch(
            torch.lerp(swapped, batch.image, keep_B1SS),
            batch.label,
            batch.label.unflatten(0, (-1, 2)).flip(1).flatten(),
            torch.from_numpy(share_P).to(batch.image).repeat_interleave(2),
            batch.index,
        )


def resized_crop(
    height: int, width: int, number_K: NDArray[np.float64], least_area: float = 0.08
) -> tuple[int, int, int, int]:
    """(top, left, height, width) of that share of the area or more, aspect 3/4 to 4/3; shrunk where it sticks out."""
    area = height * width * (least_area + (1 - least_area) * number_K[0])
    aspect = math.exp(math.log(4 / 3) * (2 * number_K[1] - 1))
    crop_height = min(height, max(1, round(math.sqrt(area / aspect))))
    crop_width = min(width, max(1, round(math.sqrt(area * aspect))))
    top, left = int(number_K[2] * (height - crop_height + 1)), int(number_K[3] * (width - crop_width + 1))
    return top, left, crop_height, crop_width


def _middle(image_BCHW: Tensor, size: int, crop_share: float) -> Tensor:
    if image_BCHW.shape[-2:] == (size, size):
        return image_BCHW
    shorter = max(size, round(size / crop_share))
    resized = _F.resize(image_BCHW, [shorter], **_SMOOTH)
    return _F.center_crop(resized, [size, size])


def _shifted(image_BCHW: Tensor, shift_B2: Indices, mirrored_B: NDArray[np.bool_], margin: int) -> Tensor:
    """Windows of the zero-padded images, ``shift_B2`` from their corner, mirrored where asked.

    It is one lookup: row and column of the source for every pixel of the result.
    """
    height, width = image_BCHW.shape[-2:]
    padded = F.pad(image_BCHW, [margin] * 4)
    row_BH = shift_B2[:, :1] + np.arange(height)
    column_W = np.arange(width)
    column_BW = shift_B2[:, 1:] + np.where(mirrored_B[:, None], column_W[::-1], column_W)
    pixel_BP = row_BH[:, :, None] * padded.shape[-1] + column_BW[:, None, :]
    pixel_B1P = torch.from_numpy(pixel_BP.reshape(len(pixel_BP), 1, -1)).expand(-1, image_BCHW.shape[1], -1)
    return padded.flatten(2).gather(2, pixel_B1P).view(image_BCHW.shape)


def _window(side: int, share: float, u: float, v: float) -> NDArray[np.float32]:
    """CutMix: 1 where an image keeps its own pixels, 0 in a window of (1 − share) of the area at a random place."""
    half = side * math.sqrt(1 - share) / 2
    keep = np.ones((side, side), np.float32)
    top, bottom = (int(np.clip(u * side + d, 0, side)) for d in (-half, half))
    left, right = (int(np.clip(v * side + d, 0, side)) for d in (-half, half))
    keep[top:bottom, left:right] = 0
    return keep


def _gaussian(num: int, *keys: int) -> Tensor:
    """Standard-normal numbers by Box and Muller's transform of looked-up ones."""
    number_1K = uniform(2 * num, *keys, _ERASING + 16)
    first, second = np.split(number_1K[0], 2)
    return torch.from_numpy(np.sqrt(-2 * np.log1p(-first)) * np.cos(2 * np.pi * second))


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
    """RandAugment (Cubuk et al. 2020): applies O operations of ``magnitude`` (0 to 30) to every image of a batch.

    Each image has operations of its own, chosen by numbers in [0, 1). Those that drew the same one go through
    torchvision's kernel together: the space and the magnitudes are those of `torchvision.transforms.v2.RandAugment`.

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


@dataclass(frozen=True, slots=True)
class ImageSource:
    """Labelled images through a transform; see `ermoe.train.loader.Source`."""

    images: Images
    transform: Transform

    @property
    def is_in_memory(self) -> bool:
        return isinstance(self.images, ImagesInMemory)

    def __len__(self) -> int:
        return len(self.images)

    def read(self, index_B: Indices, epoch: int) -> Tensor:
        """Bytes (B, 3, S, S)."""
        return self.transform.host(self.images, index_B, epoch)

    def finish(self, read: Tensor, index_B: Indices, epoch: int, device: torch.device) -> Batch:
        """Numbers, with their labels."""
        label_B = self.images.label_N[torch.from_numpy(index_B)]
        image_BCSS, label_B = (tensor.to(device, non_blocking=True) for tensor in (read, label_B))
        return self.transform.device(image_BCSS, label_B, index_B, epoch)


def in_memory(images: Images, side: int, *, portion: int = 256, shows_progress: bool = False) -> ImagesInMemory:
    """All images decoded once and cut to ``side`` pixels a side, as bytes: for sets that fit."""
    if isinstance(images, ImagesInMemory):
        return images
    cut = Transform(side)
    starts = track(range(0, len(images), portion), "reading", transient=True, disable=not shows_progress)
    parts = [cut.host(images, np.arange(start, min(start + portion, len(images))), epoch=0) for start in starts]
    return ImagesInMemory(torch.cat(parts), **images.about)
