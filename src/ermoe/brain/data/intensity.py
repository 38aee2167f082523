"""Intensities of T1 scans have no unit: each scan is brought to its own brain's scale.

Letters: X, Y, Z voxels.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

Normalisation = Literal["zscore", "mean", "percentile"]

_LOW, _HIGH = 0.5, 99.5


def normalise(
    t1_XYZ: NDArray[np.float32], mask_XYZ: NDArray[np.bool_], how: Normalisation = "zscore"
) -> NDArray[np.float32]:
    """0 outside the mask; inside it, free of the scale the scan was stored with.

    "zscore": mean 0 and deviation 1 over the brain. "mean": divided by the brain's mean, as SFCN expects.
    "percentile": the 0.5th to the 99.5th percentile become 0 to 1, and what is beyond is cut.

    >>> brain = np.array([1.0, 3.0, 100.0], "f4"), np.array([True, True, False])
    >>> normalise(*brain).tolist(), normalise(*brain, "mean").tolist()
    ([-1.0, 1.0, 0.0], [0.5, 1.5, 0.0])
    """
    inside = t1_XYZ[mask_XYZ].astype(np.float64)
    if inside.size == 0 or inside.min() == inside.max():
        raise ValueError("shows one and the same intensity all over the brain")
    if how == "zscore":
        inside = (inside - inside.mean()) / inside.std()
    elif how == "mean":
        if inside.mean() <= 0:
            raise ValueError("has a mean intensity of 0 or less inside the brain")
        inside = inside / inside.mean()
    else:
        low, high = np.percentile(inside, [_LOW, _HIGH])
        if low == high:
            raise ValueError("shows one and the same intensity in nearly all of the brain")
        inside = np.clip((inside - low) / (high - low), 0, 1)
    normal = np.zeros(t1_XYZ.shape, np.float32)
    normal[mask_XYZ] = inside
    return normal
