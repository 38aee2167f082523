"""Scans that are no T1 of an adult's whole, upright brain, made from one that is."""

from dataclasses import replace
from functools import partial

import numpy as np
from scipy import ndimage

from ermoe.brain.data.preprocess import normalise

_BOX_MM = ((28, 164), (40, 184), (36, 156))


def shown(volume, t1):
    return replace(volume, t1_XYZ=normalise(np.asarray(t1, dtype=np.float32), volume.mask_XYZ))


def negative(volume, spacing_mm):
    return shown(volume, -volume.t1_XYZ)


def fluid_bright(volume, spacing_mm):
    return shown(volume, np.exp(-volume.t1_XYZ))


def functional(volume, spacing_mm):
    return shown(volume, -ndimage.gaussian_filter(volume.t1_XYZ, 4 / spacing_mm))


def shrunk(volume, spacing_mm):
    t1, mask = (ndimage.zoom(part.astype("f4"), 0.68, order=1) for part in (volume.t1_XYZ, volume.mask_XYZ))
    return replace(volume, t1_XYZ=t1, mask_XYZ=mask > 0.5)


def turned(volume, spacing_mm, *, y, z):
    return replace(volume, t1_XYZ=volume.t1_XYZ[:, ::y, ::z].copy(), mask_XYZ=volume.mask_XYZ[:, ::y, ::z].copy())


def without(volume, spacing_mm, *, axis, first):
    mask = volume.mask_XYZ.copy()
    middle = round(ndimage.center_of_mass(mask)[axis])
    np.moveaxis(mask, axis, 0)[slice(0, middle) if first else slice(middle, None)] = False
    return replace(volume, t1_XYZ=volume.t1_XYZ * mask, mask_XYZ=mask)


def noise(volume, spacing_mm):
    return shown(volume, np.random.default_rng(0).normal(size=volume.t1_XYZ.shape))


def ct(volume, spacing_mm):
    near_bone = ndimage.distance_transform_edt(volume.mask_XYZ, sampling=spacing_mm) < 8
    return shown(volume, np.random.default_rng(0).normal(35, 4, volume.t1_XYZ.shape) + 20 * near_bone)


def box(volume, spacing_mm):
    mask = np.zeros_like(volume.mask_XYZ)
    mask[tuple(slice(round(low / spacing_mm), round(high / spacing_mm)) for low, high in _BOX_MM)] = True
    blobs = ndimage.gaussian_filter(np.random.default_rng(0).normal(size=mask.shape), 8 / spacing_mm)
    return shown(replace(volume, mask_XYZ=mask), blobs)


ODD = {
    "negative": negative,
    "fluid bright, as in PD and T2": fluid_bright,
    "mean of a functional series": functional,
    "newborn's size": shrunk,
    "upside down": partial(turned, y=1, z=-1),
    "lying the other way": partial(turned, y=-1, z=-1),
    "back to front": partial(turned, y=-1, z=1),
    "noise": noise,
    "left half": partial(without, axis=0, first=False),
    "no front": partial(without, axis=1, first=False),
    "top only": partial(without, axis=2, first=True),
    "CT": ct,
    "another organ's box": box,
}
"""What is done to a prepared volume, by its name: called with the volume and the edge of its voxels in mm."""
