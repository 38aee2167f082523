"""Supplement 12: how much memory more experts need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from ermoe.nn.registry import build_layer
from ermoe.studies.bench.layer import step_of
from ermoe.studies.bench.memory import peak_megabytes
from ermoe.studies.bench.peers import Shape
from ermoe.studies.figures import cell, figures_of, mean
from ermoe.studies.paper.study import Findings, Job, Record, Setup, Study

EXPERTS = (8, 32)
ROUTERS = {"standard": "logit", "V-MoE": "v-moe", "ERMoE": "eigen"}
PAPER = {"standard": ("18.0", "80.0"), "V-MoE": ("–", "–"), "ERMoE": ("20.5", "84.7")}


def shape_of(setup: Setup, num_experts: int) -> Shape:
    """One layer: of ViT-B at full scale, of ViT-Ti at mini scale."""
    dim = 768 if setup.is_full else 192
    images = 32 if setup.is_full else 8
    return Shape(images=images, dim=dim, hidden_dim=4 * dim, num_experts=num_experts)


def describe(setup: Setup) -> str:
    """What is measured."""
    shape = shape_of(setup, 8)
    return (
        f"One layer of width {shape.dim} with {shape.images} images of {shape.tokens} tokens: parameters and their "
        "gradients, and the peak of a training step beyond the parameters, each in a process of its own, on the CPU."
    )


def jobs(setup: Setup) -> list[Job]:
    """Every router with 8 and with 32 experts."""
    return [Job(f"{name} E={count}", 1, partial(measure, setup, name, count)) for name in ROUTERS for count in EXPERTS]


def build(router: str, shape: Shape, threads: int) -> Callable[[], object]:
    """A training step of one layer, for the process that measures its memory."""
    torch.set_num_threads(threads)
    return step_of(_layer(router, shape), shape)


def _layer(router: str, shape: Shape) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(0)
    options = {"rank": 8 * (21 * shape.dim // 256)} if router == "eigen" else {}
    return build_layer(
        router, shape.dim, shape.hidden_dim, num_experts=shape.num_experts, generator=generator, **options
    )


def measure(setup: Setup, name: str, num_experts: int) -> dict[str, float]:
    """Megabytes of parameters, and of the peak of a step beyond them."""
    shape = shape_of(setup, num_experts)
    layer = _layer(ROUTERS[name], shape)
    parameters = sum(p.numel() * p.element_size() for p in layer.parameters()) / 2**20
    peak = peak_megabytes(build, ROUTERS[name], shape, torch.get_num_threads())
    return {"parameters": parameters, "peak": peak}


def findings(setup: Setup, records: Sequence[Record]) -> Findings:
    """A row for each router."""
    header = ["router", "paper: E = 8, GB", "paper: E = 32, GB", "paper: ratio"]
    header += ["E = 8, MB", "E = 32, MB", "ratio", "of which parameters, MB"]
    rows, ratio = [], {}
    for name in ROUTERS:
        peak = {count: figures_of(records, f"{name} E={count}", "peak") for count in EXPERTS}
        own = {count: figures_of(records, f"{name} E={count}", "parameters") for count in EXPERTS}
        total = {count: [p + q for p, q in zip(peak[count], own[count], strict=True)] for count in EXPERTS}
        ratio[name] = mean(total[32]) / mean(total[8])
        paper = PAPER[name]
        quoted = f"{float(paper[1]) / float(paper[0]):.2f}" if paper[0] != "–" else "–"
        sizes = [cell(total[count], ".0f") for count in EXPERTS]
        rows.append(
            [name, *paper, quoted, *sizes, f"{ratio[name]:.2f}", " → ".join(cell(own[c], ".0f") for c in EXPERTS)]
        )
    sentences = [
        f"From 8 to 32 experts memory grows {ratio['ERMoE']:.2f}-fold with ERMoE and {ratio['standard']:.2f}-fold with "
        "a learned gate; experts at two thirds of full rank are smaller than plain ones.",
        "The paper's 84.7 − 80.0 and 20.5 − 18.0 GB are 4.7 and 2.5: ERMoE's extra grows by 2.2 GB, as it says; that "
        "is 88 % more of it.",
    ]
    return Findings(header, rows, sentences)


STUDY = Study(
    "expert-scaling",
    "memory of a layer with 8 and with 32 experts",
    "one layer, one epoch, GPU memory: ERMoE 20.5 → 84.7 GB, standard MoE 18.0 → 80.0 GB; sizes not given.",
    describe,
    jobs,
    findings,
)
