"""What a training step asks of every device of a cluster, by how processes share a model: memory and bytes, on paper.

Figures are for float32 and AdamW, and an even routing. An all-reduce of b bytes sends 2 b (W − 1) / W from every one of
W processes, a gather or a scattered sum of b bytes in all b (W − 1) / W; rows stay at home with a chance of 1 / n.
`ermoe bench scale` puts what a machine really sends beside them.

Letters: W processes, n of them that share the experts of a layer, T tokens of a process, K experts per token, D width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torch import nn

from ermoe.errors import UserError
from ermoe.models.backbones import family_of
from ermoe.models.passes import input_shape
from ermoe.nn import MoE, moe_layers

_NUMBER = 4
_STATE = 4 * _NUMBER  # a parameter, its gradient, and two moments of AdamW


@dataclass(frozen=True, slots=True)
class Layout:
    """A way of sharing a model among ``num_processes``, of which ``expert_processes`` share the experts of a layer."""

    parallel: str
    num_processes: int
    expert_processes: int = 1

    @property
    def copies(self) -> int:
        """Groups of processes that have the same experts, as copies or as shards."""
        return self.num_processes // self.expert_processes


@dataclass(frozen=True, slots=True)
class Size:
    """What the formulas know of a model: numbers of parameters, and numbers that a token or a layer sends.

    ``row`` is Σ_layers K D, ``columns`` Σ_layers E r D of the routing columns that experts lend, ``largest_block`` the
    parameters of the largest transformer block, and ``experts_in_it`` those of them that are routed experts.
    """

    experts: int
    rest: int
    row: float
    columns: int
    largest_block: int
    experts_in_it: int
    tokens: int
    expert_counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes on each device: ``held`` for good, ``gathered`` for the moment, ``sent`` in a step, by what they are."""

    held: float
    gathered: float
    sent: dict[str, float] = field(default_factory=dict)

    @property
    def memory(self) -> float:
        """Without activations."""
        return self.held + self.gathered


def size_of(model: nn.Module) -> Size:
    """Reads off a model, which may be on the meta device."""
    layers = [layer for layer in moe_layers(model).values() if isinstance(layer, MoE) and layer.experts.num_experts > 1]
    if not layers:
        raise UserError("this model has no experts to share out: choose a sparse one")
    family = family_of(model)
    experts = sum(p.numel() for layer in layers for p in layer.experts.parameters())
    blocks = [(sum(p.numel() for p in block.parameters()), block) for _, block in family.blocks(model)]
    largest, block = max(blocks, key=lambda pair: pair[0])
    inside = sum(p.numel() for layer in layers if layer in set(block.modules()) for p in layer.experts.parameters())
    columns = 0
    for layer in layers:
        basis, score = layer.experts.token_basis, layer.score
        if basis is not None and score is not None and score.needs_basis and score.basis is None:
            columns += basis[:, :, : score.route_rank].numel()
    return Size(
        experts=experts,
        rest=sum(p.numel() for p in model.parameters()) - experts,
        row=sum(layer.router.experts_per_token * layer.experts.dim for layer in layers),
        columns=columns,
        largest_block=largest,
        experts_in_it=inside,
        tokens=_tokens(model),
        expert_counts=tuple(sorted({layer.experts.num_experts for layer in layers})),
    )


def _tokens(model: nn.Module) -> int:
    from ermoe.models.count import measure

    return measure(model, (1, *input_shape(model, None)))[1]


def needs(size: Size, layout: Layout, *, images: int) -> Needs:
    """What every device holds and sends in a step with so many images on each.

    >>> numbers = {"experts": 800, "rest": 200, "largest_block": 300, "experts_in_it": 200, "columns": 0}
    >>> size = Size(**numbers, row=8.0, tokens=10, expert_counts=(4,))
    >>> needs(size, Layout("ddp", 4), images=1).held, needs(size, Layout("ep", 4, 4), images=1).held
    (16000, 6400.0)
    """
    W, n = layout.num_processes, layout.expert_processes
    X, Y = size.experts, size.rest
    if layout.parallel == "ddp":
        return Needs(_STATE * (X + Y), 0, {"gradients": _reduced(X + Y, W)})
    if layout.parallel == "fsdp":
        moved = {"parameters, twice": 2 * _gathered(X + Y, W), "gradients": _gathered(X + Y, W)}
        return Needs(_STATE * (X + Y) / W, 2 * _NUMBER * size.largest_block, moved)
    # Rows go to an expert and come back, and so do their gradients.
    tokens = {"tokens": 4 * _NUMBER * size.row * size.tokens * images * (n - 1) / n}
    if layout.parallel == "ep":
        columns = 2 * _gathered(size.columns, n) + _reduced(size.columns / n, layout.copies)
        gradients = _reduced(Y, W) + _reduced(X / n, layout.copies)
        return Needs(_STATE * (X / n + Y), 0, {**tokens, "routing columns": columns, "gradients": gradients})
    gathered = 2 * _NUMBER * (size.largest_block - size.experts_in_it * (1 - 1 / n))
    shards = _gathered(Y, W) + _gathered(X / n, layout.copies)
    columns = 2 * _gathered(size.columns, W)
    moved = {"routing columns": columns, "parameters, twice": 2 * shards, "gradients": shards}
    return Needs(_STATE * (X + Y) / W, gathered, {**tokens, **moved})


def _reduced(numbers: float, processes: int) -> float:
    return 2 * _gathered(numbers, processes)


def _gathered(numbers: float, processes: int) -> float:
    return _NUMBER * numbers * (processes - 1) / processes


def layouts(size: Size, hosts: int, devices: int) -> list[Layout]:
    """All ways worth comparing: experts are shared within a host, or by as many processes as can."""
    W = hosts * devices
    most = math.gcd(W, *size.expert_counts)
    shared = sorted({math.gcd(devices, most), most} - {1})
    return [
        Layout("ddp", W),
        Layout("fsdp", W),
        *(Layout(how, W, n) for how in ("ep", "fsdp+ep") for n in shared if how == "ep" or n < W),
    ]


def seconds(needed: Needs, layout: Layout, hosts: int, devices: int, *, network: float, link: float) -> float:
    """What the slower of both links takes for a step, in bytes a second each, if nothing is hidden behind computing.

    Rows cross hosts if the experts of a layer do: with n processes in hosts of d, (n − d) / (n − 1) of what is sent.
    Everything else passes every host once in a ring, at the pace of the network.
    """
    rows = needed.sent.get("tokens", 0.0)
    others = sum(needed.sent.values()) - rows
    n = layout.expert_processes
    outside = 0.0 if hosts == 1 or n <= devices else rows * (n - devices) / (n - 1)
    ring = others / (link if hosts == 1 else network)
    return ring + max(outside / network, (rows - outside) / link)
