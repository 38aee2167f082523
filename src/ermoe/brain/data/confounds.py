"""Whether something else than the brain predicts age: what a scan tells of its scanner and its file.

Each suspect alone, and everybody predicted from all others.

Letters: N scans, P permutations, F columns of a design, X, Y, Z voxels of the T1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from ermoe.brain.data.nifti import Image

Float = NDArray[np.float64]

_PERMUTATIONS = 999
_CERTAIN = 0.01
_WORTH_SAYING = 0.05
_FEWEST = 10


@dataclass(frozen=True, slots=True)
class Confound:
    """How well one thing alone predicts age."""

    name: str
    mae: float | None
    """Mean absolute error in years, leaving one out; None if the thing is the same for everybody."""
    mae_of_mean: float
    """Of predicting the mean of all others."""
    p_value: float
    """Share of shuffled ages for which it does as well."""

    @property
    def predicts_age(self) -> bool:
        """Better than the mean by a twentieth, and not by chance."""
        return self.mae is not None and self.mae < (1 - _WORTH_SAYING) * self.mae_of_mean and self.p_value < _CERTAIN


def confounds(
    age_N: Float, numbers: Mapping[str, Sequence[float]], labels: Mapping[str, Sequence[str | None]], *, seed: int = 0
) -> list[Confound]:
    """One row for every suspect; none if there are too few scans to tell."""
    if len(age_N) < _FEWEST:
        return []
    designs = {name: _line(np.asarray(values, float)) for name, values in numbers.items()}
    designs |= {name: _groups(values) for name, values in labels.items()}
    rng = np.random.default_rng(seed)
    shuffled_NP = np.stack([rng.permutation(age_N) for _ in range(_PERMUTATIONS)], axis=1)
    mean = float(np.abs(left_out_errors(_nothing(len(age_N)), age_N[:, None])).mean())
    return [_row(name, design_NF, age_N, shuffled_NP, mean) for name, design_NF in designs.items()]


def _row(name: str, design_NF: Float | None, age_N: Float, shuffled_NP: Float, mean: float) -> Confound:
    if design_NF is None:
        return Confound(name, None, mean, 1.0)
    mae = float(np.abs(left_out_errors(design_NF, age_N[:, None])).mean())
    chance_P = np.abs(left_out_errors(design_NF, shuffled_NP)).mean(axis=0)
    return Confound(name, mae, mean, float((1 + (chance_P <= mae).sum()) / (1 + len(chance_P))))


def left_out_errors(design_NF: Float, age_NP: Float) -> Float:
    """Errors of least squares when each row is predicted from all others, without fitting N times.

    With the hat matrix H, leaving row i out changes its residual from e_i to e_i / (1 − H_ii). Where H_ii = 1, as for
    the only member of a group, the others say nothing about it: their mean is the prediction.
    """
    number = len(design_NF)
    basis_NF, _ = np.linalg.qr(design_NF)
    leverage_N = (basis_NF**2).sum(axis=1)
    residual_NP = age_NP - basis_NF @ (basis_NF.T @ age_NP)
    alone_N = leverage_N > 1 - 1e-9
    errors_NP = residual_NP / np.where(alone_N, 1.0, 1 - leverage_N)[:, None]
    errors_NP[alone_N] = (age_NP - age_NP.mean(axis=0))[alone_N] * number / (number - 1)
    return errors_NP


def _nothing(number: int) -> Float:
    return np.ones((number, 1))


def _line(values_N: Float) -> Float | None:
    """Columns 1 and the standardised values; None if they hardly differ."""
    spread = values_N.std()
    if not np.isfinite(spread) or spread <= 1e-6 * max(1.0, float(np.abs(values_N).mean())):
        return None
    return np.column_stack([np.ones(len(values_N)), (values_N - values_N.mean()) / spread])


def _groups(labels: Sequence[str | None]) -> Float | None:
    """One column a group; None if there is one group, or hardly two people in any."""
    known = sorted({str(label) for label in labels})
    if len(known) < 2 or len(known) > len(labels) // 2:
        return None
    return np.array([[str(label) == group for group in known] for label in labels], float)


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Numbers that should not know an age."""

    intensity_scale: float
    """log₁₀ of the median intensity of the brain."""
    voxel_mm: float
    """Geometric mean of the edges of a voxel."""
    field_of_view_mm: float
    """Geometric mean of the edges of the volume."""
    noise: float
    """Relative to the median intensity of the brain."""


def fingerprint(t1: Image, mask_XYZ: NDArray[np.bool_]) -> Fingerprint:
    """Of a T1 and its brain."""
    level = max(float(np.median(np.abs(t1.data_XYZ[mask_XYZ]))), 1e-12)
    spacing = t1.spacing_mm
    return Fingerprint(
        intensity_scale=float(np.log10(level)),
        voxel_mm=float(np.exp(np.log(spacing).mean())),
        field_of_view_mm=float(np.exp(np.log(spacing * t1.data_XYZ.shape).mean())),
        noise=_noise(t1.data_XYZ, mask_XYZ) / level,
    )


def _noise(data_XYZ: NDArray[np.float32], mask_XYZ: NDArray[np.bool_]) -> float:
    """Deviation of a voxel from the mean of its six neighbours, in the brightest third: white matter, far from edges.

    For independent noise of deviation σ that difference has σ √(1 + 1/6); a median is not moved by the edges left.
    """
    bright = mask_XYZ & (data_XYZ > np.percentile(data_XYZ[mask_XYZ], 66))
    inside = ndimage.binary_erosion(bright)
    inside = inside if inside.any() else bright
    neighbours = ndimage.convolve(data_XYZ, _SIX / 6)
    difference = (data_XYZ - neighbours)[inside]
    return float(1.4826 * np.median(np.abs(difference)) / np.sqrt(7 / 6)) if difference.size else 0.0


_SIX = ndimage.generate_binary_structure(3, 1).astype(np.float32)
_SIX[1, 1, 1] = 0
