"""From a prepared volume to what a network is given: the whole brain, or one tissue of it alone.

Scanners differ in the brightness of tissues, not in their order: in every T1 image fluid is darker than grey matter,
and grey matter darker than white. Three normal distributions are fitted to the intensities inside the brain mask of
each scan; every voxel then becomes its shares of white matter, grey matter and fluid, read off linearly between the
three means, as in a voxel that holds two tissues. Nothing is learnt and nothing but the T1 is used, so a synthetic
brain and a real one, or two scanners, look alike.

A linear patch embedding cannot count the dark voxels of a cube; of these channels, it can. With a few dozen people,
though, an embedding of thousands of voxels learns people by heart. "blocks" are shares of blocks of 4³ voxels, and
beside them, in every block, the shares of the whole brain.

Letters: B volumes, C channels of the network's input, X, Y, Z voxels, N bins of the histogram, M = 3 tissues: wm, gm,
csf.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ermoe.brain.data.preprocess import Volume, isolate
from ermoe.brain.data.scans import TISSUES
from ermoe.brain.recipes import BLOCK
from ermoe.errors import UserError

VERSION = 3
"""Raised whenever a scan comes to look different to a network, so that inputs that were kept are made anew."""
_TYPICAL_SHARES = (0.35, 0.45, 0.20)  # of wm, gm, csf inside usual brain masks
_BLOCK_SPREAD, _BRAIN_SPREAD = 0.3, 0.03  # of shares over blocks and over people
_LIMIT = 4.0
_NUM_BINS = 200
_ITERATIONS = 60
_FIRST_SHARES = (0.35, 0.50, 0.15)  # of wm, gm, csf, from which expectation–maximisation begins
_TRIM = 0.002  # of the intensities at either end, which vessels, skin and noise occupy


def network_input(
    kind: str, t1_BXYZ: Tensor, mask_BXYZ: Tensor, only_BXYZ: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """What the network is given, (B, C, x, y, z), and its mask, (B, x, y, z), coarser than the volume for "blocks".

    ``only_BXYZ`` retains a part of the brain, such as one tissue; its contrast is still that of the whole scan, and of
    the shares of the whole brain nothing is told. Channels go from dark to bright, csf first, as every network learnt
    them.
    """
    kept = mask_BXYZ if only_BXYZ is None else mask_BXYZ & only_BXYZ
    if kind == "t1":
        return (t1_BXYZ * kept).unsqueeze(1), kept
    share_BMXYZ = partial_volumes(t1_BXYZ, mask_BXYZ, tissue_means(t1_BXYZ, mask_BXYZ))
    if kind == "contrast":
        return share_BMXYZ[:, (2, 0)] * kept.unsqueeze(1), kept
    return _blocks(share_BMXYZ * kept.unsqueeze(1), kept, tells_whole=only_BXYZ is None)


def _blocks(share_BMXYZ: Tensor, mask_BXYZ: Tensor, *, tells_whole: bool) -> tuple[Tensor, Tensor]:
    """Shares of blocks and of the whole brain, as deviations from the usual in units of about one."""
    mean_BMxyz = F.avg_pool3d(share_BMXYZ, BLOCK, ceil_mode=True)
    mask_Bxyz = F.max_pool3d(mask_BXYZ.unsqueeze(1).float(), BLOCK, ceil_mode=True).squeeze(1) > 0
    typical = torch.tensor(_TYPICAL_SHARES).to(share_BMXYZ).view(1, 3, 1, 1, 1)
    local = (mean_BMxyz - typical) / _BLOCK_SPREAD
    total = share_BMXYZ.sum((2, 3, 4), keepdim=True)
    whole = (total / total.sum(1, keepdim=True).clamp_min(1) - typical) / _BRAIN_SPREAD
    whole = whole.clamp(-_LIMIT, _LIMIT) if tells_whole else torch.zeros_like(whole)
    dark_first = torch.cat([local.flip(1), whole.flip(1).expand_as(local)], dim=1)
    return dark_first * mask_Bxyz.unsqueeze(1), mask_Bxyz


def partial_volumes(t1_BXYZ: Tensor, mask_BXYZ: Tensor, mean_BM: Tensor) -> Tensor:
    """Shares of each tissue in every voxel of the mask, told by intensity, (B, M, X, Y, Z); they sum to 1 inside it.

    >>> t1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0]).view(1, 5, 1, 1)
    >>> partial_volumes(t1, torch.ones_like(t1).bool(), torch.tensor([[2.0, 1.0, 0.0]])).view(3, 5)
    tensor([[0.0000, 0.0000, 0.0000, 0.5000, 1.0000],
            [0.0000, 0.5000, 1.0000, 0.5000, 0.0000],
            [1.0000, 0.5000, 0.0000, 0.0000, 0.0000]])
    """
    bright, grey, dark = (mean.view(-1, 1, 1, 1) for mean in mean_BM.unbind(1))
    fluid = ((grey - t1_BXYZ) / (grey - dark)).clamp(0, 1)
    white = ((t1_BXYZ - grey) / (bright - grey)).clamp(0, 1)
    return torch.stack([white, 1 - fluid - white, fluid], dim=1) * mask_BXYZ.unsqueeze(1)


@torch.no_grad()
def tissue_means(t1_BXYZ: Tensor, mask_BXYZ: Tensor) -> Tensor:
    """Mean intensities of white matter, grey matter and fluid of each scan, (B, M)."""
    means = [_means(t1[mask].cpu().numpy()) for t1, mask in zip(t1_BXYZ, mask_BXYZ, strict=True)]
    return torch.tensor(np.stack(means)).to(t1_BXYZ)


def _means(intensity: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
    """Expectation–maximisation on the histogram, from the quantiles that usual shares of tissue suggest."""
    if intensity.size < 2 * _NUM_BINS:
        raise UserError(f"a brain mask of {intensity.size} voxels is too small to tell tissues apart")
    share_M = np.array(_FIRST_SHARES)
    middle_M = 1 - (share_M.cumsum() - share_M / 2)  # white matter is the brightest
    low, *middle, high = np.quantile(intensity, [_TRIM, *middle_M, 1 - _TRIM])
    if not high > low:
        raise UserError("the voxels inside the brain mask are all equal: this is no T1 scan")
    count_N, edge_N = np.histogram(intensity, _NUM_BINS, (low, high))
    centre_N1 = ((edge_N[:-1] + edge_N[1:]) / 2 - low)[:, None] / (high - low)
    mean_M, variance_M = (np.array(middle) - low) / (high - low), np.full(3, 0.1**2)
    for _ in range(_ITERATIONS):
        likelihood_NM = share_M / np.sqrt(variance_M) * np.exp(-((centre_N1 - mean_M) ** 2) / (2 * variance_M))
        weight_NM = likelihood_NM / (likelihood_NM.sum(1, keepdims=True) + 1e-300) * count_N[:, None]
        total_M = np.maximum(weight_NM.sum(0), 1)
        mean_M = (weight_NM * centre_N1).sum(0) / total_M
        spread_M = (weight_NM * (centre_N1 - mean_M) ** 2).sum(0) / total_M
        variance_M = np.maximum(spread_M, 0.02**2)  # no tissue narrows to one spike
        share_M = np.maximum(total_M / total_M.sum(), 0.02)
    dark, grey, bright = np.sort(mean_M)
    apart_M = np.array([max(bright, grey + 0.02), grey, min(dark, grey - 0.02)])  # nor do two coincide
    return low + (high - low) * apart_M


def voxels(volume: Volume) -> tuple[Tensor, Tensor]:
    """T1 and mask, (X, Y, Z), as tensors of their own."""
    return torch.from_numpy(np.array(volume.t1_XYZ)), torch.from_numpy(np.array(volume.mask_XYZ))


def single_input(kind: str, t1_XYZ: Tensor, mask_XYZ: Tensor, only_XYZ: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`network_input` of one brain, (C, x, y, z), and its mask."""
    only_BXYZ = None if only_XYZ is None else only_XYZ.unsqueeze(0)
    seen, kept = network_input(kind, t1_XYZ.unsqueeze(0), mask_XYZ.unsqueeze(0), only_BXYZ)
    return seen[0], kept[0]


def isolated_input(kind: str, volume: Volume, region: int) -> tuple[Tensor, Tensor]:
    """The network's input for one tissue alone, and that tissue's mask.

    As "t1" it is T1 × tissue, normalised inside the tissue. As "contrast" it is that of the whole scan × tissue, which
    needs no normalisation.
    """
    assert volume.tissue_3XYZ is not None
    only = torch.from_numpy(np.asarray(volume.tissue_3XYZ[region]) > 0.5)
    if kind == "t1":
        return torch.from_numpy(np.array(isolate(volume, TISSUES[region]))).unsqueeze(0) * only, only
    return single_input(kind, *voxels(volume), only)
