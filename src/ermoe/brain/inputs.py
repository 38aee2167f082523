"""From a prepared volume to what a network is given: its T1, tissue shares of voxels, or of blocks; whole, or one
tissue alone.

Scanners differ in the brightness of tissues, not in their order: in every T1 image fluid is darker than grey matter,
and grey matter darker than white. Three normal distributions are fitted to the intensities inside the brain mask of
each scan; every voxel then becomes its shares of white matter, grey matter and fluid, read off linearly between the
three means, as in a voxel that holds two tissues. Nothing is learnt and nothing but the T1 is used, so a synthetic
brain and a real one, or two scanners, look alike.

A linear patch embedding cannot count the dark voxels of a cube; of these channels, it can. With a few dozen people,
though, an embedding of thousands of voxels learns people by heart. "blocks" are shares of blocks of 4³ voxels, and
beside them, in every block, the shares of the whole brain.

Letters: C channels of the network's input, X, Y, Z voxels, N bins of the histogram, M = 3 tissues: wm, gm,
csf.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
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


def network_input(kind: str, t1_XYZ: Tensor, mask_XYZ: Tensor, only_XYZ: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """What the network is given of a brain, (C, x, y, z), and its mask, (x, y, z), coarser than it for "blocks".

    ``only_XYZ`` retains a part of the brain, such as one tissue; its contrast is still that of the whole scan, and of
    the shares of the whole brain nothing is told. Channels go from dark to bright, csf first, as every network learnt
    them.
    """
    kept = mask_XYZ if only_XYZ is None else mask_XYZ & only_XYZ
    if kind == "t1":
        return (t1_XYZ * kept).unsqueeze(0), kept
    share_MXYZ = partial_volumes(t1_XYZ, mask_XYZ, tissue_means(t1_XYZ, mask_XYZ))
    if kind == "contrast":
        return share_MXYZ[[2, 0]] * kept, kept
    return _blocks(share_MXYZ * kept, kept, tells_whole=only_XYZ is None)


def _blocks(share_MXYZ: Tensor, mask_XYZ: Tensor, *, tells_whole: bool) -> tuple[Tensor, Tensor]:
    """Shares of blocks and of the whole brain, as deviations from the usual in units of about one."""
    mean_Mxyz = F.avg_pool3d(share_MXYZ, BLOCK, ceil_mode=True)
    mask_xyz = F.max_pool3d(mask_XYZ.unsqueeze(0).float(), BLOCK, ceil_mode=True).squeeze(0) > 0
    typical = torch.tensor(_TYPICAL_SHARES).to(share_MXYZ).view(3, 1, 1, 1)
    local = (mean_Mxyz - typical) / _BLOCK_SPREAD
    total = share_MXYZ.sum((1, 2, 3), keepdim=True)
    whole = (total / total.sum().clamp_min(1) - typical) / _BRAIN_SPREAD
    whole = whole.clamp(-_LIMIT, _LIMIT) if tells_whole else torch.zeros_like(whole)
    dark_first = torch.cat([local.flip(0), whole.flip(0).expand_as(local)])
    return dark_first * mask_xyz, mask_xyz


def partial_volumes(t1_XYZ: Tensor, mask_XYZ: Tensor, mean_M: Tensor) -> Tensor:
    """Shares of each tissue in every voxel of the mask, told by intensity, (M, X, Y, Z); they sum to 1 inside it.

    >>> t1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0]).view(5, 1, 1)
    >>> partial_volumes(t1, torch.ones_like(t1).bool(), torch.tensor([2.0, 1.0, 0.0])).view(3, 5)
    tensor([[0.0000, 0.0000, 0.0000, 0.5000, 1.0000],
            [0.0000, 0.5000, 1.0000, 0.5000, 0.0000],
            [1.0000, 0.5000, 0.0000, 0.0000, 0.0000]])
    """
    bright, grey, dark = mean_M
    fluid = ((grey - t1_XYZ) / (grey - dark)).clamp(0, 1)
    white = ((t1_XYZ - grey) / (bright - grey)).clamp(0, 1)
    return torch.stack([white, 1 - fluid - white, fluid]) * mask_XYZ


@torch.no_grad()
def tissue_means(t1_XYZ: Tensor, mask_XYZ: Tensor) -> Tensor:
    """Mean intensities of white matter, grey matter and fluid, (M,).

    Expectation–maximisation on the histogram, from the quantiles that usual shares of tissue suggest.
    """
    intensity = t1_XYZ[mask_XYZ].cpu().numpy()
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
    return torch.tensor(low + (high - low) * apart_M).to(t1_XYZ)


def voxels(volume: Volume) -> tuple[Tensor, Tensor]:
    """T1 and mask, (X, Y, Z), as tensors of their own."""
    return torch.from_numpy(np.array(volume.t1_XYZ)), torch.from_numpy(np.array(volume.mask_XYZ))


def isolated_input(kind: str, volume: Volume, region: int) -> tuple[Tensor, Tensor]:
    """The network's input for one tissue alone, and that tissue's mask.

    As "t1" it is T1 × tissue, normalised inside the tissue. As "contrast" it is that of the whole scan × tissue, which
    needs no normalisation.
    """
    assert volume.tissue_3XYZ is not None
    only = torch.from_numpy(np.asarray(volume.tissue_3XYZ[region]) > 0.5)
    if kind == "t1":
        return torch.from_numpy(np.array(isolate(volume, TISSUES[region]))).unsqueeze(0) * only, only
    return network_input(kind, *voxels(volume), only)
