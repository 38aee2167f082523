"""What ERMoE costs: parameters, operations and time (Suppl. 9), its routing (Suppl. 11), and memory (Suppl. 12)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from ermoe.models.presets import PAPER, WHAT_DOES_NOT_FIT, Preset, count_preset, preset
from ermoe.nn import EigenMoE
from ermoe.nn.registry import build_layer
from ermoe.studies.bench.layer import step_of
from ermoe.studies.bench.measure import compare, inferring, peak_megabytes, take_turns
from ermoe.studies.bench.peers import Shape
from ermoe.studies.figures import Runs, cell, mean
from ermoe.studies.paper.setup import Setup
from ermoe.studies.paper.study import Findings, Job, study

_MODELS = {
    "v-moe-b16": "V-MoE",
    "paper-b16": "ERMoE (R = 504)",
    "parity-b16": "ERMoE (full rank)",
    "vit-b16": "dense ViT-B/16",
}
_PAPER_MS = {"v-moe-b16": "4.4", "paper-b16": "4.1"}


def _models_described(setup: Setup) -> str:
    timed = "ViT-B/16" if setup.is_full else "their ViT-Ti/16 versions"
    return (
        f"Counted on ViT-B/16 at 224 pixels, as in the paper. Timed on this CPU: {timed}, random weights, in turns, "
        "as ratios to V-MoE; the paper gives milliseconds of an unnamed GPU."
    )


def count_model(name: str) -> dict[str, float]:
    """Millions of parameters and billions of multiply-adds."""
    found = count_preset(preset(name))
    return {
        "parameters": found.total_parameters / 1e6,
        "active": found.active_parameters / 1e6,
        "multiply_adds": found.multiply_adds.total / 1e9,
        "routing": found.multiply_adds.routing / 1e9,
    }


def _time_models(setup: Setup) -> dict[str, Any]:
    """Time of a forward pass over V-MoE's, in turns."""
    presets = {name: preset(name) if setup.is_full else _tiny(preset(name)) for name in _MODELS}
    torch.manual_seed(0)
    batch = torch.randn(8, 3, 224, 224)
    work = {name: inferring(chosen.build().eval(), batch) for name, chosen in presets.items()}
    rows = compare(take_turns(work, rounds=15 if setup.is_full else 7), "v-moe-b16")
    return {row.name: {"ratio": row.ratio, "low": row.ratio_low, "high": row.ratio_high} for row in rows}


def _tiny(chosen: Preset) -> Preset:
    sparsity = chosen.sparsity
    if sparsity is not None and "rank" in sparsity:
        sparsity = {**sparsity, "rank": 120, "route_rank": 16}
    return Preset("vit_tiny_patch16_224", sparsity)


@study(
    "parameters, operations and time of one image",
    "ViT-B/16 at 224 pixels with 8 experts; V-MoE with two experts a token in every second block.",
    _models_described,
    lambda setup: [
        *(Job(name, 1, partial(count_model, name)) for name in _MODELS),
        Job("time", 1, partial(_time_models, setup)),
    ],
)
def efficiency(runs: Runs) -> Findings:
    """A row for each model."""
    header = ["model", "paper: parameters M (active)", "parameters M (active)", "paper: FLOPs G", "multiply-adds G"]
    header += ["paper: ms", "time / V-MoE"]
    rows = []
    for name, label in _MODELS.items():
        paper = PAPER.get(name)
        total, active, operations = (
            runs.cell(name, figure, style=".1f") for figure in ("parameters", "active", "multiply_adds")
        )
        row = [label, f"{paper.total} ({paper.active})" if paper else "–", f"{total} ({active})"]
        row += [f"{paper.multiply_adds}" if paper else "–", operations]
        rows.append([*row, _PAPER_MS.get(name, "–"), runs.cell("time", name, "ratio", style=".2f")])
    sentences = [
        WHAT_DOES_NOT_FIT,
        "The paper's inference times give a ratio of 0.93; single-gated MoE and DeepMoE are quoted there from others.",
    ]
    return Findings(header, rows, sentences)


_ROUTERS = {"V-MoE": 0, "ERMoE r = 40": 40, "ERMoE r = 56": 56, "ERMoE r = 80": 80}
"""Name → routing rank, if it has one."""
_TOKENS = 197


def _routing_described(setup: Setup) -> str:
    return (
        f"Multiply-adds of the six routers of ViT-B/16, for one image. Timed: one layer of width 768, "
        f"{_num_images(setup)} images of {_TOKENS} tokens, routing alone and with the experts, on this CPU, in turns."
    )


def _num_images(setup: Setup) -> int:
    return 8 if setup.is_full else 2


def count_routing() -> dict[str, float]:
    """Billions of multiply-adds of all routers of a model, for one image."""
    found, context = {}, 0.0
    for name, rank in _ROUTERS.items():
        sparsity = {"rank": 504, "route_rank": rank, "balance": "none"}
        work = count_preset(Preset("vit_base_patch16_224", sparsity) if rank else preset("v-moe-b16")).multiply_adds
        found[name] = work.routing / 1e9
        context = work.context / 1e9
    return {**found, "context": context}


def _time_routing(setup: Setup) -> dict[str, Any]:
    """Time of routing over the time of V-MoE's routing, and as a share of the layer."""
    generator = torch.Generator().manual_seed(0)
    x, context = (torch.randn(_num_images(setup), _TOKENS, 768, generator=generator) for _ in range(2))
    layers: dict[str, Any] = {
        name: EigenMoE(768, rank=504, route_rank=rank, balance="none", generator=generator)
        if rank
        else build_layer("v-moe", 768, generator=generator)
        for name, rank in _ROUTERS.items()
    }
    work = {name: inferring(layer.eval().route, x, context) for name, layer in layers.items()}
    work |= {f"layer {name}": inferring(layer, x, context) for name, layer in layers.items()}
    seconds = take_turns(work, rounds=15 if setup.is_full else 9)
    routing = {row.name: row.ratio for row in compare(seconds, "V-MoE")}
    share = {name: next(row.ratio for row in compare(seconds, f"layer {name}") if row.name == name) for name in layers}
    return {name: {"ratio": routing[name], "share_of_layer": share[name]} for name in layers}


@study(
    "operations and time of the routing decision",
    "routing step of V-MoE and ERMoE: 0.631 and 1.169 G operations, 0.03 and 0.05 ms; sizes not given.",
    _routing_described,
    lambda setup: [Job("count", 1, count_routing), Job("time", 1, partial(_time_routing, setup))],
)
def routing_cost(runs: Runs) -> Findings:
    """A row for each router."""
    header = ["router", "paper: G", "multiply-adds G", "paper: ms", "time / V-MoE's routing", "share of its layer"]
    paper = {"V-MoE": ("0.631", "0.03"), "ERMoE r = 56": ("1.169", "0.05")}
    rows = []
    for name in _ROUTERS:
        flops, milliseconds = paper.get(name, ("–", "–"))
        row = [name, flops, runs.cell("count", name, style=".3f"), milliseconds]
        row += [runs.cell("time", name, "ratio", style=".1f"), runs.cell("time", name, "share_of_layer", style=".1%")]
        rows.append(row)
    sentences = [
        "The paper does not say what its 0.631 G of V-MoE count; one linear map of 768 to 8 for 197 tokens in 6 layers "
        "is 0.007 G. Its 1.169 G for ERMoE fits routing ranks of 40 to 80, depending on the reading.",
        f"The attention-weighted context costs another {runs.cell('count', 'context', style='.3f')} G. The paper's "
        "memory, O(E·d·r²), has one r too many: E bases of d × r take O(E·d·r).",
    ]
    return Findings(header, rows, sentences)


_SCALED = {"standard": ("logit", "18.0", "80.0"), "V-MoE": ("v-moe", "–", "–"), "ERMoE": ("eigen", "20.5", "84.7")}
"""Name → router, and the paper's GB with 8 and with 32 experts."""
_EXPERTS = (8, 32)


def _shape(setup: Setup, num_experts: int) -> Shape:
    """One layer: of ViT-B at full scale, of ViT-Ti at mini scale."""
    dim = 768 if setup.is_full else 192
    images = 32 if setup.is_full else 8
    return Shape(images=images, dim=dim, hidden_dim=4 * dim, num_experts=num_experts)


def _scaling_described(setup: Setup) -> str:
    shape = _shape(setup, 8)
    return (
        f"One layer of width {shape.dim} with {shape.images} images of {shape.tokens} tokens: parameters and their "
        "gradients, and the peak of a training step beyond the parameters, each in a process of its own, on the CPU."
    )


def _scaling(setup: Setup) -> list[Job]:
    """Every router with 8 and with 32 experts."""
    return [
        Job(f"{name} E={count}", 1, partial(_megabytes, router, _shape(setup, count)))
        for name, (router, *_) in _SCALED.items()
        for count in _EXPERTS
    ]


def _layer(router: str, shape: Shape) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    options = {"rank": 8 * (21 * shape.dim // 256)} if router == "eigen" else {}
    return build_layer(
        router, shape.dim, shape.hidden_dim, num_experts=shape.num_experts, generator=generator, **options
    )


def _build_step(router: str, shape: Shape, threads: int) -> Callable[[], object]:
    """A training step of one layer, for the process that measures its memory."""
    torch.set_num_threads(threads)
    return step_of(_layer(router, shape), shape)


def _megabytes(router: str, shape: Shape) -> dict[str, float]:
    """Megabytes of parameters, and of the peak of a step beyond them."""
    parameters = sum(p.nbytes for p in _layer(router, shape).parameters()) / 2**20
    return {"parameters": parameters, "peak": peak_megabytes(_build_step, router, shape, torch.get_num_threads())}


@study(
    "memory of a layer with 8 and with 32 experts",
    "one layer, one epoch, GPU memory: ERMoE 20.5 → 84.7 GB, standard MoE 18.0 → 80.0 GB; sizes not given.",
    _scaling_described,
    _scaling,
)
def expert_scaling(runs: Runs) -> Findings:
    """A row for each router."""
    header = ["router", "paper: E = 8, GB", "paper: E = 32, GB", "paper: ratio"]
    header += ["E = 8, MB", "E = 32, MB", "ratio", "of which parameters, MB"]
    rows, ratio = [], {}
    for name, (_, *paper) in _SCALED.items():
        own, peak = ([runs.of(f"{name} E={n}", figure) for n in _EXPERTS] for figure in ("parameters", "peak"))
        total = [[p + q for p, q in zip(*both, strict=True)] for both in zip(own, peak, strict=True)]
        ratio[name] = mean(total[1]) / mean(total[0])
        quoted = f"{float(paper[1]) / float(paper[0]):.2f}" if paper[0] != "–" else "–"
        sizes = [cell(values, ".0f") for values in total]
        parameters = " → ".join(cell(values, ".0f") for values in own)
        rows.append([name, *paper, quoted, *sizes, f"{ratio[name]:.2f}", parameters])
    sentences = [
        f"From 8 to 32 experts memory grows {ratio['ERMoE']:.2f}-fold with ERMoE and {ratio['standard']:.2f}-fold with "
        "a learned gate; experts at two thirds of full rank are smaller than plain ones.",
        "The paper's 84.7 − 80.0 and 20.5 − 18.0 GB are 4.7 and 2.5: ERMoE's extra grows by 2.2 GB, as it says; that "
        "is 88 % more of it.",
    ]
    return Findings(header, rows, sentences)
