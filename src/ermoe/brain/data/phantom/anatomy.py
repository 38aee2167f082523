"""The tissues of one phantom at one visit: an individual head, its ventricles, its cortex.

Everything is looked up in the atlas from the voxels of the scan, by one map of coordinates: the pose and size of the
head, the person's own shape, and ventricles that push white matter aside. Ventricles themselves are written where they
should be, because looking them up across their midline would leave streaks. Sizes are solved for, so a phantom has the
volumes it was given.

Letters: X, Y, Z voxels of the scan; x template coordinates in voxels of the atlas.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from ermoe.brain.data.phantom.atlas import SPACING_MM, Atlas
from ermoe.brain.data.phantom.people import Person, Visit

_COARSE_MM = 8.0


def smooth_field(
    shape: tuple[int, int, int], spacing_mm: float, width_mm: float, rng: np.random.Generator
) -> NDArray[np.float32]:
    """Gaussian noise of mean 0 and deviation 1, smooth over ``width_mm`` (full width at half maximum)."""
    step_mm = min(_COARSE_MM, width_mm / 2)
    sigma = width_mm / 2.355 / step_mm
    rim = int(np.ceil(3 * sigma))
    coarse = tuple(int(np.ceil((size - 1) * spacing_mm / step_mm)) + 2 for size in shape)
    noise = rng.normal(size=tuple(size + 2 * rim for size in coarse)).astype(np.float32)
    field = ndimage.gaussian_filter(noise, sigma)[rim:-rim, rim:-rim, rim:-rim] * _restored(sigma)
    return _upsampled(field, shape, spacing_mm / step_mm)


def _restored(sigma: float) -> float:
    """What a Gaussian filter takes from the deviation of white noise, given back; in 3-D it is (4πσ²)^¾."""
    return float((4 * np.pi * sigma**2) ** 0.75)


def _upsampled(field: NDArray[np.float32], shape: tuple[int, int, int], ratio: float) -> NDArray[np.float32]:
    """Linear interpolation, axis by axis: as matrix products, far faster than looking up every voxel."""
    for axis, size in enumerate(shape):
        field = np.moveaxis(np.tensordot(_linear(size, field.shape[axis], ratio), field, (1, axis)), 0, axis)
    return np.ascontiguousarray(field, np.float32)


def _linear(fine: int, coarse: int, ratio: float) -> NDArray[np.float32]:
    """Weights (fine, coarse) of linear interpolation."""
    place = np.arange(fine) * ratio
    lower = np.minimum(place.astype(int), coarse - 2)
    weights = np.zeros((fine, coarse), np.float32)
    weights[np.arange(fine), lower] = 1 - (place - lower)
    weights[np.arange(fine), lower + 1] = place - lower
    return weights


Float = NDArray[np.float32]

_SHAPE_FIELD_MM = 30.0  # over which the individual shape varies
_SHAPE_DEVIATION_MM = 2.0
_PUSH_MM = 7.0  # depth of periventricular white matter that gives way to a ventricle
_WALL_MM = 0.6  # softness of the ventricle's wall
_POSE_DEGREES = 3.0
_POSE_MM = 3.0
# Grey matter in % of ICV as tissue tools report it, to what it fills in the atlas, whose maps are more generous.
_GREY_IN_ATLAS = 1.047


@dataclass(frozen=True, slots=True)
class Anatomy:
    """Shares of tissue in every voxel, with the distance to the ventricles in mm."""

    white_XYZ: Float
    grey_XYZ: Float
    csf_XYZ: Float
    ventricle_distance_XYZ: Float
    affine: NDArray[np.float64]

    def brain(self) -> Float:
        """Share of anything inside the skull, (X, Y, Z)."""
        return self.white_XYZ + self.grey_XYZ + self.csf_XYZ


def grow(atlas: Atlas, person: Person, visit: Visit, *, shape: tuple[int, int, int], spacing_mm: float) -> Anatomy:
    """The anatomy of a visit on a scanner's grid of this shape and spacing."""
    pose_rng = np.random.default_rng([*person.seed, 1, int(100 * visit.age)])
    affine = _scanner_affine(shape, spacing_mm)
    x = _template_coordinates(atlas, person, affine, shape, pose_rng)
    # The person's own shape is the same at every visit, so it is drawn on the atlas and looked up like the rest.
    shape_rng = np.random.default_rng([*person.seed, 2])
    for axis in range(3):
        field = smooth_field(atlas.brain_XYZ.shape, SPACING_MM, _SHAPE_FIELD_MM, shape_rng)
        x[axis] += _looked_up(field, x) * (_SHAPE_DEVIATION_MM / SPACING_MM)
    distance = _looked_up(atlas.ventricle_distance_XYZ, x, outside=100.0)
    brain_ml = float(_looked_up(atlas.brain_XYZ, x).sum()) * spacing_mm**3 / 1000
    grown_mm = _ventricle_growth(distance, visit.ventricle_percent / 100 * brain_ml, spacing_mm)
    ventricle = _ventricle(distance, grown_mm)
    pushed = grown_mm * np.exp(-np.maximum(distance - grown_mm, 0) / _PUSH_MM) / SPACING_MM
    near = pushed > 1e-3 if grown_mm > 0 else pushed < -1e-3
    away = np.stack([_looked_up(component, x[:, near]) for component in atlas.away_3XYZ])
    x[:, near] -= pushed[near] * away
    white, grey, brain = (_looked_up(part, x) for part in (atlas.white_XYZ, atlas.grey_XYZ, atlas.brain_XYZ))
    white, grey = white * (1 - ventricle), grey * (1 - ventricle)
    csf = np.maximum(brain - white - grey, 0)
    target_ml = _GREY_IN_ATLAS * visit.grey_percent / 100 * brain_ml
    grey, csf = _thinned(grey, csf, _looked_up(atlas.atrophy_XYZ, x), target_ml, spacing_mm)
    return Anatomy(white, grey, csf, distance - grown_mm, affine)


def _scanner_affine(shape: tuple[int, int, int], spacing_mm: float) -> NDArray[np.float64]:
    """World axes, the middle of the grid at the origin."""
    affine = np.diag([spacing_mm] * 3 + [1.0])
    affine[:3, 3] = -spacing_mm * (np.array(shape) - 1) / 2
    return affine


def _template_coordinates(
    atlas: Atlas, person: Person, affine: NDArray[np.float64], shape: tuple[int, int, int], rng: np.random.Generator
) -> Float:
    """Where in the atlas each voxel of the scan looks, (3, X, Y, Z): size, turn and shift of the head undone."""
    size = (person.icv_ml / atlas.volume_ml) ** (1 / 3)
    head = np.eye(4)
    head[:3, :3] = size * _rotation(np.radians(rng.normal(0, _POSE_DEGREES, 3)))
    middle = atlas.affine[:3, :3] @ ndimage.center_of_mass(atlas.brain_XYZ) + atlas.affine[:3, 3]
    head[:3, 3] = rng.normal(0, _POSE_MM, 3) - head[:3, :3] @ middle
    lookup = np.linalg.inv(head @ atlas.affine) @ affine
    i, j, k = (np.arange(count, dtype=np.float32) for count in shape)
    columns = lookup.astype(np.float32)
    return np.stack(
        [
            (columns[axis, 0] * i)[:, None, None]
            + (columns[axis, 1] * j)[None, :, None]
            + (columns[axis, 2] * k + columns[axis, 3])[None, None, :]
            for axis in range(3)
        ]
    )


def _rotation(angles: NDArray[np.float64]) -> NDArray[np.float64]:
    from scipy.spatial.transform import Rotation

    return Rotation.from_rotvec(angles).as_matrix()


def _looked_up(field: Float, x: Float, *, outside: float = 0.0) -> Float:
    return ndimage.map_coordinates(field, x, order=1, mode="constant", cval=outside, output=np.float32)


def _ventricle(distance: Float, grown_mm: float) -> Float:
    """Share of ventricle in every voxel: a wall at ``grown_mm`` from where the atlas has it."""
    return 1 / (1 + np.exp(np.clip((distance - grown_mm) / _WALL_MM, -30, 30)))


def _ventricle_growth(distance: Float, target_ml: float, spacing_mm: float) -> float:
    """How far the wall moves outwards for the ventricles to have this volume; by bisection."""
    near = distance[distance < 25]
    low, high = -4.0, 20.0
    for _ in range(20):
        middle = (low + high) / 2
        volume_ml = float(_ventricle(near, middle).sum()) * spacing_mm**3 / 1000
        low, high = (middle, high) if volume_ml < target_ml else (low, middle)
    return (low + high) / 2


def _thinned(grey: Float, csf: Float, atrophy: Float, target_ml: float, spacing_mm: float) -> tuple[Float, Float]:
    """Grey matter turned into CSF along the sulci, or the other way round, until its volume is ``target_ml``."""
    voxel_ml = spacing_mm**3 / 1000
    surplus_ml = float(grey.sum()) * voxel_ml - target_ml
    source = grey if surplus_ml > 0 else csf
    movable = atrophy * source
    share = min(abs(surplus_ml) / max(float(movable.sum()) * voxel_ml, 1e-6), 0.8)
    moved = np.copysign(share * movable, surplus_ml)
    return grey - moved, csf + moved
