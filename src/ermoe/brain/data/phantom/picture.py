"""From tissues to a T1 image: contrast, lesions, and what a scanner adds.

Letters: X, Y, Z voxels of the scan.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from ermoe.brain.data.phantom.anatomy import Anatomy, smooth_field
from ermoe.brain.data.phantom.people import Person, Visit


@dataclass(frozen=True, slots=True)
class _Scanner:
    """What a site does to an image."""

    blur_voxels: float
    noise: float
    """Relative to white matter."""
    scale: float
    """Stored value of white matter."""


_SCANNERS = {"A": _Scanner(0.35, 0.03, 800), "B": _Scanner(0.5, 0.04, 600), "C": _Scanner(0.65, 0.05, 450)}

_BIAS = 0.10
_BIAS_MM = 60.0
_LESION_CONTRAST = 0.30
_LESION_MM = 8.0


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


def brain_mask_of(anatomy: Anatomy) -> NDArray[np.bool_]:
    """Voxels that are mostly brain or CSF."""
    return anatomy.brain() > 0.5


def _lesions(anatomy: Anatomy, volume_ml: float, spacing_mm: float, rng: np.random.Generator) -> NDArray[np.float32]:
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
