"""`ermoe bench layer`: one feed-forward layer of ViT-B, ours beside its peers and the floor."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from ermoe.studies.bench.clock import compare, take_turns
from ermoe.studies.bench.memory import peak_megabytes
from ermoe.studies.bench.peers import Shape, available, build, tokens
from ermoe.studies.bench.result import Bar, Result

_EIGEN, _VMOE = "ermoe R=504 r=56", "our V-MoE"


def forward_of(layer: nn.Module, shape: Shape) -> Callable[[], object]:
    """Inference on the benchmark's tokens."""
    x, context = tokens(shape)
    layer.eval()

    def run() -> object:
        with torch.inference_mode():
            return layer(x, context)

    return run


def step_of(layer: nn.Module, shape: Shape) -> Callable[[], object]:
    """Forward and backward, with gradients for tokens and parameters."""
    x, context = (tensor.requires_grad_() for tensor in tokens(shape))
    upstream = torch.randn_like(x)
    layer.train()

    def run() -> object:
        for tensor in (x, context, *layer.parameters()):
            tensor.grad = None
        layer(x, context).backward(upstream)
        return None

    return run


def build_work(name: str, shape: Shape, routing: str, backward: bool, threads: int) -> Callable[[], object]:
    """One candidate ready to run, for the process that measures its memory."""
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    layer = build(name, shape, routing)
    return step_of(layer, shape) if backward else forward_of(layer, shape)


def run(shape: Shape, *, rounds: int, threads: list[int], routings: list[str], memory: bool) -> Result:
    """All candidates, forward and forward+backward, for each number of threads and each kind of routing."""
    result = Result("layer", {"shape": repr(shape), "rounds": rounds, "dtype": "float32"}, reference="floor")
    for count in threads:
        torch.set_num_threads(count)
        for routing in routings:
            for pass_name, work_of in (("forward", forward_of), ("forward+backward", step_of)):
                torch.manual_seed(0)
                work = {name: work_of(build(name, shape, routing), shape) for name in available(routing)}
                seconds = take_turns(work, rounds=rounds if work_of is forward_of else max(3, rounds // 2))
                result.tables[f"{pass_name}, {routing}, {count} threads"] = compare(seconds, "floor")
    if memory:
        for name in available():
            for backward, label in ((False, "forward"), (True, "forward+backward")):
                key = f"peak memory MB, {label}, {name}"
                result.figures[key] = peak_megabytes(build_work, name, shape, "natural", backward, max(threads))
    result.bars = bars(result, max(threads))
    return result


def bars(result: Result, threads: int) -> list[Bar]:
    """The promises about this benchmark."""
    forward, step = (f"{name}, natural, {threads} threads" for name in ("forward", "forward+backward"))
    if forward not in result.tables:
        return []
    ratio = partial(result.ratio, forward)
    found = [
        Bar("forward, ERMoE / floor", ratio(_EIGEN), 1.00),
        Bar("forward, ERMoE / our V-MoE", ratio(_EIGEN, to=_VMOE), 0.95),
        Bar("forward, our V-MoE / floor", ratio(_VMOE), 1.08),
        Bar("forward+backward, ERMoE / floor", result.ratio(step, _EIGEN), 1.20),
    ]
    for name, table in (("forward", forward), ("forward+backward", step)):
        backends = [row for row in result.tables[table] if row.name.startswith(("transformers", "Mixtral"))]
        if backends:
            fastest = min(backends, key=lambda row: row.ratio).name
            found.append(Bar(f"{name}, ERMoE / fastest of transformers", result.ratio(table, _EIGEN, to=fastest), 0.95))
    return found
