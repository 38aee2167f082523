"""One phantom at one visit: an individual head, its ventricles, its cortex, and the T1 that a scanner makes of them.

All phantoms grow from one atlas, the MNI152 tissue maps of nilearn. It is looked up from the voxels of the scan, by one
map of coordinates: the pose and size of the head, the person's own shape, and ventricles that push white matter aside.
Ventricles themselves are written where they should be, because looking them up across their midline would leave
streaks. Sizes are solved for, so a phantom has the volumes it was given.

Letters: X, Y, Z voxels of the scan or of the atlas, towards right, anterior and superior; x template coordinates in
voxels of the atlas; M = 3 tissues.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage
from scipy.interpolate import make_interp_spline
from scipy.spatial.transform import Rotation

from ermoe.brain.data.nifti import Bool, Double, Float, Grid, Image, sample
from ermoe.brain.data.phantom.people import Person, Visit
from ermoe.brain.data.preprocess import largest_piece
from ermoe.brain.data.scans import Tissue
from ermoe.errors import library

VERSION = 2
"""Raised whenever the same person comes to look different."""
_SPACING_MM = 2.0
_AFFINE = np.array([[2.0, 0, 0, -90], [0, 2, 0, -126], [0, 0, 2, -72], [0, 0, 0, 1]])
"""Voxels to MNI coordinates."""
_SHAPE = (91, 109, 91)
_SHARPNESS = 2.5
_SEED_BOX_MM = ((-45, 45), (-70, 45), (-22, 36))
_SEED_DEPTH_MM = 18.0
_COARSE_MM = 8.0
_SHAPE_FIELD_MM = 30.0  # over which the individual shape varies
_SHAPE_DEVIATION_MM = 2.0
_PUSH_MM = 7.0  # depth of periventricular white matter that gives way to a ventricle
_WALL_MM = 0.6  # softness of the ventricle's wall
_FRONT_MM = 0.0  # the front reaches from the anterior commissure forwards
_FRONT_BORDER_MM = 6.0
_POSE_DEGREES = 3.0
_POSE_MM = 3.0
# Grey matter in % of ICV as tissue tools report it, to what it fills in the atlas, whose maps are more generous.
_GREY_IN_ATLAS = 1.047
_BIAS = 0.10
_BIAS_MM = 120.0  # coils shade slowly
_LESION_CONTRAST = 0.30
_LESION_MM = 8.0


@dataclass(frozen=True, slots=True)
class _Atlas:
    """Maps on the 2 mm grid of MNI152."""

    white_XYZ: Float
    grey_XYZ: Float
    brain_XYZ: Float
    """White, grey and CSF together, in [0, 1]."""
    ventricle_distance_XYZ: Float
    """Signed distance to the lateral ventricles in mm, negative inside."""
    away_3XYZ: Float
    """Unit vectors that lead away from the ventricles."""
    atrophy_XYZ: Float
    """Where cortex gives way to CSF, in [0, 1.25]: along the sulci, more so in front."""
    front_XYZ: Float
    """Whether a place lies in the front of the brain, in [0, 1], with a soft border."""

    @property
    def volume_ml(self) -> float:
        """Of everything inside the skull."""
        return float(self.brain_XYZ.sum()) * _SPACING_MM**3 / 1000


@lru_cache(maxsize=1)
def atlas() -> _Atlas:
    """Builds the atlas, once a process."""
    white, grey, brain = _maps()
    csf = np.clip(brain - grey - white, 0, 1)
    edges_mm = (origin + _SPACING_MM * np.arange(size) for origin, size in zip(_AFFINE[:3, 3], _SHAPE, strict=True))
    x, y, z = np.meshgrid(*edges_mm, indexing="ij")
    deep = ndimage.distance_transform_edt(brain > 0.5) * _SPACING_MM > _SEED_DEPTH_MM
    in_box = deep & (csf > 0.5)
    for axis, (low, high) in zip((x, y, z), _SEED_BOX_MM, strict=True):
        in_box &= (axis > low) & (axis < high)
    seed = largest_piece(in_box)
    distance = ndimage.distance_transform_edt(~seed) - ndimage.distance_transform_edt(seed)
    distance = ndimage.gaussian_filter(distance * _SPACING_MM, 1.0)
    slope = np.stack(np.gradient(distance))
    away = slope / np.maximum(np.linalg.norm(slope, axis=0), 1e-6)
    sulci = ndimage.gaussian_filter(csf * (distance > 6), 1.0)
    reference = np.percentile(sulci[grey > 0.5], 95)
    atrophy = np.clip(sulci / reference, 0, 1) * (1 + 0.25 * np.tanh((y + 10) / 40))
    front = 1 / (1 + np.exp(-(y - _FRONT_MM) / _FRONT_BORDER_MM))
    maps = (np.ascontiguousarray(one, np.float32) for one in (white, grey, brain, distance, away, atrophy, front))
    return _Atlas(*maps)


def _maps() -> tuple[Float, Float, Float]:
    """White matter, grey matter and everything inside the skull, resampled from 1 to 2 mm.

    The template's maps are means of 152 heads, in which hardly a voxel is grey matter alone. In one head most places
    hold one tissue: p^γ / Σ p^γ, so that brightness has the peaks by which real scans are told apart.
    """
    datasets = library("nilearn.datasets", "phantoms are made from nilearn's templates", "brain")
    white = _resampled(datasets.load_mni152_wm_template(resolution=1))
    grey = _resampled(datasets.load_mni152_gm_template(resolution=1))
    brain = _resampled(datasets.load_mni152_template(resolution=1), is_filled=True)
    brain = np.maximum(brain, white + grey)
    share_MXYZ = np.stack([white, grey, np.clip(brain - white - grey, 0, 1)]) ** _SHARPNESS
    share_MXYZ *= brain / np.maximum(share_MXYZ.sum(0), 1e-6)
    return share_MXYZ[0], share_MXYZ[1], brain


def _resampled(template: Any, *, is_filled: bool = False) -> Float:
    """On the atlas' grid; ``is_filled`` for the inside of a stripped template."""
    data = np.asarray(template.get_fdata(dtype=np.float32))
    data = ndimage.binary_fill_holes(data > 0).astype(np.float32) if is_filled else data
    image = Image(data, np.asarray(template.affine, np.float64), Path("MNI152"))
    return np.clip(sample(image, Grid(_SHAPE, _AFFINE), order=1), 0, 1)


def smooth_field(shape: tuple[int, int, int], spacing_mm: float, width_mm: float, rng: np.random.Generator) -> Float:
    """Gaussian noise of mean 0 and deviation 1, smooth over ``width_mm`` (full width at half maximum)."""
    step_mm = min(_COARSE_MM, width_mm / 2)
    sigma = width_mm / 2.355 / step_mm
    rim = int(np.ceil(3 * sigma))
    coarse = tuple(int(np.ceil((size - 1) * spacing_mm / step_mm)) + 2 for size in shape)
    noise = rng.normal(size=tuple(size + 2 * rim for size in coarse)).astype(np.float32)
    field = ndimage.gaussian_filter(noise, sigma)[rim:-rim, rim:-rim, rim:-rim]
    field *= (4 * np.pi * sigma**2) ** 0.75  # the deviation of white noise, which the filter took, given back
    for axis, size in enumerate(shape):
        linear = make_interp_spline(np.arange(field.shape[axis]), field, k=1, axis=axis)
        field = linear(np.arange(size) * spacing_mm / step_mm)
    return np.ascontiguousarray(field, np.float32)


@dataclass(frozen=True, slots=True)
class Anatomy:
    """Shares of tissue in every voxel, with the distance to the ventricles in mm."""

    white_XYZ: Float
    grey_XYZ: Float
    csf_XYZ: Float
    ventricle_distance_XYZ: Float
    affine: Double

    def tissues(self) -> dict[Tissue, Float]:
        """Shares by the name of the tissue."""
        return {"wm": self.white_XYZ, "gm": self.grey_XYZ, "csf": self.csf_XYZ}

    def brain(self) -> Float:
        """Share of anything inside the skull, (X, Y, Z)."""
        return self.white_XYZ + self.grey_XYZ + self.csf_XYZ


def grow(atlas: _Atlas, person: Person, visit: Visit, *, shape: tuple[int, int, int], spacing_mm: float) -> Anatomy:
    """The anatomy of a visit on a scanner's grid of this shape and spacing."""
    pose_rng = np.random.default_rng([*person.seed, 1, int(100 * visit.age)])
    affine = Grid.around(np.zeros(3), spacing_mm, shape).affine
    x = _template_coordinates(atlas, person, affine, shape, pose_rng)
    # The person's own shape is the same at every visit, so it is drawn on the atlas and looked up like the rest.
    shape_rng = np.random.default_rng([*person.seed, 2])
    for axis in range(3):
        field = smooth_field(atlas.brain_XYZ.shape, _SPACING_MM, _SHAPE_FIELD_MM, shape_rng)
        x[axis] += _looked_up(field, x) * (_SHAPE_DEVIATION_MM / _SPACING_MM)
    distance = _looked_up(atlas.ventricle_distance_XYZ, x, outside=100.0)
    brain_ml = float(_looked_up(atlas.brain_XYZ, x).sum()) * spacing_mm**3 / 1000
    grown_mm = _ventricle_growth(distance, visit.ventricle_percent / 100 * brain_ml, spacing_mm)
    ventricle = _ventricle(distance, grown_mm)
    pushed = grown_mm * np.exp(-np.maximum(distance - grown_mm, 0) / _PUSH_MM) / _SPACING_MM
    near = pushed > 1e-3 if grown_mm > 0 else pushed < -1e-3
    away = np.stack([_looked_up(component, x[:, near]) for component in atlas.away_3XYZ])
    x[:, near] -= pushed[near] * away
    white, grey, brain = (_looked_up(part, x) for part in (atlas.white_XYZ, atlas.grey_XYZ, atlas.brain_XYZ))
    white, grey = white * (1 - ventricle), grey * (1 - ventricle)
    csf = np.maximum(brain - white - grey, 0)
    target_ml = _GREY_IN_ATLAS * visit.grey_percent / 100 * brain_ml
    atrophy = _looked_up(atlas.atrophy_XYZ, x)
    grey, csf = _thinned(grey, csf, atrophy, target_ml, spacing_mm)
    if visit.frontal_percent:
        front, voxel_ml = _looked_up(atlas.front_XYZ, x), spacing_mm**3 / 1000
        lost_ml, before_ml = visit.frontal_percent / 100 * brain_ml, float(grey.sum()) * voxel_ml
        grey, csf = _thinned(grey, csf, atrophy * front, before_ml - lost_ml, spacing_mm)
        grey, csf = _thinned(grey, csf, atrophy * (1 - front), before_ml, spacing_mm)
    return Anatomy(white, grey, csf, distance - grown_mm, affine)


def _template_coordinates(
    atlas: _Atlas, person: Person, affine: Double, shape: tuple[int, int, int], rng: np.random.Generator
) -> Float:
    """Where in the atlas each voxel of the scan looks, (3, X, Y, Z): size, turn and shift of the head undone."""
    size = (person.icv_ml / atlas.volume_ml) ** (1 / 3)
    head = np.eye(4)
    head[:3, :3] = size * Rotation.from_rotvec(np.radians(rng.normal(0, _POSE_DEGREES, 3))).as_matrix()
    middle = _AFFINE[:3, :3] @ ndimage.center_of_mass(atlas.brain_XYZ) + _AFFINE[:3, 3]
    head[:3, 3] = rng.normal(0, _POSE_MM, 3) - head[:3, :3] @ middle
    lookup = (np.linalg.inv(head @ _AFFINE) @ affine).astype(np.float32)
    return np.tensordot(lookup[:3, :3], np.indices(shape, np.float32), 1) + lookup[:3, 3, None, None, None]


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


@dataclass(frozen=True, slots=True)
class _Scanner:
    """What a site does to an image."""

    blur_voxels: float
    noise: float
    """Relative to white matter."""
    scale: float
    """Stored value of white matter."""


_SCANNERS = {"A": _Scanner(0.35, 0.03, 800), "B": _Scanner(0.5, 0.04, 600), "C": _Scanner(0.65, 0.05, 450)}


def scan_image(anatomy: Anatomy, person: Person, visit: Visit, *, spacing_mm: float) -> NDArray[np.int16]:
    """The T1 as it is stored, skull-stripped, (X, Y, Z)."""
    rng = np.random.default_rng([*person.seed, 3, int(100 * visit.age)])
    scanner = _SCANNERS[person.site]
    lesion = _lesions(anatomy, visit.lesion_ml, spacing_mm, np.random.default_rng([*person.seed, 4]))
    signal = (
        anatomy.white_XYZ * (1 - _LESION_CONTRAST * lesion)
        + anatomy.grey_XYZ * visit.grey_intensity
        + anatomy.csf_XYZ * visit.csf_intensity
    )
    signal *= np.exp(_BIAS * smooth_field(signal.shape, spacing_mm, _BIAS_MM, rng))
    signal = ndimage.gaussian_filter(signal, scanner.blur_voxels)
    # Magnitude of a complex signal with Gaussian noise in both parts: Rician.
    noise = scanner.noise * rng.standard_normal((2, *signal.shape), dtype=np.float32)
    signal = np.hypot(signal + noise[0], noise[1])
    return np.rint(scanner.scale * signal * brain_mask_of(anatomy)).astype(np.int16)


def brain_mask_of(anatomy: Anatomy) -> Bool:
    """Voxels that are mostly brain or CSF."""
    return anatomy.brain() > 0.5


def _lesions(anatomy: Anatomy, volume_ml: float, spacing_mm: float, rng: np.random.Generator) -> Float:
    """White-matter lesions of this volume, in patches, near the ventricles first."""
    patches = smooth_field(anatomy.white_XYZ.shape, spacing_mm, _LESION_MM, rng)
    white = np.flatnonzero(anatomy.white_XYZ > 0.8)
    number = min(round(volume_ml * 1000 / spacing_mm**3), white.size - 1)
    if number < 1:
        return np.zeros_like(patches)
    proneness = patches.ravel()[white] - anatomy.ventricle_distance_XYZ.ravel()[white] / 12
    chosen = white[np.argpartition(-proneness, number)[:number]]
    lesion = np.zeros(patches.size, np.float32)
    lesion[chosen] = 1
    return ndimage.gaussian_filter(lesion.reshape(patches.shape), 0.7)
