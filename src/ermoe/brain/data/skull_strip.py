"""Brain masks by deepbet, a small network whose weights come with its package.

Letters: X, Y, Z voxels of the T1.
"""

from __future__ import annotations

import warnings
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ermoe.brain.data.grid import bounding_box
from ermoe.brain.data.nifti import Image

_PROBABLE = 0.5


def deepbet_mask(t1: Image) -> NDArray[np.bool_]:
    """The brain of a head, (X, Y, Z); empty if deepbet finds none.

    deepbet stretches what it gets to a cube, so empty slices around a head would change its answer. They are cut off
    first, and the axes are in world order already: the mask does not depend on how the scan is stored.
    """
    mask_XYZ = np.zeros(t1.data_XYZ.shape, np.bool_)
    shown_XYZ = t1.data_XYZ != 0
    if not shown_XYZ.any():
        return mask_XYZ
    box = bounding_box(shown_XYZ)
    head_XYZ = np.ascontiguousarray(t1.data_XYZ[box]) / np.abs(t1.data_XYZ).max()
    extraction = _extraction()
    try:
        with torch.inference_mode():
            probability_XYZ = extraction.run_model(head_XYZ)
        found_XYZ = extraction.postprocess(probability_XYZ > _PROBABLE)
    except (AssertionError, RuntimeError):  # what deepbet raises when nothing looks like a brain
        return mask_XYZ
    mask_XYZ[box] = found_XYZ
    return mask_XYZ


@lru_cache(maxsize=1)
def _extraction() -> Any:
    from deepbet import BrainExtraction

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch, about the format of deepbet's weights
        return BrainExtraction(no_gpu=True)
