"""Supplement 9: parameters, operations and inference time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from ermoe.models.presets import PAPER, WHAT_DOES_NOT_FIT, Preset, count_preset, preset
from ermoe.studies.bench.clock import compare, take_turns
from ermoe.studies.bench.model import inference_of
from ermoe.studies.figures import cell, figures_of
from ermoe.studies.paper.study import Findings, Job, Record, Setup, Study

ROWS = {
    "v-moe-b16": "V-MoE",
    "paper-b16": "ERMoE (R = 504)",
    "parity-b16": "ERMoE (full rank)",
    "vit-b16": "dense ViT-B/16",
}
_PAPER_MS = {"v-moe-b16": "4.4", "paper-b16": "4.1"}
_TINY = {"architecture": "vit_tiny_patch16_224", "rank": 120, "route_rank": 16}


def describe(setup: Setup) -> str:
    """What is counted and what is timed."""
    timed = "ViT-B/16" if setup.is_full else "their ViT-Ti/16 versions"
    return (
        f"Counted on ViT-B/16 at 224 pixels, as in the paper. Timed on this CPU: {timed}, random weights, in turns, "
        "as ratios to V-MoE; the paper gives milliseconds of an unnamed GPU."
    )


def jobs(setup: Setup) -> list[Job]:
    """Counting, and timing."""
    counting = [Job(name, 1, partial(count, name)) for name in ROWS]
    return [*counting, Job("time", 1, partial(timing, setup))]


def count(name: str) -> dict[str, float]:
    """Millions of parameters and billions of multiply-adds."""
    found = count_preset(preset(name))
    return {
        "parameters": found.total_parameters / 1e6,
        "active": found.active_parameters / 1e6,
        "multiply_adds": found.flops.total / 2e9,
        "routing": found.flops.routing / 2e9,
    }


def timing(setup: Setup) -> dict[str, Any]:
    """Time of a forward pass over V-MoE's, in turns."""
    presets = {name: preset(name) if setup.is_full else _tiny(preset(name)) for name in ROWS}
    torch.manual_seed(0)
    batch = torch.randn(8, 3, 224, 224)
    work = {name: inference_of(chosen.build().eval(), batch) for name, chosen in presets.items()}
    rows = compare(take_turns(work, rounds=15 if setup.is_full else 7), "v-moe-b16")
    return {row.name: {"ratio": row.ratio, "low": row.ratio_low, "high": row.ratio_high} for row in rows}


def _tiny(chosen: Preset) -> Preset:
    sparsity = chosen.sparsity
    if sparsity is not None and "rank" in sparsity:
        sparsity = {**sparsity, "rank": _TINY["rank"], "route_rank": _TINY["route_rank"]}
    return Preset(str(_TINY["architecture"]), sparsity)


def findings(setup: Setup, records: Sequence[Record]) -> Findings:
    """A row for each model."""
    header = ["model", "paper: parameters M (active)", "parameters M (active)", "paper: FLOPs G", "multiply-adds G"]
    header += ["paper: ms", "time / V-MoE"]
    rows = []
    for name, label in ROWS.items():
        paper = PAPER.get(name)
        size = cell(figures_of(records, name, "parameters"), ".1f"), cell(figures_of(records, name, "active"), ".1f")
        rows.append(
            [
                label,
                f"{paper.total} ({paper.active})" if paper else "–",
                f"{size[0]} ({size[1]})",
                f"{paper.multiply_adds}" if paper else "–",
                cell(figures_of(records, name, "multiply_adds"), ".1f"),
                _PAPER_MS.get(name, "–"),
                cell(figures_of(records, "time", name, "ratio"), ".2f"),
            ]
        )
    sentences = [
        WHAT_DOES_NOT_FIT,
        "The paper's inference times give a ratio of 0.93; single-gated MoE and DeepMoE are quoted there from others.",
    ]
    return Findings(header, rows, sentences)


STUDY = Study(
    "efficiency",
    "parameters, operations and time of one image",
    "ViT-B/16 at 224 pixels with 8 experts; V-MoE with two experts a token in every second block.",
    describe,
    jobs,
    findings,
)
