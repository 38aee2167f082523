"""`ermoe bench routing`: what the decision costs, as a share of the layer's forward pass, and where the rest goes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ermoe.nn import MoE, Routing, TopKRouter
from ermoe.nn.dispatch import combine, gather, plan
from ermoe.studies.bench.clock import compare, take_turns
from ermoe.studies.bench.peers import Shape, build, eigen_layer, tokens
from ermoe.studies.bench.result import Bar, Result

_LIMITS = {56: 0.10, 32: 0.06}
PARTS = "parts of a forward pass, over the floor"


def run(shape: Shape, *, rounds: int, threads: int) -> Result:
    """Scores, choice, weights and sorting beside the whole layer, for several routing ranks."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    result = Result("routing", {"shape": repr(shape), "rounds": rounds, "threads": threads}, reference="layer")
    x, context = tokens(shape)
    for route_rank in (16, 32, 56, 96):
        layer = eigen_layer(shape, route_rank=route_rank).eval()
        with torch.inference_mode():
            work: dict[str, Callable[[], object]] = {
                "layer": partial(layer, x, context),
                "routing": partial(_decide, layer, x, context),
                "choice and sorting": partial(_choose, layer, layer.route(x, context)),
            }
            seconds = take_turns(work, rounds=rounds)
        table = f"route_rank {route_rank}"
        result.tables[table] = compare(seconds, "layer")
        if route_rank in _LIMITS:
            share = result.ratio(table, "routing")
            result.bars.append(Bar(f"routing / layer at route_rank {route_rank}", share, _LIMITS[route_rank]))
    with torch.inference_mode():
        work = {"floor": partial(build("floor", shape).eval(), x)}
        for name in ("ermoe R=504 r=56", "our V-MoE"):
            whole = build(name, shape).eval()
            assert isinstance(whole, MoE)
            work |= parts(name, whole, x, context)
        result.tables[PARTS] = compare(take_turns(work, rounds=rounds), "floor")
    return result


def parts(name: str, layer: MoE, x: Tensor, context: Tensor) -> dict[str, Callable[[], object]]:
    """A whole layer, and each of its steps alone on what the step before it made."""
    x_TD, pairs = x.flatten(0, 1), plan(layer.route(x, context))
    rows_AD = gather(x_TD, pairs)
    return {
        name: partial(layer, x, context),
        f"{name}: routing": partial(_decide, layer, x, context),
        f"{name}: gathering": partial(gather, x_TD, pairs),
        f"{name}: products": partial(layer.experts, rows_AD, pairs.count_E),
        f"{name}: combining": partial(combine, layer.experts(rows_AD, pairs.count_E), pairs),
    }


def _decide(layer: MoE, x: Tensor, context: Tensor) -> object:
    return plan(layer.route(x, context))


def _choose(layer: MoE, routing: Routing) -> object:
    assert isinstance(layer.router, TopKRouter)
    assert routing.score_TE is not None
    return plan(layer.router.choose(routing.score_TE))
