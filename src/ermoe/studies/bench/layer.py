"""One feed-forward layer of ViT-B: beside its peers and the floor, the cost of its routing, and how it grows.

These are ``ermoe bench layer``, ``routing`` and ``scaling``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ermoe.nn import Context, MoE, Routing, TopKRouter
from ermoe.nn.dispatch import plan
from ermoe.studies.bench.measure import compare, inferring, peak_megabytes, take_turns
from ermoe.studies.bench.peers import Shape, available, build, eigen_layer, tokens
from ermoe.studies.bench.result import Bar, Result

_EIGEN, _VMOE = "ermoe R=504 r=56", "our V-MoE"
_MERGED = "ermoe dense experts"  # what `ermoe.merge` makes of full rank
_SHARES = {56: 0.10, 32: 0.06}  # by routing rank, of the layer's time that its decision may take
_COLUMNS = 448  # E · r stays at 8 · 56


def _forward_of(layer: nn.Module, shape: Shape) -> Callable[[], object]:
    """Inference on the benchmark's tokens."""
    return inferring(layer.eval(), *tokens(shape))


def step_of(layer: nn.Module, shape: Shape) -> Callable[[], object]:
    """Forward and backward, with gradients for tokens and parameters."""
    x, context = tokens(shape)
    leaves = (x.requires_grad_(), context.alpha_GSS.requires_grad_())
    upstream = torch.randn_like(x)
    layer.train()

    def run() -> object:
        for tensor in (*leaves, *layer.parameters()):
            tensor.grad = None
        layer(x, context).backward(upstream)
        return None

    return run


def build_work(name: str, shape: Shape, routing: str, backward: bool, threads: int) -> Callable[[], object]:
    """One candidate ready to run, for the process that measures its memory."""
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    layer = build(name, shape, routing)
    return step_of(layer, shape) if backward else _forward_of(layer, shape)


def beside_peers(shape: Shape, *, rounds: int, threads: list[int], routings: list[str], memory: bool) -> Result:
    """All candidates, forward and forward+backward, for each number of threads and each kind of routing."""
    instructions = torch.backends.cpu.get_cpu_capability()
    settings = {"shape": repr(shape), "rounds": rounds, "dtype": "float32", "instructions": instructions}
    result = Result("layer", settings, reference="floor")
    for count in threads:
        torch.set_num_threads(count)
        for routing in routings:
            for pass_name, work_of in (("forward", _forward_of), ("forward+backward", step_of)):
                torch.manual_seed(0)
                work = {name: work_of(build(name, shape, routing), shape) for name in available(routing)}
                seconds = take_turns(work, rounds=rounds if work_of is _forward_of else max(3, rounds // 2))
                result.tables[f"{pass_name}, {routing}, {count} threads"] = compare(seconds, "floor")
    if memory:
        for name in available():
            for backward, label in ((False, "forward"), (True, "forward+backward")):
                key = f"peak memory MB, {label}, {name}"
                result.figures[key] = peak_megabytes(build_work, name, shape, "natural", backward, max(threads))
    result.bars = _bars(result, max(threads))
    return result


def _bars(result: Result, threads: int) -> list[Bar]:
    """The promises about this benchmark; where products are faster (AVX-512), all that is not a product counts more."""
    forward, step = (f"{name}, natural, {threads} threads" for name in ("forward", "forward+backward"))
    if forward not in result.tables:
        return []
    ratio, wide = partial(result.ratio, forward), torch.backends.cpu.get_cpu_capability() == "AVX512"
    found = [
        Bar("forward, ERMoE / floor", ratio(_EIGEN), 1.05 if wide else 1.00),
        Bar("forward, ERMoE / our V-MoE", ratio(_EIGEN, to=_VMOE), 0.95 if wide else 0.92),
        Bar("forward, our V-MoE / floor", ratio(_VMOE), 1.08),
        Bar("forward, ERMoE merged at full rank / our V-MoE", ratio(_MERGED, to=_VMOE), 1.05),
        Bar("forward+backward, ERMoE / floor", result.ratio(step, _EIGEN), 1.10),
        Bar("forward+backward, ERMoE / our V-MoE", result.ratio(step, _EIGEN, to=_VMOE), 0.92),
    ]
    for name, table, limit in (("forward", forward, 0.97 if wide else 0.92), ("forward+backward", step, 0.80)):
        backends = [row for row in result.tables[table] if row.name.startswith(("transformers", "Mixtral"))]
        if backends:
            fastest = min(backends, key=lambda row: row.ratio).name
            over = result.ratio(table, _EIGEN, to=fastest)
            found.append(Bar(f"{name}, ERMoE / fastest of transformers", over, limit))
    return found


def routing(shape: Shape, *, rounds: int, threads: int) -> Result:
    """What the decision costs, as a share of the layer's forward pass at several routing ranks."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    result = Result("routing", {"shape": repr(shape), "rounds": rounds, "threads": threads}, reference="layer")
    x, context = tokens(shape)
    for route_rank in (16, 32, 56, 96):
        layer = eigen_layer(shape, route_rank=route_rank).eval()
        with torch.inference_mode():
            decided = layer.route(x, context)
        work = {
            "layer": inferring(layer, x, context),
            "routing": inferring(_decide, layer, x, context),
            "choice and sorting": inferring(_choose, layer, decided),
        }
        table = f"route_rank {route_rank}"
        result.tables[table] = compare(take_turns(work, rounds=rounds), "layer")
        if route_rank in _SHARES:
            share = result.ratio(table, "routing")
            result.bars.append(Bar(f"routing / layer at route_rank {route_rank}", share, _SHARES[route_rank]))
    return result


def _decide(layer: MoE, x: Tensor, context: Context) -> object:
    return plan(layer.route(x, context))


def _choose(layer: MoE, decided: Routing) -> object:
    assert isinstance(layer.router, TopKRouter)
    assert decided.score_TE is not None
    return plan(layer.router.choose(decided.score_TE))


def scaling(shape: Shape, *, rounds: int, threads: int) -> Result:
    """How cost grows with experts, tokens, k and rank; the first case of each sweep is the reference of its ratios."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    result = Result("scaling", {"shape": repr(shape), "rounds": rounds, "threads": threads}, reference="first case")
    sweeps: dict[str, dict[str, tuple[Shape, dict[str, Any]]]] = {
        "experts, E·r fixed": {
            f"E={count}": (replace(shape, num_experts=count), {"route_rank": _COLUMNS // count})
            for count in (8, 16, 32, 64)
        },
        "tokens": {
            f"{n} images": (replace(shape, images=n), {}) for n in (shape.images, 2 * shape.images, 4 * shape.images)
        },
        "experts per token": {f"k={k}": (replace(shape, top_k=k), {}) for k in (1, 2, 3, 4)},
        "rank": {f"R={rank}": (shape, {"rank": rank}) for rank in (128, 256, 504, 768)},
    }
    for sweep, cases in sweeps.items():
        work = {name: _forward_of(eigen_layer(case, **options), case) for name, (case, options) in cases.items()}
        result.tables[sweep] = compare(take_turns(work, rounds=rounds), next(iter(work)))
    experts = sweeps["experts, E·r fixed"]
    bare = {name: products_of(eigen_layer(case, **options), case) for name, (case, options) in experts.items()}
    result.tables["experts, their products alone"] = compare(take_turns(bare, rounds=rounds), "E=8")
    extra = {name: peak_megabytes(_build_eigen, *experts[name], threads) for name in ("E=8", "E=64")}
    result.figures |= {f"peak memory MB beyond parameters, {name}": value for name, value in extra.items()}
    result.bars = [
        Bar("forward, 64 experts / 8 experts", result.ratio("experts, E·r fixed", "E=64"), 1.4),
        Bar("memory beyond parameters, 64 experts / 8 experts", extra["E=64"] / extra["E=8"], 1.1),
        Bar("forward, 4 times the tokens", result.ratio("tokens", f"{4 * shape.images} images"), 4.2),
    ]
    return result


def products_of(layer: Any, shape: Shape) -> Callable[[], object]:
    """The experts' products and nothing else, equally many rows each: the floor under the sweep of experts."""
    rows = tokens(shape)[0].flatten(0, 1).repeat(shape.top_k, 1)
    counts = torch.full((shape.num_experts,), len(rows) // shape.num_experts)
    return inferring(layer.experts, rows[: int(counts.sum())], counts)


def _build_eigen(shape: Shape, options: dict[str, Any], threads: int) -> Callable[[], object]:
    """One layer ready to run, for the process that measures its memory."""
    torch.set_num_threads(threads)
    return _forward_of(eigen_layer(shape, **options), shape)
