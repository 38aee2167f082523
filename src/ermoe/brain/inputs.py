"""From a prepared volume to what a network is given: the whole brain, or one tissue of it alone.

Letters: C channels of the network's input, X, Y, Z voxels.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ermoe.brain.contrast import network_input
from ermoe.brain.data.preprocess import Volume, isolate
from ermoe.brain.data.scans import TISSUES


def voxels(volume: Volume) -> tuple[Tensor, Tensor]:
    """T1 and mask, (X, Y, Z), as tensors of their own."""
    return torch.from_numpy(np.array(volume.t1_XYZ)), torch.from_numpy(np.array(volume.mask_XYZ))


def whole_input(kind: str, t1_XYZ: Tensor, mask_XYZ: Tensor) -> tuple[Tensor, Tensor]:
    """The network's input for one brain, (C, X, Y, Z), and its mask."""
    seen, shown = network_input(kind, t1_XYZ.unsqueeze(0), mask_XYZ.unsqueeze(0))
    return seen[0], shown[0]


def isolated_input(kind: str, volume: Volume, region: int) -> tuple[Tensor, Tensor]:
    """The network's input for one tissue alone, and that tissue's mask.

    As "t1" it is T1 × tissue, normalised inside the tissue. As "contrast" it is that of the whole scan × tissue, which
    needs no normalisation.
    """
    assert volume.tissue_3XYZ is not None
    only = torch.from_numpy(np.asarray(volume.tissue_3XYZ[region]) > 0.5)
    if kind == "t1":
        return torch.from_numpy(np.array(isolate(volume, TISSUES[region]))).unsqueeze(0) * only, only
    t1, mask = voxels(volume)
    seen, kept = network_input(kind, t1.unsqueeze(0), mask.unsqueeze(0), only.unsqueeze(0))
    return seen[0], kept[0]
