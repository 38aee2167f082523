"""The parts of a report that look into the network: which experts tissues choose, and where hiding a cube matters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ermoe.analysis.page import Markup, Page, grid, table
from ermoe.brain.batches import ScanSet, VolumeBatch, every_scan
from ermoe.brain.data.scans import TISSUES, Scan
from ermoe.brain.evaluation import Evaluation
from ermoe.brain.regions import expert_name, tissue_score_correlation
from ermoe.brain.reporting import pictures
from ermoe.train.compute import Compute
from ermoe.train.run_folder import read_lines

if TYPE_CHECKING:
    from ermoe.brain.reporting.page import Album
import math

import torch
from torch import Tensor, nn

from ermoe.brain.ages import AgeHead
from ermoe.brain.estimation import as_model
from ermoe.brain.recipes import reduction

Array = NDArray[np.float64]


def routing_sections(
    page: Page, evaluation: Evaluation, album: Album, *, occlusion_scans: int, compute: Compute
) -> None:
    """Region probe, token–tissue correlation, occlusion map; a sentence for what cannot be had."""
    _regions(page, evaluation, album, compute)
    if occlusion_scans:
        compute.say(f"occlusion map of {occlusion_scans} scans")
        _occlusion(page, evaluation, album, occlusion_scans, compute)


def _regions(page: Page, evaluation: Evaluation, album: Album, compute: Compute) -> None:
    if not evaluation.method.startswith("ermoe"):
        return
    if not evaluation.has_tissue:
        sentence = "Some scans have no tissue maps, so neither the region probe nor the tissue correlation can be made."
        page.section("Tissues and experts", sentence, [])
        return
    probes = _region_probes(evaluation)
    blocks: list[Markup] = []
    if probes:
        rows = [
            [f"{tissue}, {place}", *(_ranked(score_RE[number])[rank] for score_RE in probes.values())]
            for number, tissue in enumerate(TISSUES)
            for rank, place in enumerate(("first", "second"))
        ]
        blocks.append(table(["isolated tissue", *probes], rows))
    panels = []
    if probes:
        caption = "Mean plain score over cubes that contain the tissue; offsets play no part. The best is framed."
        panels.append(album.panel(pictures.region_scores(probes), "region-probe", "Isolated tissues.", caption))
    correlation_RE = _correlation(evaluation, compute)
    caption = "Over the cubes of whole held-out scans: share of a tissue in a cube against its score for an expert."
    panels.append(
        album.panel(pictures.tissue_correlation(correlation_RE), "tissue-correlation", "Whole scans.", caption)
    )
    side_mm = evaluation.model.patch_size * evaluation.model.preprocessing.spacing_mm
    lead = (
        f"A token is a cube of {side_mm:g} mm, which mostly holds several tissues. Isolated: held-out people of the "
        "first fold with one tissue retained, and the two experts that score best at the last expert layer (the "
        "paper's Table 6)."
    )
    page.section("Tissues and experts", lead, [*blocks, grid(panels)])


def _region_probes(evaluation: Evaluation) -> dict[str, Array]:
    """Mean scores (3, E) by epoch, as the first fold wrote them down while it learnt."""
    first = evaluation.outputs.splits.fold_names[0]
    path = evaluation.folder / "folds" / first / "metrics.jsonl"
    found: dict[str, Array] = {}
    lines = [line for line in read_lines(path) if line["kind"] == "test"] if path.is_file() else []
    for number, line in enumerate(lines, 1):
        rows = [[value for name, value in line.items() if name.startswith(f"probe/{tissue}/")] for tissue in TISSUES]
        if all(rows):
            found[f"epoch {number}"] = np.array(rows)
    return found


def _ranked(score_E: Array) -> list[str]:
    order = np.argsort(-score_E, kind="stable")
    return [f"{expert_name(int(expert))} ({score_E[expert]:.2f})" for expert in order]


def _held_out_scans(evaluation: Evaluation, fold: int, most: int) -> Sequence[Scan]:
    rows = evaluation.outputs.rows(fold, "test")[:most]
    return [evaluation.outputs.scans[int(row)] for row in rows]


def _correlation(evaluation: Evaluation, compute: Compute, most: int = 20) -> Array:
    fold = evaluation.outputs.tested()[0]
    network: Any = list(evaluation.model.networks.values())[fold]
    volumes = ScanSet(evaluation.cache, _held_out_scans(evaluation, fold, most), evaluation.model.input)
    return tissue_score_correlation(network, volumes, compute, patch_size=evaluation.model.patch_size).numpy()


def _occlusion(page: Page, evaluation: Evaluation, album: Album, most: int, compute: Compute) -> None:
    fold = evaluation.outputs.tested()[0]
    network: Any = list(evaluation.model.networks.values())[fold]
    scans = _held_out_scans(evaluation, fold, most)
    volumes = ScanSet(evaluation.cache, scans, evaluation.model.input)
    patch_size = evaluation.model.patch_size
    change_xyz = _occlusion_map(network, evaluation.model.head, volumes, compute, patch_size=patch_size)
    mean_XYZ = np.mean([np.asarray(evaluation.cache.volume(scan).t1_XYZ, dtype=np.float64) for scan in scans], axis=0)
    drawing = pictures.occlusion(change_xyz, mean_XYZ, patch_size)
    strongest = float(np.nanmax(np.abs(change_xyz)))
    caption = f"Mean of {len(scans)} held-out scans. Hiding one cube changes the age by at most {strongest:.1f} years."
    page.section(
        "Where it looks",
        "Each cube is hidden in turn. Red: without it the brain looks older, so the cube made it look younger.",
        [grid([album.panel(drawing, "occlusion", "Occlusion map.", caption)])],
    )


@torch.no_grad()
def _occlusion_map(
    model: nn.Module,
    head: AgeHead,
    volumes: ScanSet,
    compute: Compute | None = None,
    *,
    patch_size: int,
    batch_size: int = 16,
) -> NDArray[np.float64]:
    """Mean change of the predicted age in years when a cube is hidden, (x, y, z) cubes; NaN where no brain is.

    ``patch_size`` is the edge of a cube in voxels of the volume.

    A hidden cube has no voxels and no mask, so a transformer does not see its token, and a convolution sees background.
    """
    model.eval()
    patch_size //= reduction(volumes.kind)
    changes = [
        _changes(model, head, batch, patch_size, batch_size)
        for (batch,) in every_scan(volumes, compute, batch_size=1).epoch()
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
