"""Supplement 11: what deciding costs, in operations and in time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ermoe.models.presets import Preset, count_preset, preset
from ermoe.nn import EigenMoE, MoE
from ermoe.nn.registry import build_layer
from ermoe.studies.bench.clock import compare, take_turns
from ermoe.studies.figures import cell, figures_of
from ermoe.studies.paper.study import Findings, Job, Record, Setup, Study

RANKS = (40, 56, 80)
_TOKENS = 197


def describe(setup: Setup) -> str:
    """What is counted and what is timed."""
    images = 8 if setup.is_full else 2
    return (
        f"Multiply-adds of the six routers of ViT-B/16, for one image. Timed: one layer of width 768, {images} images "
        f"of {_TOKENS} tokens, routing alone and with the experts, on this CPU, in turns."
    )


def jobs(setup: Setup) -> list[Job]:
    """Counting, and timing."""
    return [Job("count", 1, count), Job("time", 1, partial(timing, setup))]


def count() -> dict[str, float]:
    """Billions of multiply-adds of all routers of a model, for one image."""
    found = {"V-MoE": count_preset(preset("v-moe-b16")).flops.routing / 2e9}
    context = 0.0
    for rank in RANKS:
        sparsity = {"rank": 504, "route_rank": rank, "balance": "none"}
        flops = count_preset(Preset("vit_base_patch16_224", sparsity)).flops
        found[f"ERMoE r = {rank}"] = flops.routing / 2e9
        context = flops.context / 2e9
    return {**found, "context": context}


def timing(setup: Setup) -> dict[str, Any]:
    """Time of routing over the time of V-MoE's routing, and as a share of the layer."""
    images = 8 if setup.is_full else 2
    generator = torch.Generator().manual_seed(0)
    x, context = (torch.randn(images, _TOKENS, 768, generator=generator) for _ in range(2))
    layers: dict[str, Any] = {"V-MoE": build_layer("v-moe", 768, generator=generator)}
    for rank in RANKS:
        layers[f"ERMoE r = {rank}"] = EigenMoE(768, rank=504, route_rank=rank, balance="none", generator=generator)

    def route(layer: MoE, x: Tensor, context: Tensor) -> object:
        with torch.inference_mode():
            return layer.route(x, context)

    def whole(layer: MoE, x: Tensor, context: Tensor) -> object:
        with torch.inference_mode():
            return layer(x, context)

    work = {name: partial(route, layer.eval(), x, context) for name, layer in layers.items()}
    work |= {f"layer {name}": partial(whole, layer, x, context) for name, layer in layers.items()}
    seconds = take_turns(work, rounds=15 if setup.is_full else 9)
    routing = {row.name: row.ratio for row in compare(seconds, "V-MoE")}
    share = {name: next(row.ratio for row in compare(seconds, f"layer {name}") if row.name == name) for name in layers}
    return {name: {"ratio": routing[name], "share_of_layer": share[name]} for name in layers}


def findings(setup: Setup, records: Sequence[Record]) -> Findings:
    """A row for each router."""
    header = ["router", "paper: G", "multiply-adds G", "paper: ms", "time / V-MoE's routing", "share of its layer"]
    paper = {"V-MoE": ("0.631", "0.03"), "ERMoE r = 56": ("1.169", "0.05")}
    rows = []
    for name in ("V-MoE", *(f"ERMoE r = {rank}" for rank in RANKS)):
        flops, milliseconds = paper.get(name, ("–", "–"))
        time, share = (figures_of(records, "time", name, key) for key in ("ratio", "share_of_layer"))
        counted = cell(figures_of(records, "count", name), ".3f")
        rows.append([name, flops, counted, milliseconds, cell(time, ".1f"), cell(share, ".1%")])
    context = cell(figures_of(records, "count", "context"), ".3f")
    sentences = [
        "The paper does not say what its 0.631 G of V-MoE count; one linear map of 768 to 8 for 197 tokens in 6 layers "
        "is 0.007 G. Its 1.169 G for ERMoE fits routing ranks of 40 to 80, depending on the reading.",
        f"The attention-weighted context costs another {context} G. The paper's memory, O(E·d·r²), has one r too many: "
        "E bases of d × r take O(E·d·r).",
    ]
    return Findings(header, rows, sentences)


STUDY = Study(
    "routing-cost",
    "operations and time of the routing decision",
    "routing step of V-MoE and ERMoE: 0.631 and 1.169 G operations, 0.03 and 0.05 ms; sizes not given.",
    describe,
    jobs,
    findings,
)
