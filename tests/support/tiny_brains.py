"""Brains of a few hundred voxels: a ball of white matter in a shell of grey, with ventricles that grow with age."""

from pathlib import Path

import numpy as np

from ermoe.brain.data.preprocess import Preprocessing, Volume
from ermoe.brain.data.scans import Scan

SHAPE = (16, 16, 16)
BRIGHTNESS = (1.0, 0.7, 0.3)  # wm, gm, csf


def person(number, *, age=None, sex=None, site=None, batch=None, session=None):
    """A scan without a file."""
    columns = {} if batch is None else {"batch": batch}
    return Scan(f"sub-{number:02d}", session, Path(f"sub-{number:02d}_T1w.nii.gz"), age, sex, site, columns)


def people(num=20, *, seed=0, low=45.0, high=85.0):
    """Scans of different ages and both sexes."""
    age = np.random.default_rng(seed).uniform(low, high, num)
    return [person(n, age=float(age[n]), sex="MF"[n % 2], site="AB"[n % 2], batch="xy"[n // 2 % 2]) for n in range(num)]


def tissue_maps(age, shape=SHAPE, seed=0):
    """wm, gm, csf (3, X, Y, Z): the ventricle's radius grows by a sixth of the brain's from 40 to 90 years."""
    axes = [np.linspace(-1, 1, size) for size in shape]
    radius = np.sqrt(sum(axis**2 for axis in np.meshgrid(*axes, indexing="ij")))
    radius = radius + np.random.default_rng(seed).normal(0, 0.02, shape)
    inner = 0.25 + 0.3 * (age - 40) / 50
    csf = (radius < inner) | ((radius > 0.82) & (radius < 0.9))
    wm = (radius >= inner) & (radius < 0.66)
    gm = (radius >= 0.66) & (radius <= 0.82)
    return np.stack([wm, gm, csf]).astype(np.float32)


class BallCache:
    """A stand-in for `VolumeCache` that makes the volumes up."""

    def __init__(self, shape=SHAPE, *, mask_source="dseg"):
        self.preprocessing = Preprocessing(spacing_mm=8.0, shape=shape)
        self.mask_source = mask_source

    def volume(self, scan, *, with_tissue=False):
        seed = int(scan.participant_id.removeprefix("sub-"))
        tissue = tissue_maps(scan.age, self.preprocessing.shape, seed)
        mask = tissue.sum(0) > 0
        noise = np.random.default_rng(seed).normal(0, 0.03, mask.shape)
        t1 = sum(value * share for value, share in zip(BRIGHTNESS, tissue, strict=True)) + noise
        t1 = np.where(mask, (t1 - t1[mask].mean()) / t1[mask].std(), 0).astype(np.float32)
        return Volume(t1, mask, tissue if with_tissue else None, self.mask_source, np.eye(4))
