"""What each router costs: one layer, all routers, forward and training step, as ratios to a learned gate without loss.

    python benchmarks/routers_layer.py [--rounds 15] [--threads 2]

Same tokens, same experts' shape (dense weights), 8 experts, 2 a token; BASE has 1 and so half the expert work, Soft MoE
has as many slots as the others have pairs; "dense" is one feed-forward network of the same width, a single expert for
every token. The eigen row routes with a basis of rank 24 beside dense experts, so that only routing differs.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from rich.console import Console
from timm.layers import Mlp
from torch import Tensor, nn

import ermoe
from ermoe.nn.registry import build_layer
from ermoe.nn.rivals.assignment import balanced_assignment
from ermoe.studies.bench.measure import compare, take_turns
from ermoe.studies.bench.result import Result, save, show

RESULTS = Path(__file__).parent / "results"
REFERENCE = "logit"


@dataclass(frozen=True)
class Shape:
    """Tokens and widths of the layer (ViT-Ti by default)."""

    images: int = 16
    tokens: int = 197
    dim: int = 192
    rounds: int = 15
    threads: int = 2


def layers(shape: Shape) -> dict[str, nn.Module]:
    """The candidates."""
    options: dict[str, dict[str, Any]] = {
        "eigen": {"experts": "dense", "route_rank": 24},
        "logit": {},
        "loss-free": {},
        "cosine": {},
        "emoe": {},
        "v-moe": {},
        "expert-choice": {},
        "base": {},
        "soft": {"num_tokens": shape.tokens, "capacity_factor": 2.0},
    }
    torch.manual_seed(0)
    routed = {name: build_layer(name, shape.dim, **own) for name, own in options.items()}
    return {"dense": Dense(shape.dim, 4 * shape.dim), **routed}


class Dense(Mlp):
    """timm's feed-forward network, with the signature of the others."""

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        return super().forward(x)


def forward(layer: nn.Module, x: Tensor, context: Tensor) -> Callable[[], object]:
    def run() -> object:
        layer.eval()
        with torch.inference_mode():
            return layer(x, context)

    return run


def step(layer: nn.Module, x: Tensor, context: Tensor) -> Callable[[], object]:
    def run() -> object:
        layer.train()
        layer.zero_grad()
        (layer(x, context).square().mean() + ermoe.auxiliary_loss(layer)).backward()
        ermoe.update_balance(layer)
        return None

    return run


def assignment_seconds(num_tokens: int) -> float:
    """Median over five, to 8 experts."""
    score_TE = torch.randn(num_tokens, 8, generator=torch.Generator().manual_seed(2))
    return statistics.median(take_turns({"solve": lambda: balanced_assignment(score_TE)}, rounds=5)["solve"])


def main(shape: Shape) -> None:
    torch.set_num_threads(shape.threads)
    result = Result("routers_layer", asdict(shape), reference=REFERENCE)
    x, context = torch.randn(2, shape.images, shape.tokens, shape.dim, generator=torch.Generator().manual_seed(1))
    candidates = layers(shape)
    for table, work_of in (("forward", forward), ("training step", step)):
        work = {name: work_of(layer, x, context) for name, layer in candidates.items()}
        result.tables[table] = compare(take_turns(work, rounds=shape.rounds), REFERENCE)
    for num_tokens in (1576, 25216):
        result.figures[f"seconds of BASE's exact assignment, {num_tokens} tokens"] = assignment_seconds(num_tokens)
    show(result, Console())
    save(result, RESULTS)


if __name__ == "__main__":
    main(tyro.cli(Shape))
