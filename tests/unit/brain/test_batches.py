"""Batches: order, isolation and kept variants beside what they stand for."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from ermoe.brain.batches import ScanSet, every_scan
from ermoe.brain.inputs import network_input
from ermoe.brain.recipes import VolumeAugmentation
from ermoe.data.order import Order
from ermoe.train.compute import Compute
from ermoe.train.loader import Loader
from support.tiny_brains import BallCache, people

AUGMENTATION = VolumeAugmentation(shift_mm=2.0)


class KeptBalls(BallCache):
    """With what kept inputs ask of a cache."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder, self.asked = folder, 0

    def key(self, scan):
        return scan.key

    def volume(self, scan, *, with_tissue=False):
        self.asked += 1
        return super().volume(scan, with_tissue=with_tissue)


def test_a_batch_is_the_network_input_of_its_scans():
    volumes = ScanSet(BallCache(), people(3), "blocks")
    batch = volumes.read(np.array([2, 0]))
    volume = BallCache().volume(volumes.scans[2])
    seen, mask = network_input("blocks", *(torch.from_numpy(part) for part in (volume.t1_XYZ, volume.mask_XYZ)))
    torch.testing.assert_close(batch.input_BCXYZ[0], seen)
    assert torch.equal(batch.mask_BXYZ[0], mask)
    assert batch.age_B.tolist() == pytest.approx([volumes.scans[2].age, volumes.scans[0].age])


@pytest.mark.parametrize(("kind", "tolerance"), [("contrast", 1 / 500), ("blocks", 2e-3), ("t1", 4e-3)])
def test_kept_variants_are_augmented_inputs(kind, tolerance, tmp_path):
    pytest.importorskip("monai")
    cache = KeptBalls(tmp_path)
    kept = ScanSet(cache, people(1), kind, augmentation=AUGMENTATION, variants=3)
    first = np.array([0])
    found = [kept.read(first, epoch).input_BCXYZ for epoch in range(12)]
    assert cache.asked == len(list(tmp_path.rglob("*.npz"))) <= 3
    different = {tuple(seen.flatten()[:: max(1, seen.numel() // 50)].tolist()) for seen in found}
    assert 2 <= len(different) <= 3
    assert torch.equal(kept.read(first).input_BCXYZ, found[0])
    plain = ScanSet(cache, people(1), kind).read(first).input_BCXYZ
    assert found[0].shape == plain.shape
    nothing = VolumeAugmentation(probability=0.0, noise=0.0, bias_field=0.0, gamma=0.0)
    still = replace(kept, augmentation=nothing, variants=1).read(first).input_BCXYZ
    torch.testing.assert_close(still, plain, atol=tolerance, rtol=2e-3)


@pytest.mark.parametrize(("kind", "tolerance"), [("blocks", 2e-3), ("t1", 4e-3)])
@pytest.mark.parametrize("swapped", [None, (1, 2, 0)])
def test_kept_tissues_are_those_made_anew(kind, tolerance, swapped, tmp_path):
    anew = ScanSet(KeptBalls(tmp_path), people(2), kind, regions=True, swapped=swapped)
    kept = replace(anew, variants=4)
    every = np.arange(len(anew))
    for _ in range(2):  # written, then read
        found, wanted = kept.read(every), anew.read(every)
        torch.testing.assert_close(found.input_BCXYZ, wanted.input_BCXYZ, atol=tolerance, rtol=2e-3)
        assert torch.equal(found.mask_BXYZ, wanted.mask_BXYZ)
        assert torch.equal(found.region_B, wanted.region_B)
    assert len(list(tmp_path.rglob("*.npz"))) == len(anew)


def test_small_sets_go_round_and_resume_at_any_step():
    volumes = ScanSet(BallCache(), people(3), "t1")
    loader = Loader(volumes, Order(12, 4, seed=1), num_parts=2)
    whole = [[part.age_B.tolist() for part in parts] for parts in loader.epoch(5)]
    assert [len(parts) for parts in whole] == [2, 2, 2]
    assert [[part.age_B.tolist() for part in parts] for parts in loader.epoch(5, first_step=2)] == whole[2:]
    seen = sorted(age for parts in whole for part in parts for age in part)
    assert seen == pytest.approx(sorted(4 * [scan.age for scan in volumes.scans]), abs=1e-4)


def test_workers_read_the_same():
    volumes = ScanSet(BallCache(), people(4), "t1")
    loaders = (every_scan(volumes, Compute(workers=workers), batch_size=2) for workers in (0, 1))
    alone, helped = ([batch.input_BCXYZ for (batch,) in loader.epoch()] for loader in loaders)
    assert all(torch.equal(a, b) for a, b in zip(alone, helped, strict=True))
