"""Batches of prepared volumes, in an order and with augmentations that are functions of (seed, epoch, position).

Letters: B volumes, C channels of the network's input, X, Y, Z voxels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ermoe.brain.data.augment import VolumeAugmentation
from ermoe.brain.data.cache import VolumeCache
from ermoe.brain.data.scans import TISSUES, Scan
from ermoe.brain.inputs import isolated_input, voxels, whole_input
from ermoe.brain.variants import Variants
from ermoe.data.ahead import Request, prepared
from ermoe.data.order import Indices, Order, evaluation_batches, share


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
    """Scans as a network sees them. Volumes are read from the cache when they are asked for, never kept.

    ``kind`` is the network's input, "t1" or "contrast". With ``regions`` every scan stands for three volumes, of which
    each holds one tissue alone: index 3 i + 0, 1, 2 is scan i with nothing but its white matter, grey matter, fluid.
    """

    cache: VolumeCache
    scans: Sequence[Scan]
    kind: str
    regions: bool = False
    variants: int = 0
    """Inputs of each scan that are kept and drawn from; 0 makes and augments them anew every time."""
    swapped: tuple[int, int, int] | None = None
    """Wrong names for the tissues, to see whether experts follow them: the tissue to show in place of each."""

    def __len__(self) -> int:
        return len(self.scans) * (len(TISSUES) if self.regions else 1)

    def ages(self) -> Tensor:
        """Of every scan, NaN where there is none."""
        return torch.tensor([float("nan") if scan.age is None else scan.age for scan in self.scans])

    def batch(
        self, index_B: Indices, augmentation: VolumeAugmentation | None = None, *, seed: int = 0, epoch: int = 0
    ) -> VolumeBatch:
        """The volumes at some indices; indices beyond the number of volumes go round again, augmented differently."""
        parts = [self._item(int(index), augmentation, seed, epoch) for index in index_B]
        input_BCXYZ, mask_BXYZ = torch.stack([part[0] for part in parts]), torch.stack([part[1] for part in parts])
        age_B = torch.tensor([part[2] for part in parts])
        region_B = torch.tensor([part[3] for part in parts]) if self.regions else None
        return VolumeBatch(input_BCXYZ, mask_BXYZ, age_B, region_B)

    def _item(
        self, index: int, augmentation: VolumeAugmentation | None, seed: int, epoch: int
    ) -> tuple[Tensor, Tensor, float, int]:
        which = index % len(self)
        number, region = divmod(which, len(TISSUES)) if self.regions else (which, 0)
        scan = self.scans[number]
        age = float("nan") if scan.age is None else scan.age
        shown = None if not self.regions else region if self.swapped is None else self.swapped[region]
        if self.variants:
            number = 1 if augmentation is None else self.variants
            kept = Variants(self.cache, augmentation, self.kind, number, shown)
            return (*kept.input(scan, seed=seed, epoch=epoch, index=index), age, region)
        volume = self.cache.volume(scan, with_tissue=self.regions)
        if shown is not None:
            return (*isolated_input(self.kind, volume, shown), age, region)
        t1, mask = voxels(volume)
        if augmentation is not None:
            spacing_mm = self.cache.preprocessing.spacing_mm
            t1, mask = augmentation(t1, mask, seed=seed, epoch=epoch, index=index, spacing_mm=spacing_mm)
        return (*whole_input(self.kind, t1, mask), age, 0)


@dataclass(frozen=True, slots=True)
class VolumeLoader:
    """The batches of one process: of a training set in an ``order``, or once through the set for evaluation."""

    volumes: ScanSet
    augmentation: VolumeAugmentation | None = None
    order: Order | None = None
    batch_size: int = 8
    seed: int = 0
    rank: int = 0
    num_processes: int = 1
    num_parts: int = 1
    workers: int = 0
    device: torch.device | str = "cpu"

    def epoch(self, epoch: int = 0, *, first_step: int = 0) -> Iterator[list[VolumeBatch]]:
        """For every step from ``first_step`` on, the parts to accumulate; an evaluation has one part a step."""
        num_parts = self.num_parts if self.order is not None else 1
        parts: list[VolumeBatch] = []
        requests = [(epoch, index_B) for index_B in self._requests(epoch, first_step)]
        for batch in prepared(self._prepare, requests, workers=self.workers):
            parts.append(batch.to(self.device))
            if len(parts) == num_parts:
                yield parts
                parts = []

    def _requests(self, epoch: int, first_step: int) -> Iterator[Indices]:
        if self.order is None:
            yield from evaluation_batches(len(self.volumes), self.batch_size)
            return
        for batch_B in self.order.batches(epoch, first_step=first_step):
            own_B = share(batch_B, rank=self.rank, num_processes=self.num_processes)
            for part in range(self.num_parts):
                yield share(own_B, rank=part, num_processes=self.num_parts)

    def _prepare(self, request: Request) -> VolumeBatch:
        epoch, index_B = request
        return self.volumes.batch(index_B, self.augmentation, seed=self.seed, epoch=epoch)
