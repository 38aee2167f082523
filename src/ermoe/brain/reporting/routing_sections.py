"""The parts of a report that look into the network: which experts tissues choose, and where hiding a cube matters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from ermoe.analysis.page import Markup, Page, grid, table
from ermoe.brain.batches import ScanSet
from ermoe.brain.data.scans import TISSUES, Scan
from ermoe.brain.evaluation import Evaluation
from ermoe.brain.regions import tissue_score_correlation
from ermoe.brain.reporting import pictures
from ermoe.brain.reporting.occlusion import occlusion_map
from ermoe.train.run_folder import read_lines

if TYPE_CHECKING:
    from ermoe.brain.reporting.page import Album

Array = NDArray[np.float64]


def routing_sections(
    page: Page, evaluation: Evaluation, album: Album, *, occlusion_scans: int, console: Console
) -> None:
    """Region probe, token–tissue correlation, occlusion map; a sentence for what cannot be had."""
    _regions(page, evaluation, album)
    if occlusion_scans:
        console.print(f"occlusion map of {occlusion_scans} scans", highlight=False)
        _occlusion(page, evaluation, album, occlusion_scans)


def _regions(page: Page, evaluation: Evaluation, album: Album) -> None:
    if not evaluation.method.startswith("ermoe"):
        return
    if not evaluation.has_tissue:
        sentence = "Some scans have no tissue maps, so neither the region probe nor the tissue correlation can be made."
        page.section("Tissues and experts", sentence, [])
        return
    probes = region_probes(evaluation)
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
    correlation_RE = _correlation(evaluation)
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


def region_probes(evaluation: Evaluation) -> dict[str, Array]:
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
    from ermoe.brain.regions import expert_name

    order = np.argsort(-score_E, kind="stable")
    return [f"{expert_name(int(expert))} ({score_E[expert]:.2f})" for expert in order]


def _held_out_scans(evaluation: Evaluation, fold: int, most: int) -> Sequence[Scan]:
    rows = evaluation.outputs.rows(fold, "test")[:most]
    return [evaluation.outputs.scans[int(row)] for row in rows]


def _correlation(evaluation: Evaluation, most: int = 20) -> Array:
    fold = evaluation.outputs.tested()[0]
    network: Any = list(evaluation.model.networks.values())[fold]
    volumes = ScanSet(evaluation.cache, _held_out_scans(evaluation, fold, most), evaluation.model.input)
    return tissue_score_correlation(network, volumes, patch_size=evaluation.model.patch_size).numpy()


def _occlusion(page: Page, evaluation: Evaluation, album: Album, most: int) -> None:
    fold = evaluation.outputs.tested()[0]
    network: Any = list(evaluation.model.networks.values())[fold]
    scans = _held_out_scans(evaluation, fold, most)
    volumes = ScanSet(evaluation.cache, scans, evaluation.model.input)
    patch_size = evaluation.model.patch_size
    change_xyz = occlusion_map(network, evaluation.model.head, volumes, patch_size=patch_size)
    mean_XYZ = np.mean([np.asarray(evaluation.cache.volume(scan).t1_XYZ, dtype=np.float64) for scan in scans], axis=0)
    drawing = pictures.occlusion(change_xyz, mean_XYZ, patch_size)
    strongest = float(np.nanmax(np.abs(change_xyz)))
    caption = f"Mean of {len(scans)} held-out scans. Hiding one cube changes the age by at most {strongest:.1f} years."
    page.section(
        "Where it looks",
        "Each cube is hidden in turn. Red: without it the brain looks older, so the cube made it look younger.",
        [grid([album.panel(drawing, "occlusion", "Occlusion map.", caption)])],
    )
