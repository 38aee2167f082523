"""`ermoe bench scaling`: how cost grows with experts, tokens, k and rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ermoe.studies.bench.clock import compare, take_turns
from ermoe.studies.bench.layer import forward_of
from ermoe.studies.bench.memory import peak_megabytes
from ermoe.studies.bench.peers import Shape, eigen_layer, tokens
from ermoe.studies.bench.result import Bar, Result

_COLUMNS = 448  # E · r stays at 8 · 56


def build_work(shape: Shape, options: dict[str, Any], threads: int) -> Callable[[], object]:
    """One layer ready to run, for the process that measures its memory."""
    torch.set_num_threads(threads)
    return forward_of(eigen_layer(shape, **options), shape)


def products_of(layer: Any, shape: Shape) -> Callable[[], object]:
    """The experts' products and nothing else, equally many rows each: the floor under the sweep of experts."""
    rows = tokens(shape)[0].flatten(0, 1).repeat(shape.top_k, 1)
    counts = torch.full((shape.num_experts,), len(rows) // shape.num_experts)
    rows = rows[: int(counts.sum())]

    def run() -> object:
        with torch.inference_mode():
            return layer.experts(rows, counts)

    return run


def run(shape: Shape, *, rounds: int, threads: int) -> Result:
    """Four sweeps around the benchmark's shape; the first case of each is the reference of its ratios."""
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
        work = {name: forward_of(eigen_layer(case, **options), case) for name, (case, options) in cases.items()}
        result.tables[sweep] = compare(take_turns(work, rounds=rounds), next(iter(work)))
    experts = sweeps["experts, E·r fixed"]
    bare = {name: products_of(eigen_layer(case, **options), case) for name, (case, options) in experts.items()}
    result.tables["experts, their products alone"] = compare(take_turns(bare, rounds=rounds), "E=8")
    extra = {name: peak_megabytes(build_work, *experts[name], threads) for name in ("E=8", "E=64")}
    result.figures |= {f"peak memory MB beyond parameters, {name}": value for name, value in extra.items()}
    result.bars = [
        Bar("forward, 64 experts / 8 experts", result.ratio("experts, E·r fixed", "E=64"), 1.4),
        Bar("memory beyond parameters, 64 experts / 8 experts", extra["E=64"] / extra["E=8"], 1.1),
        Bar("forward, 4 times the tokens", result.ratio("tokens", f"{4 * shape.images} images"), 4.2),
    ]
    return result
