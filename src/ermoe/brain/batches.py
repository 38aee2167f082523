"""Batches of prepared volumes, in an order and with augmentations that are functions of (seed, epoch, position).

Letters: B volumes, C channels of the network's input, X, Y, Z voxels.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ermoe.brain.data.cache import VolumeCache
from ermoe.brain.data.scans import TISSUES, Scan
from ermoe.brain.inputs import VERSION, isolated_input, network_input, voxels
from ermoe.brain.recipes import VolumeAugmentation
from ermoe.data.order import Indices, hashed, uniform
from ermoe.errors import UserError, library
from ermoe.files import replacing, to_json
from ermoe.train.compute import Compute, Processes
from ermoe.train.loader import Loader

_LEVELS = 255
_Drawn = tuple[int, int, int]
"""Seed, epoch and index: what a random change is looked up by."""


@dataclass(frozen=True, slots=True)
class VolumeBatch:
    """What a network is given, what it should answer, and which tissue was isolated, if one was."""

    input_BCXYZ: Tensor
    mask_BXYZ: Tensor
    age_B: Tensor
    region_B: Tensor | None = None

    def to(self, device: torch.device | str) -> VolumeBatch:
        """On another device."""
        region_B = None if self.region_B is None else self.region_B.to(device)
        return VolumeBatch(self.input_BCXYZ.to(device), self.mask_BXYZ.to(device), self.age_B.to(device), region_B)


@dataclass(frozen=True, slots=True)
class ScanSet:
    """Scans as a network sees them; see `ermoe.train.loader.Source`. Volumes are read from the cache, never kept.

    Args:
        cache: of prepared volumes.
        scans: whose volumes they are.
        kind: the network's input, see `ermoe.brain.recipes.InputKind`.
        regions: every scan stands for three volumes, of which each holds one tissue alone: index 3 i + 0, 1, 2 is scan
            i with nothing but its white matter, grey matter, fluid. They are not augmented.
        augmentation: of whole volumes, a function of (seed, epoch, index).
        seed: of the augmentation.
        variants: augmented inputs of each scan, or one plain input, that are kept in files beside the prepared volumes
            and drawn from; 0 makes them anew every time. All folds, seeds and methods share what is kept, because on a
            few cores making it costs more than learning.
        told: what to learn in place of ages, by scan; see `ermoe.brain.learning.residuals`.
        swapped: wrong names for the tissues, to see whether experts follow them: the tissue to show in place of each.
    """

    cache: VolumeCache
    scans: Sequence[Scan]
    kind: str
    regions: bool = False
    augmentation: VolumeAugmentation | None = None
    seed: int = 0
    variants: int = 0
    told: Mapping[str, float] | None = None
    swapped: tuple[int, int, int] | None = None

    is_in_memory: ClassVar[bool] = False

    def __len__(self) -> int:
        return len(self.scans) * (len(TISSUES) if self.regions else 1)

    def ages(self) -> Tensor:
        """Of every scan, or what is to be learnt in their place; NaN where there is none."""
        return torch.tensor([self._age(scan) for scan in self.scans])

    def plain(self) -> ScanSet:
        """The same scans as they are."""
        return replace(self, augmentation=None)

    def read(self, index_B: Indices, epoch: int = 0) -> VolumeBatch:
        """The volumes at some indices; indices beyond the number of volumes go round again, augmented differently."""
        inputs, masks, ages, regions = zip(*(self._item(int(index), epoch) for index in index_B), strict=True)
        region_B = torch.tensor(regions) if self.regions else None
        return VolumeBatch(torch.stack(inputs), torch.stack(masks), torch.tensor(ages), region_B)

    def finish(self, read: VolumeBatch, index_B: Indices, epoch: int, device: torch.device) -> VolumeBatch:
        """The batch on the model's device."""
        return read.to(device)

    def _item(self, index: int, epoch: int) -> tuple[Tensor, Tensor, float, int]:
        which = index % len(self)
        number, region = divmod(which, len(TISSUES)) if self.regions else (which, 0)
        scan = self.scans[number]
        shown = None if not self.regions else region if self.swapped is None else self.swapped[region]
        take = self._kept if self.variants else self._made
        return (*take(scan, shown, (self.seed, epoch, index)), self._age(scan), region)

    def _age(self, scan: Scan) -> float:
        if self.told is not None:
            return self.told[scan.key]
        return float("nan") if scan.age is None else scan.age

    def _made(self, scan: Scan, region: int | None, drawn: _Drawn) -> tuple[Tensor, Tensor]:
        """One tissue alone, or the whole brain, augmented; and its mask."""
        volume = self.cache.volume(scan, with_tissue=region is not None)
        if region is not None:
            return isolated_input(self.kind, volume, region)
        t1, mask = voxels(volume)
        if self.augmentation is not None:
            t1, mask = augmented(self.augmentation, t1, mask, drawn, self.cache.preprocessing.spacing_mm)
        return network_input(self.kind, t1, mask)

    def _kept(self, scan: Scan, region: int | None, drawn: _Drawn) -> tuple[Tensor, Tensor]:
        """The same from a file, which is made the first time it is asked for.

        Contrast is kept in steps of 1/255, the others in half precision: 2 MB a variant of 96 × 112 × 96 voxels, of
        blocks 0.2 MB.
        """
        variant = int(hashed(*drawn)[0] % np.uint64(1 if self.augmentation is None else self.variants))
        path = self._path(scan, region, variant)
        if not path.is_file():
            person = int.from_bytes(hashlib.blake2b(scan.key.encode(), digest_size=4).digest(), "big")
            seen, shown = (part.numpy() for part in self._made(scan, region, (0, variant, person)))
            kept = np.rint(seen * _LEVELS).astype(np.uint8) if self.kind == "contrast" else seen.astype(np.float16)
            with replacing(path) as draft, open(draft, "wb") as file:
                np.savez(file, input=kept, mask=np.packbits(shown))
        with np.load(path, allow_pickle=False) as stored:
            values, packed = stored["input"], stored["mask"]
        mask = np.unpackbits(packed, count=values[0].size).reshape(values.shape[1:]).astype(bool)
        volume = torch.from_numpy(values).float()
        return volume / _LEVELS if values.dtype == np.uint8 else volume, torch.from_numpy(mask)

    def _path(self, scan: Scan, region: int | None, variant: int) -> Path:
        recipe = {"kind": self.kind, "augmentation": to_json(self.augmentation), "region": region, "version": VERSION}
        name = hashlib.blake2b(json.dumps(recipe, sort_keys=True).encode(), digest_size=6).hexdigest()
        return self.cache.folder / f"variants-{name}" / f"{self.cache.key(scan)}-{variant:02d}.npz"


def every_scan(volumes: ScanSet, compute: Compute | None = None, *, batch_size: int = 8) -> Loader[VolumeBatch]:
    """Once through all scans, on every process: figures of a few dozen people need them all."""
    compute = Compute() if compute is None else compute
    alone = Compute(Processes(device=compute.device), workers=compute.workers)
    return Loader(volumes, batch_size=batch_size, compute=alone)


def augmented(
    amounts: VolumeAugmentation, t1_XYZ: Tensor, mask_XYZ: Tensor, drawn: _Drawn, spacing_mm: float
) -> tuple[Tensor, Tensor]:
    """The volume and its mask, changed: 0 outside the mask, and the mean and deviation inside it as before."""
    # MONAI's transforms draw from generators of their own: each gets a seed of its own from the same lookup.
    seeds = [int(bits) for bits in hashed(*drawn, np.arange(5)) >> np.uint64(32)]
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
    return library("monai.transforms", "augmenting volumes needs MONAI", "brain")
