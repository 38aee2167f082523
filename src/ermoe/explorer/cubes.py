"""A scan as a model of brains sees it: its cubes, their tissues, and what experts do with them.

Letters: X, Y, Z voxels, x, y, z cubes, S = x·y·z of them, E experts, K shuffles.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ermoe.brain.data.preprocess import Volume, prepare
from ermoe.brain.data.scans import Scan
from ermoe.brain.inputs import network_input, partial_volumes, tissue_means, voxels
from ermoe.brain.model import BrainAgeModel
from ermoe.brain.recipes import reduction
from ermoe.explorer.look import Change, LayerLook, look

SHUFFLES = 20


@dataclass(frozen=True, slots=True)
class Cubes:
    """One scan, ready: what networks are given, which of its cubes hold brain, and the tissues in them.

    ``folds`` are the networks that may judge the person.
    """

    scan: Scan
    volume: Volume
    input_1Cxyz: Tensor
    mask_1xyz: Tensor
    folds: list[str]
    grid: tuple[int, int, int]
    real_S: Tensor
    tissue_S3: Tensor


def edge_of(model: BrainAgeModel) -> int:
    """Voxels of the networks' input along a cube."""
    return model.patch_size // reduction(model.input)


def cubes_of(scan: Scan, model: BrainAgeModel) -> Cubes:
    """A scan prepared as the model's training did it."""
    volume, edge = prepare(scan, model.preprocessing), edge_of(model)
    t1_XYZ, mask_XYZ = voxels(volume)
    input_Cxyz, mask_xyz = network_input(model.input, t1_XYZ, mask_XYZ)
    x, y, z = (math.ceil(size / edge) for size in mask_xyz.shape)
    pooled = partial(F.avg_pool3d, kernel_size=model.patch_size, ceil_mode=True, count_include_pad=True)
    share_3XYZ = partial_volumes(t1_XYZ, mask_XYZ, tissue_means(t1_XYZ, mask_XYZ))
    tissue_S3 = pooled(share_3XYZ.unsqueeze(0).float())[0].flatten(1).T
    tissue_S3 = tissue_S3 / tissue_S3.sum(1, keepdim=True).clamp_min(1e-9)
    real_S = F.max_pool3d(mask_xyz[None, None].float(), edge, ceil_mode=True).flatten() > 0
    folds, _ = model.folds_for(scan.participant_id)
    return Cubes(
        scan, volume, input_Cxyz.unsqueeze(0), mask_xyz.unsqueeze(0), folds, (x, y, z), real_S, tissue_S3
    )  # fmt: skip


def layers_of(cubes: Cubes, network: torch.nn.Module, change: Change | None = None) -> dict[str, LayerLook]:
    """What the layers of a network do with the cubes, and with nothing else: the class token is no place."""
    weight = next(network.parameters())
    seen = look(network, cubes.input_1Cxyz.to(weight), change, mask=cubes.mask_1xyz.to(weight.device))
    return {
        name: LayerLook(own.weight_TE[1:], None if own.score_TE is None else own.score_TE[1:], None)
        for name, own in seen.layers.items()
    }


def tissue_sums(used_SE: Tensor, tissue_S3: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """By expert the sum of tissue shares over its cubes (E, 3), with experts dealt out at random (K, E, 3), and their
    number (E)."""
    real_S = used_SE.any(1)
    used_SE, tissue_S3 = used_SE[real_S].float(), tissue_S3[real_S]
    deals = [tissue_S3[torch.randperm(len(tissue_S3), generator=generator)] for _ in range(SHUFFLES)]
    return used_SE.T @ tissue_S3, torch.stack([used_SE.T @ deal for deal in deals]), used_SE.sum(0)


def grey(volume: Volume) -> NDArray[np.uint8]:
    """The scan to look at, (X, Y, Z): 0 outside the brain, 1 to 255 within."""
    t1_XYZ = np.asarray(volume.t1_XYZ)
    low, high = np.percentile(t1_XYZ[np.asarray(volume.mask_XYZ)], [1, 99.5])
    bright_XYZ = 1 + 254 * np.clip((t1_XYZ - low) / max(high - low, 1e-6), 0, 1)
    shown: NDArray[np.uint8] = np.where(volume.mask_XYZ, bright_XYZ, 0).astype(np.uint8)
    return shown
