"""Random changes of a prepared volume that leave the age as it is, looked up from (seed, epoch, index).

Letters: X, Y, Z voxels of the grid.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ermoe.brain.data.settings import VolumeAugmentation
from ermoe.data.order import hashed, uniform
from ermoe.errors import UserError


def augmented(
    amounts: VolumeAugmentation,
    t1_XYZ: Tensor,
    mask_XYZ: Tensor,
    *,
    seed: int,
    epoch: int,
    index: int,
    spacing_mm: float,
) -> tuple[Tensor, Tensor]:
    """The volume and its mask, changed: 0 outside the mask, and the mean and deviation inside it as before."""
    # MONAI's transforms draw from generators of their own: each gets a seed of its own from the same lookup.
    seeds = [int(bits) for bits in hashed(seed, epoch, index, np.arange(5)) >> np.uint64(32)]
    mean, deviation = _moments(t1_XYZ[mask_XYZ])
    t1_XYZ, mask_XYZ = _moved(amounts, t1_XYZ, mask_XYZ, seeds, spacing_mm)
    if not mask_XYZ.any():
        raise UserError("the augmentation moved the brain out of the volume: use a smaller shift")
    inside = _exposed(amounts, t1_XYZ, mask_XYZ, seeds)
    changed_mean, changed_deviation = _moments(inside)
    changed_XYZ = torch.zeros_like(t1_XYZ)
    changed_XYZ[mask_XYZ] = (inside - changed_mean) * (deviation / changed_deviation) + mean
    return changed_XYZ, mask_XYZ


def _moved(
    amounts: VolumeAugmentation, t1_XYZ: Tensor, mask_XYZ: Tensor, seeds: list[int], spacing_mm: float
) -> tuple[Tensor, Tensor]:
    monai = _monai()
    both = torch.stack([t1_XYZ.float(), mask_XYZ.float()])
    if uniform(1, seeds[0])[0, 0] < amounts.probability:
        places = monai.RandAffineGrid(
            rotate_range=(math.radians(amounts.rotate_degrees),) * 3,
            scale_range=(amounts.scale,) * 3,
            translate_range=(amounts.shift_mm / spacing_mm,) * 3,
        )
        # In float32: the default of MONAI, float64, takes twice the time.
        look_up = monai.Resample(mode="bilinear", padding_mode="zeros", dtype=np.float32)
        grid = places.set_random_state(seed=seeds[0])(spatial_size=t1_XYZ.shape)
        both = _plain(look_up(both, grid=grid))
    if amounts.flip:
        both = _plain(monai.RandFlip(prob=0.5, spatial_axis=0).set_random_state(seed=seeds[1])(both))
    return both[0], both[1] > 0.5


def _exposed(amounts: VolumeAugmentation, t1_XYZ: Tensor, mask_XYZ: Tensor, seeds: list[int]) -> Tensor:
    """The intensities inside the mask after bias field, gamma and noise.

    The first two act on intensities above 0, so the darkest voxel of the brain becomes 0.
    """
    monai, sure = _monai(), amounts.probability
    inside = t1_XYZ[mask_XYZ]
    if amounts.bias_field > 0:
        field = monai.RandBiasField(prob=sure, degree=3, coeff_range=(0.0, amounts.bias_field))
        bright_XYZ = (t1_XYZ - inside.min()) * mask_XYZ
        inside = _plain(field.set_random_state(seed=seeds[2])(bright_XYZ[None]))[0][mask_XYZ]
    if amounts.gamma > 0:
        contrast = monai.RandAdjustContrast(prob=sure, gamma=(1 / (1 + amounts.gamma), 1 + amounts.gamma))
        inside = _plain(contrast.set_random_state(seed=seeds[3])(inside[None]))[0]
    if amounts.noise > 0:
        noise = monai.RandGaussianNoise(prob=sure, std=amounts.noise)
        inside = inside / _moments(inside)[1]
        inside = _plain(noise.set_random_state(seed=seeds[4])(inside[None]))[0]
    return inside


def _plain(image: Any) -> Tensor:
    """A tensor without MONAI's metadata, which every operation would drag along."""
    return image.as_tensor() if hasattr(image, "as_tensor") else torch.as_tensor(image)


def _moments(values: Tensor) -> tuple[float, float]:
    deviation, mean = torch.std_mean(values, correction=0)
    return float(mean), max(float(deviation), 1e-12)


def _monai() -> Any:
    try:
        import monai.transforms
    except ImportError:
        raise UserError("augmenting volumes needs MONAI: pip install 'ermoe[brain]'") from None
    return monai.transforms
