"""Inputs that are made once and kept, because on a few cores making them costs more than learning.

Every scan has a fixed number of variants, of which epochs draw one. All folds, seeds and methods share them.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ermoe.brain.contrast import VERSION
from ermoe.brain.data.augment import VolumeAugmentation
from ermoe.brain.data.cache import VolumeCache
from ermoe.brain.data.scans import Scan
from ermoe.brain.inputs import isolated_input, voxels, whole_input
from ermoe.data.randomness import hashed
from ermoe.files import replacing

_LEVELS = 255


@dataclass(frozen=True, slots=True)
class Variants:
    """``number`` augmented inputs of each scan, or one plain input, in files beside the prepared volumes.

    With ``region`` the input is that of one tissue alone, which is not augmented.

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
        variant = int(hashed(seed, epoch, index)[0] % np.uint64(self.number))
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
        volume = self.cache.volume(scan, with_tissue=self.region is not None)
        if self.region is not None:
            return isolated_input(self.kind, volume, self.region)
        t1, mask = voxels(volume)
        person = int.from_bytes(hashlib.blake2b(scan.key.encode(), digest_size=4).digest(), "big")
        spacing_mm = self.cache.preprocessing.spacing_mm
        if self.augmentation is not None:
            t1, mask = self.augmentation(t1, mask, seed=0, epoch=variant, index=person, spacing_mm=spacing_mm)
        return whole_input(self.kind, t1, mask)

    def _path(self, scan: Scan, variant: int) -> Path:
        changes = None if self.augmentation is None else asdict(self.augmentation)
        recipe = {"kind": self.kind, "augmentation": changes, "region": self.region, "version": VERSION}
        name = hashlib.blake2b(json.dumps(recipe, sort_keys=True).encode(), digest_size=6).hexdigest()
        return self.cache.folder / f"variants-{name}" / f"{self.cache.key(scan)}-{variant:02d}.npz"
