"""Random changes of a prepared volume that leave the age as it is, looked up from (seed, epoch, index).

Letters: X, Y, Z voxels of the grid.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ermoe.data.randomness import hashed, uniform
from ermoe.errors import UserError


@dataclass(frozen=True, slots=True)
class VolumeAugmentation:
    """Pose and size, bias field, gamma and noise, by MONAI; left–right flips only if asked for, since brains differ.

    Args:
        rotate_degrees: about each axis, up to this.
        scale: of each axis, up to this share.
        shift_mm: along each axis, up to this.
        bias_field: largest coefficient of the polynomial of degree 3 whose exponential multiplies the brain.
        gamma: contrast exponents from 1 / (1 + gamma) to 1 + gamma.
        noise: largest deviation of Gaussian noise, in deviations of the brain's intensity.
        flip: mirror left and right for every second scan.
        probability: of each change.
    """

    rotate_degrees: float = 10.0
    scale: float = 0.05
    shift_mm: float = 6.0
    bias_field: float = 0.3
    gamma: float = 0.25
    noise: float = 0.1
    flip: bool = False
    probability: float = 0.8

    def __post_init__(self) -> None:
        amounts = (self.rotate_degrees, self.scale, self.shift_mm, self.bias_field, self.gamma, self.noise)
        if min(amounts) < 0 or self.scale >= 1:
            raise UserError(f"{self}: need amounts of 0 or more, and a scale below 1")
        if not 0 <= self.probability <= 1:
            raise UserError(f"probability={self.probability}: need 0 to 1")

    def __call__(
        self, t1_XYZ: Tensor, mask_XYZ: Tensor, *, seed: int, epoch: int, index: int, spacing_mm: float = 2.0
    ) -> tuple[Tensor, Tensor]:
        """The volume and its mask, changed: 0 outside the mask, and the mean and deviation inside it as before."""
        # MONAI's transforms draw from generators of their own: each gets a seed of its own from the same lookup.
        seeds = [int(bits) for bits in hashed(seed, epoch, index, np.arange(5)) >> np.uint64(32)]
        mean, deviation = _moments(t1_XYZ[mask_XYZ])
        t1_XYZ, mask_XYZ = self._moved(t1_XYZ, mask_XYZ, seeds, spacing_mm)
        if not mask_XYZ.any():
            raise UserError("the augmentation moved the brain out of the volume: use a smaller shift")
        inside = self._exposed(t1_XYZ, mask_XYZ, seeds)
        changed_mean, changed_deviation = _moments(inside)
        changed_XYZ = torch.zeros_like(t1_XYZ)
        changed_XYZ[mask_XYZ] = (inside - changed_mean) * (deviation / changed_deviation) + mean
        return changed_XYZ, mask_XYZ

    def _moved(self, t1_XYZ: Tensor, mask_XYZ: Tensor, seeds: list[int], spacing_mm: float) -> tuple[Tensor, Tensor]:
        monai = _monai()
        both = torch.stack([t1_XYZ.float(), mask_XYZ.float()])
        if uniform(1, seeds[0])[0, 0] < self.probability:
            places = monai.RandAffineGrid(
                rotate_range=(math.radians(self.rotate_degrees),) * 3,
                scale_range=(self.scale,) * 3,
                translate_range=(self.shift_mm / spacing_mm,) * 3,
            )
            # In float32: the default of MONAI, float64, takes twice the time.
            look_up = monai.Resample(mode="bilinear", padding_mode="zeros", dtype=np.float32)
            grid = places.set_random_state(seed=seeds[0])(spatial_size=t1_XYZ.shape)
            both = _plain(look_up(both, grid=grid))
        if self.flip:
            both = _plain(monai.RandFlip(prob=0.5, spatial_axis=0).set_random_state(seed=seeds[1])(both))
        return both[0], both[1] > 0.5

    def _exposed(self, t1_XYZ: Tensor, mask_XYZ: Tensor, seeds: list[int]) -> Tensor:
        """The intensities inside the mask after bias field, gamma and noise.

        The first two act on intensities above 0, so the darkest voxel of the brain becomes 0.
        """
        monai, sure = _monai(), self.probability
        inside = t1_XYZ[mask_XYZ]
        if self.bias_field > 0:
            field = monai.RandBiasField(prob=sure, degree=3, coeff_range=(0.0, self.bias_field))
            bright_XYZ = (t1_XYZ - inside.min()) * mask_XYZ
            inside = _plain(field.set_random_state(seed=seeds[2])(bright_XYZ[None]))[0][mask_XYZ]
        if self.gamma > 0:
            contrast = monai.RandAdjustContrast(prob=sure, gamma=(1 / (1 + self.gamma), 1 + self.gamma))
            inside = _plain(contrast.set_random_state(seed=seeds[3])(inside[None]))[0]
        if self.noise > 0:
            noise = monai.RandGaussianNoise(prob=sure, std=self.noise)
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
