"""`ermoe bench parts`: where the time of an expert layer goes, part by part, at three sizes, forward and in training.

Each part runs alone on what the part before it made. What is left of a layer when it has next to no tokens is its fixed
cost: Python, and the start of every operation. *Unrouted* are the same rows through a single expert, in products as
large as those of the floor: less time no routing can take.

Letters: E experts, K experts per token.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ermoe.models.calibrate import equal_load_offsets
from ermoe.nn import Context, EigenMoE, MoE, Routing, TopKRouter, orthogonality_loss, update_balance
from ermoe.nn.dispatch import Plan, combine, gather, plan
from ermoe.nn.registry import build_layer
from ermoe.nn.rivals.losses import auxiliary_loss
from ermoe.nn.scores import EigenbasisScore, project, project_context
from ermoe.studies.bench.measure import compare, inferring, take_turns
from ermoe.studies.bench.peers import Shape, build, tokens
from ermoe.studies.bench.result import Bar, Result

SHAPES: dict[str, tuple[Shape, dict[str, Any]]] = {
    "ViT-B": (Shape(), {"rank": 504, "route_rank": 56}),
    "DeiT-Ti": (Shape(dim=192, hidden_dim=768), {"rank": 128}),
    "slim": (
        Shape(dim=192, hidden_dim=768, top_k=1),
        {"rank": 96, "score": "prototype", "routing_basis": "shared", "route_rank": 8},
    ),
    "miniature": (Shape(images=100, tokens=17, dim=48, hidden_dim=192), {}),
}
"""The workloads, each with the options of its eigen layer. "slim" is what `ermoe.upcycle(init="clusters")` makes of
DeiT-Ti; with one expert a token, its floor is one dense network."""
_LIMITS = {"DeiT-Ti": 1.05, "slim": 0.75}  # of the forward pass over the floor
PASSES = ("forward", "training")
_ONLY_IN_TRAINING = ("penalty", "balance")


@dataclass(frozen=True, slots=True)
class Part:
    """A function of tensors, and what it is given; ``owner`` holds the parameters that it learns."""

    work: Callable[..., Tensor]
    given: tuple[Tensor, ...]
    owner: nn.Module

    def forward(self) -> Callable[[], object]:
        """Inference."""
        self.owner.eval()
        return inferring(self.work, *self.given)

    def training(self) -> Callable[[], object]:
        """Forward and backward, with gradients for what it is given and for its parameters."""
        self.owner.train()
        leaves = [tensor.clone().requires_grad_(tensor.is_floating_point()) for tensor in self.given]

        def run() -> None:
            for tensor in (*leaves, *self.owner.parameters()):
                tensor.grad = None
            output = self.work(*leaves)
            output.backward(torch.ones_like(output))

        return run


def run(*, rounds: int, threads: int) -> Result:
    """A table for each size and pass: every part of both layers over the floor, K dense networks on the same tokens."""
    torch.set_num_threads(threads)
    capability = torch.backends.cpu.get_cpu_capability()
    settings = {"rounds": rounds, "threads": threads, "dtype": "float32", "instructions": capability}
    result = Result("parts", settings, reference="floor")
    for size, (shape, options) in SHAPES.items():
        parts = parts_of(shape, options)
        for name in PASSES:
            work = {part: getattr(own, name)() for part, own in parts.items() if _belongs(part, name)}
            result.tables[table_of(size, name)] = compare(take_turns(work, rounds=rounds), "floor")
    result.bars = [
        Bar(f"forward, ERMoE / floor at the size of {size}", result.ratio(table_of(size, "forward"), "ERMoE"), limit)
        for size, limit in _LIMITS.items()
        if size in SHAPES
    ]
    return result


def table_of(size: str, name: str) -> str:
    """What the table of a size and a pass is called.

    >>> table_of("ViT-B", "forward")
    'ViT-B, forward'
    """
    return f"{size}, {name}"


def parts_of(shape: Shape, options: dict[str, Any]) -> dict[str, Part]:
    """The floor, and each layer with its parts, by name."""
    torch.manual_seed(0)
    x, context = tokens(shape)
    floor = build("floor", shape)
    sizes = {"num_experts": shape.num_experts, "top_k": shape.top_k}
    layers = {
        "ERMoE": build_layer("eigen", shape.dim, shape.hidden_dim, **sizes, **options),
        "V-MoE": build_layer("v-moe", shape.dim, shape.hidden_dim, **sizes, capacity_factor=None),
    }
    found = {"floor": Part(floor, (x,), floor)}
    for name, layer in layers.items():
        assert isinstance(layer, MoE)
        _settle(layer, x, context)
        found[name] = _whole(layer, x, context.alpha_GSS)
        found |= {f"{name}: {part}": own for part, own in _parts_of_layer(layer, x, context).items()}
    return found


@torch.no_grad()
def _settle(layer: MoE, x: Tensor, context: Context) -> None:
    """Equal loads, as offsets have them in use; those of random bases are not."""
    if isinstance(layer.router, TopKRouter) and layer.router.balance is not None:
        score_TE = layer.route(x, context).score_TE
        assert score_TE is not None
        layer.router.balance.offset_E.copy_(equal_load_offsets(score_TE, layer.router.top_k))


def _belongs(part: str, pass_name: str) -> bool:
    return pass_name == "training" or not part.endswith(_ONLY_IN_TRAINING)


def _whole(layer: MoE, x: Tensor, alpha: Tensor) -> Part:
    """The layer with all that a training step asks of it; a copy, for its offsets move with every step."""
    layer = copy.deepcopy(layer)

    def work(x: Tensor, alpha: Tensor) -> Tensor:
        y: Tensor = layer(x, Context(alpha))
        if not torch.is_grad_enabled():
            return y
        total = y.sum() + auxiliary_loss(layer) + orthogonality_loss(layer)
        update_balance(layer)
        return total

    return Part(work, (x, alpha), layer)


def _parts_of_layer(layer: MoE, x: Tensor, context: Context) -> dict[str, Part]:
    """Each part of one layer, on what the part before it made."""
    alpha, x_TD = context.alpha_GSS, x.flatten(0, 1)
    with torch.no_grad():
        routing = layer.route(x, context)
        pairs = plan(routing)
        rows_AD = gather(x_TD, pairs)
        y_AD = layer.experts(rows_AD, pairs.count_E)
    few = layer.experts.num_experts
    found = {
        "route": Part(lambda x, alpha: plan(layer.route(x, Context(alpha))).weight_A, (x, alpha), layer),
        "gather": Part(lambda x_TD: gather(x_TD, pairs), (x_TD,), layer.router),
        "products": Part(lambda rows_AD: layer.experts(rows_AD, pairs.count_E), (rows_AD,), layer.experts),
        "unrouted": Part(lambda rows_AD: layer.experts.one_of_many(rows_AD, 0), (rows_AD,), layer.experts),
        "combine": Part(partial(_combined, pairs), (y_AD, pairs.weight_A), layer.router),
        "fixed cost": _whole(layer, x[:1, :few], alpha[:1, :few, :few]),
    }
    if isinstance(layer.score, EigenbasisScore):
        basis_EDr = layer.score.routing_basis(layer.experts.token_basis)
        assert basis_EDr is not None
        basis_EDr = basis_EDr.detach()
        seen = partial(_context, x_TD, basis_EDr)
        found["of which context"] = Part(seen, (alpha, project(x_TD, basis_EDr)), layer.router)
    if isinstance(layer, EigenMoE):
        found |= {
            "penalty": Part(lambda _: orthogonality_loss(layer), (x_TD[:1],), layer.experts),
            "balance": Part(partial(_balance, copy.deepcopy(layer), routing), (x_TD[:1],), layer.router),
        }
    return found


def _combined(pairs: Plan, y_AD: Tensor, weight_A: Tensor) -> Tensor:
    return combine(y_AD, replace(pairs, weight_A=weight_A))


def _context(x_TD: Tensor, basis_EDr: Tensor, alpha_GSS: Tensor, token_TEr: Tensor) -> Tensor:
    return project_context(Context(alpha_GSS), x_TD, token_TEr, basis_EDr)


def _balance(layer: MoE, routing: Routing, x: Tensor) -> Tensor:
    layer.router.observe(routing)
    update_balance(layer)
    return x.sum()
