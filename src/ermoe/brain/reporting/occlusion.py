"""Occlusion: how the predicted age changes when one cube of the brain is hidden."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ermoe.brain.age_head import AgeHead
from ermoe.brain.batches import ScanSet, VolumeBatch
from ermoe.brain.contrast import reduction
from ermoe.brain.estimation import as_model


@torch.no_grad()
def occlusion_map(
    model: nn.Module, head: AgeHead, volumes: ScanSet, *, patch_size: int, batch_size: int = 16
) -> NDArray[np.float64]:
    """Mean change of the predicted age in years when a cube is hidden, (x, y, z) cubes; NaN where no brain is.

    ``patch_size`` is the edge of a cube in voxels of the volume.

    A hidden cube has no voxels and no mask, so a transformer does not see its token, and a convolution sees background.
    """
    model.eval()
    patch_size //= reduction(volumes.kind)
    changes = [
        _changes(model, head, volumes.batch(np.array([index])), patch_size, batch_size) for index in range(len(volumes))
    ]
    stacked = np.stack(changes)
    known = ~np.isnan(stacked)
    total = np.where(known, stacked, 0).sum(0)
    return np.where(known.any(0), total / np.maximum(known.sum(0), 1), np.nan)


def _changes(
    model: nn.Module, head: AgeHead, batch: VolumeBatch, patch_size: int, batch_size: int
) -> NDArray[np.float64]:
    volume, mask = batch.input_BCXYZ, batch.mask_BXYZ
    whole = float(head.age(model(as_model(model, volume), mask).float())[0])
    grid = tuple(math.ceil(size / patch_size) for size in mask.shape[1:])
    found = np.full(grid, np.nan)
    cubes = [cube for cube in np.ndindex(*grid) if bool(mask[0][_voxels(cube, patch_size)].any())]
    for first in range(0, len(cubes), batch_size):
        some = cubes[first : first + batch_size]
        hidden, hidden_mask = _hide(volume, mask, some, patch_size)
        ages = head.age(model(as_model(model, hidden), hidden_mask).float())
        for cube, age in zip(some, ages.tolist(), strict=True):
            found[cube] = age - whole
    return found


def _hide(volume: Tensor, mask: Tensor, cubes: Sequence[tuple[int, ...]], patch_size: int) -> tuple[Tensor, Tensor]:
    hidden = volume.repeat(len(cubes), 1, 1, 1, 1)
    hidden_mask = mask.repeat(len(cubes), 1, 1, 1)
    for row, cube in enumerate(cubes):
        hidden[row][(slice(None), *_voxels(cube, patch_size))] = 0
        hidden_mask[row][_voxels(cube, patch_size)] = False
    return hidden, hidden_mask


def _voxels(cube: tuple[int, ...], patch_size: int) -> tuple[slice, ...]:
    return tuple(slice(patch_size * edge, patch_size * (edge + 1)) for edge in cube)
