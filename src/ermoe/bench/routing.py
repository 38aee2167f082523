"""`ermoe bench routing`: what the decision costs, as a share of the layer's forward pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ermoe.bench.clock import compare, take_turns
from ermoe.bench.peers import Shape, eigen_layer, tokens
from ermoe.bench.record import Bar, Result
from ermoe.nn import MoE, Routing, TopKRouter
from ermoe.nn.dispatch import plan

_LIMITS = {56: 0.10, 32: 0.06}


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
    return result


def _decide(layer: MoE, x: Tensor, context: Tensor) -> object:
    return plan(layer.route(x, context))


def _choose(layer: MoE, routing: Routing) -> object:
    assert isinstance(layer.router, TopKRouter)
    assert routing.score_TE is not None
    return plan(layer.router.choose(routing.score_TE))
