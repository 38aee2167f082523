"""The parts of a report that look into the network: which experts tissues choose, and where hiding a cube matters."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn

from ermoe.analysis.page import Markup, Page, grid, table
from ermoe.brain.ages import AgeHead
from ermoe.brain.batches import ScanSet, every_scan
from ermoe.brain.data.scans import TISSUES
from ermoe.brain.estimation import as_model, in_voxels
from ermoe.brain.evaluation import Evaluation
from ermoe.brain.metrics import Array
from ermoe.brain.recipes import reduction
from ermoe.brain.regions import expert_name, tissue_score_correlation
from ermoe.brain.reporting import pictures
from ermoe.brain.reporting.pictures import Album
from ermoe.brain.results import mean_of_known
from ermoe.train.compute import Compute

_MOST_CORRELATED = 20
"""Scans whose cubes are correlated with scores."""
_MOST_EPOCHS = 4
"""Epochs in a table, so that it is no wider than a page."""
EXPLAINS = 0.5
"""Years by which hiding a cube must change an age for the map to explain anything."""
_AT_ONCE = 16
"""Cubes that are hidden in one batch, each in a copy of the scan."""


def routing_sections(
    page: Page, evaluation: Evaluation, album: Album, *, occlusion_scans: int, compute: Compute
) -> None:
    """Region probe, token–tissue correlation, occlusion map; a sentence for what cannot be had."""
    if not evaluation.model.networks:
        return
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
    blocks: list[Markup] = []
    panels: list[Markup] = []
    if probes := _region_probes(evaluation):
        rows = [
            [f"{tissue}, {place}", *(_ranked(score_RE[number])[rank] for score_RE in probes.values())]
            for number, tissue in enumerate(TISSUES)
            for rank, place in enumerate(("first", "second"))
        ]
        blocks.append(table(["isolated tissue", *probes], rows))
        caption = "Mean plain score over cubes that contain the tissue; offsets play no part. The best is framed."
        panels.append(album.panel(pictures.tissues_by_experts(probes), "region-probe", "Isolated tissues.", caption))
    patch_size = evaluation.model.patch_size
    network, volumes = _of_first_fold(evaluation, _MOST_CORRELATED)
    correlation_RE = tissue_score_correlation(network, volumes, compute, patch_size=patch_size).numpy()
    drawing = pictures.tissues_by_experts({"correlation": correlation_RE}, highest=1.0)
    caption = "Over the cubes of whole held-out scans: share of a tissue in a cube against its score for an expert."
    panels.append(album.panel(drawing, "tissue-correlation", "Whole scans.", caption))
    side_mm = patch_size * evaluation.model.preprocessing.spacing_mm
    lead = (
        f"A token is a cube of {side_mm:g} mm, which mostly holds several tissues. Isolated: held-out people of the "
        "first fold with one tissue retained, and the two experts that score best at the last expert layer (the "
        "paper's Table 6)."
    )
    page.section("Tissues and experts", lead, [*blocks, grid(panels)])


def _region_probes(evaluation: Evaluation) -> dict[str, Array]:
    """Mean scores (3, E) of a few epochs, as the first fold wrote them down while it learnt."""
    found: dict[str, Array] = {}
    for number, line in enumerate(evaluation.judgements(evaluation.outputs.splits.fold_names[0]), 1):
        rows = [[value for name, value in line.items() if name.startswith(f"probe/{tissue}/")] for tissue in TISSUES]
        if all(rows):
            found[f"epoch {number}"] = np.array(rows)
    shown = np.unique(np.linspace(0, len(found) - 1, _MOST_EPOCHS).round().astype(int)) if found else ()
    return {name: found[name] for name in (list(found)[place] for place in shown)}


def _ranked(score_E: Array) -> list[str]:
    order = np.argsort(-score_E, kind="stable")
    return [f"{expert_name(int(expert))} ({score_E[expert]:.2f})" for expert in order]


def _of_first_fold(evaluation: Evaluation, most: int) -> tuple[nn.Module, ScanSet]:
    """The network of the first fold that tests somebody, and some of the scans it tests."""
    fold = evaluation.outputs.tested()[0]
    scans = [evaluation.outputs.scans[int(row)] for row in evaluation.outputs.rows(fold, "test")[:most]]
    network = list(evaluation.model.networks.values())[fold]
    return network, ScanSet(evaluation.cache, scans, evaluation.model.input)


def _occlusion(page: Page, evaluation: Evaluation, album: Album, most: int, compute: Compute) -> None:
    network, volumes = _of_first_fold(evaluation, most)
    patch_size, scans = evaluation.model.patch_size, volumes.scans
    change_xyz = _occlusion_map(network, evaluation.model.head, volumes, compute, patch_size)
    mean_XYZ = np.mean([np.asarray(evaluation.cache.volume(scan).t1_XYZ, dtype=np.float64) for scan in scans], axis=0)
    inside_XYZ = np.mean([np.asarray(evaluation.cache.volume(scan).mask_XYZ) for scan in scans], axis=0) > 0.5
    drawing = pictures.occlusion(change_xyz, mean_XYZ, inside_XYZ, patch_size)
    strongest = float(np.nanmax(np.abs(change_xyz)))
    nothing = " It explains little." if strongest < EXPLAINS else ""
    said = f"Hiding one cube changes the age by at most {strongest:.1f} years.{nothing}"
    caption = f"Mean of {len(scans)} held-out scans. {said}"
    page.section(
        "Where it looks",
        "Each cube is hidden in turn. Red: without it the brain looks older, so the cube made it look younger.",
        [grid([album.panel(drawing, "occlusion", "Occlusion map.", caption)])],
    )


@torch.no_grad()
def _occlusion_map(model: nn.Module, head: AgeHead, volumes: ScanSet, compute: Compute, patch_size: int) -> Array:
    """Mean change of the predicted age in years when a cube is hidden, (x, y, z) cubes; NaN where no brain is.

    ``patch_size`` is the edge of a cube in voxels of the volume.

    A hidden cube has no voxels and no mask, so a transformer does not see its token, and a convolution sees background.
    """
    model.eval()
    edge = patch_size // reduction(volumes.kind)
    loader = every_scan(volumes, compute, batch_size=1)
    return mean_of_known(
        np.stack([changes_without_cubes(model, head, batch.input_BCXYZ, batch.mask_BXYZ, edge) for batch in loader])
    )


@torch.no_grad()
def changes_without_cubes(
    model: nn.Module, head: AgeHead, volume_BCXYZ: Tensor, mask_BXYZ: Tensor, patch_size: int
) -> Array:
    """The same of one scan, of which B = 1; ``patch_size`` in voxels of the network's input."""
    whole = head.age(model(as_model(model, volume_BCXYZ), mask_BXYZ).float())
    cubes_along = [math.ceil(size / patch_size) for size in mask_BXYZ.shape[1:]]
    change = torch.full((math.prod(cubes_along),), math.nan)
    cube_BXYZ = in_voxels(
        torch.arange(len(change), device=mask_BXYZ.device).view(1, *cubes_along), patch_size, mask_BXYZ
    )
    for some in cube_BXYZ[mask_BXYZ].unique().split(_AT_ONCE):
        shown = cube_BXYZ != some.view(-1, 1, 1, 1)
        ages = head.age(model(as_model(model, volume_BCXYZ * shown.unsqueeze(1)), mask_BXYZ & shown).float())
        change[some.cpu()] = (ages - whole).cpu()
    return change.view(*cubes_along).double().numpy()
