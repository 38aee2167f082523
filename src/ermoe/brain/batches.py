"""Batches of prepared volumes, in an order and with augmentations that are functions of (seed, epoch, position).

Letters: B volumes, C channels of the network's input, X, Y, Z voxels.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from ermoe.brain.data.cache import VolumeCache
from ermoe.brain.data.scans import TISSUES, Scan
from ermoe.brain.data.settings import VolumeAugmentation
from ermoe.brain.inputs import VERSION, isolated_input, voxels, whole_input
from ermoe.data.order import Indices, hashed
from ermoe.files import replacing, to_json
from ermoe.train.compute import Compute, Processes
from ermoe.train.loader import Loader

_LEVELS = 255


@dataclass(frozen=True, slots=True)
class VolumeBatch:
    """What a network is given, what it should answer, and which tissue was isolated, if one was."""

    input_BCXYZ: Tensor
    mask_BXYZ: Tensor
    age_B: Tensor
    region_B: Tensor | None = None

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> VolumeBatch:
        """On another device; the input also in another precision."""
        region_B = None if self.region_B is None else self.region_B.to(device)
        volume, mask = self.input_BCXYZ.to(device, dtype), self.mask_BXYZ.to(device)
        return replace(self, input_BCXYZ=volume, mask_BXYZ=mask, age_B=self.age_B.to(device), region_B=region_B)


@dataclass(frozen=True, slots=True)
class ScanSet:
    """Scans as a network sees them; see `ermoe.train.loader.Source`. Volumes are read from the cache, never kept.

    Args:
        cache: of prepared volumes.
        scans: whose volumes they are.
        kind: the network's input, see `ermoe.brain.data.settings.InputKind`.
        regions: every scan stands for three volumes, of which each holds one tissue alone: index 3 i + 0, 1, 2 is scan
            i with nothing but its white matter, grey matter, fluid. They are not augmented.
        augmentation: of whole volumes, a function of (seed, epoch, index).
        seed: of the augmentation.
        variants: inputs of each scan that are kept and drawn from; 0 makes and augments them anew every time.
        swapped: wrong names for the tissues, to see whether experts follow them: the tissue to show in place of each.
    """

    cache: VolumeCache
    scans: Sequence[Scan]
    kind: str
    regions: bool = False
    augmentation: VolumeAugmentation | None = None
    seed: int = 0
    variants: int = 0
    swapped: tuple[int, int, int] | None = None

    is_in_memory: ClassVar[bool] = False

    def __len__(self) -> int:
        return len(self.scans) * (len(TISSUES) if self.regions else 1)

    def ages(self) -> Tensor:
        """Of every scan, NaN where there is none."""
        return torch.tensor([_age(scan) for scan in self.scans])

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
        if self.variants:
            kept = Variants(self.cache, self.augmentation, self.kind, self.variants, shown)
            return (*kept.input(scan, seed=self.seed, epoch=epoch, index=index), _age(scan), region)
        drawn = (self.seed, epoch, index)
        return (*_input(self.cache, scan, self.kind, shown, self.augmentation, drawn), _age(scan), region)


def every_scan(volumes: ScanSet, compute: Compute | None = None, *, batch_size: int = 8) -> Loader[VolumeBatch]:
    """Once through all scans, on every process: figures of a few dozen people need them all."""
    compute = Compute() if compute is None else compute
    alone = Compute(Processes(device=compute.device), workers=compute.workers)
    return Loader(volumes, batch_size=batch_size, compute=alone)


def _age(scan: Scan) -> float:
    return float("nan") if scan.age is None else scan.age


def _input(
    cache: VolumeCache,
    scan: Scan,
    kind: str,
    region: int | None,
    augmentation: VolumeAugmentation | None,
    drawn: tuple[int, int, int],
) -> tuple[Tensor, Tensor]:
    """One tissue alone, or the whole brain, augmented as (seed, epoch, index) draw; and its mask."""
    volume = cache.volume(scan, with_tissue=region is not None)
    if region is not None:
        return isolated_input(kind, volume, region)
    t1, mask = voxels(volume)
    if augmentation is not None:
        seed, epoch, index = drawn
        spacing_mm = cache.preprocessing.spacing_mm
        t1, mask = augmentation(t1, mask, seed=seed, epoch=epoch, index=index, spacing_mm=spacing_mm)
    return whole_input(kind, t1, mask)


@dataclass(frozen=True, slots=True)
class Variants:
    """``number`` augmented inputs of each scan, or one plain input, in files beside the prepared volumes.

    With ``region`` the input is that of one tissue alone, which is not augmented; all folds, seeds and methods share
    what is kept, because on a few cores making it costs more than learning.

    Contrast is kept in steps of 1/255, the others in half precision: 2 MB a variant of 96 × 112 × 96 voxels, of blocks
    0.2 MB.
    """

    cache: VolumeCache
    augmentation: VolumeAugmentation | None
    kind: str
    number: int
    region: int | None = None

    def input(self, scan: Scan, *, seed: int, epoch: int, index: int) -> tuple[Tensor, Tensor]:
        """The network's input (C, X, Y, Z) and the mask of the variant that (seed, epoch, index) draw."""
        variant = int(hashed(seed, epoch, index)[0] % np.uint64(1 if self.augmentation is None else self.number))
        path = self._path(scan, variant)
        if not path.is_file():
            self._make(scan, variant, path)
        with np.load(path, allow_pickle=False) as stored:
            values, packed = stored["input"], stored["mask"]
        mask = np.unpackbits(packed, count=values[0].size).reshape(values.shape[1:]).astype(bool)
        volume = torch.from_numpy(values).float()
        return volume / _LEVELS if values.dtype == np.uint8 else volume, torch.from_numpy(mask)

    def _make(self, scan: Scan, variant: int, path: Path) -> None:
        seen, shown = (part.numpy() for part in self._made(scan, variant))
        kept = np.rint(seen * _LEVELS).astype(np.uint8) if self.kind == "contrast" else seen.astype(np.float16)
        with replacing(path) as draft, open(draft, "wb") as file:
            np.savez(file, input=kept, mask=np.packbits(shown))

    def _made(self, scan: Scan, variant: int) -> tuple[Tensor, Tensor]:
        person = int.from_bytes(hashlib.blake2b(scan.key.encode(), digest_size=4).digest(), "big")
        return _input(self.cache, scan, self.kind, self.region, self.augmentation, (0, variant, person))

    def _path(self, scan: Scan, variant: int) -> Path:
        changes = to_json(self.augmentation)
        recipe = {"kind": self.kind, "augmentation": changes, "region": self.region, "version": VERSION}
        name = hashlib.blake2b(json.dumps(recipe, sort_keys=True).encode(), digest_size=6).hexdigest()
        return self.cache.folder / f"variants-{name}" / f"{self.cache.key(scan)}-{variant:02d}.npz"
