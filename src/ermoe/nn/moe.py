"""The mixture-of-experts layer: route, dispatch, run the experts, combine.

Letters: G groups (images) of S tokens, T = G·S tokens, D model width, E experts, A pairs of token and expert.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ermoe.nn.balance import Balance, MeanBalance, OffsetBalance
from ermoe.nn.dispatch import combine, gather, plan
from ermoe.nn.experts import Experts, build_experts
from ermoe.nn.recompute import is_recomputing
from ermoe.nn.routers import Router, TopKRouter
from ermoe.nn.routing import Routing
from ermoe.nn.scores import EigenbasisScore, EnergyScore, LogitScore, PrototypeScore, Score


class MoE(nn.Module):
    """A feed-forward layer in which every token meets only the experts that ``router`` chooses for it.

    ``every_expert = True`` runs all experts on all tokens instead of sorting: E / K times the work, the same
    numbers, and nothing but static matrix products, for exporters that know no other.

    >>> layer = EigenMoE(32, num_experts=4)
    >>> x, context = torch.randn(2, 10, 32), torch.randn(2, 10, 32)
    >>> layer(x, context).shape
    torch.Size([2, 10, 32])
    >>> layer.route(x, context).expert_TK.shape
    torch.Size([20, 2])
    """

    every_expert = False

    def __init__(self, router: Router, experts: Experts) -> None:
        super().__init__()
        if router.num_experts != experts.num_experts:
            raise ValueError(
                f"the router chooses among {router.num_experts} experts, but there are {experts.num_experts}: "
                "build both with the same num_experts"
            )
        self.router = router
        self.experts = experts
        self.observers: list[Callable[[Routing], None]] = []

    def forward(self, x: Tensor, context: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Mixes expert outputs, in the shape of ``x``, (..., N, D).

        ``context`` has the shape of ``x``; ``mask``, (..., N), is True for real tokens. Padded tokens are not routed,
        not counted, and get zeros; what they hold, even NaN, reaches nothing.
        """
        routing = self.route(x, context, mask)
        if self.training:
            self.router.observe(routing)
        if self.observers and not is_recomputing():
            for observer in self.observers:
                observer(routing)
        return self.mix(only_real(x, mask).reshape(-1, x.shape[-1]), routing).view(x.shape).to(x.dtype)

    def route(self, x: Tensor, context: Tensor | None = None, mask: Tensor | None = None) -> Routing:
        """The routing of ``x``, without running the experts and without counting."""
        check_inputs(x, context, mask, dim=self.experts.dim, needs_context=self.router.needs_context)
        context_GSD = None if context is None else groups(only_real(context, mask))
        mask_GS = None if mask is None else groups(mask.unsqueeze(-1)).squeeze(-1)
        routing: Routing = self.router(groups(only_real(x, mask)), context_GSD, mask_GS, self.experts.token_basis)
        return routing

    def mix(self, x_TD: Tensor, routing: Routing) -> Tensor:
        """Σ_e w_e f_e(x) for a given routing, (T, D)."""
        if self.every_expert or (torch.compiler.is_compiling() and not self.experts.prefers_grouped(x_TD)):
            outputs_ETD = self.experts.every_expert(x_TD)
            return torch.einsum("te,etd->td", routing.dense_weights().to(outputs_ETD.dtype), outputs_ETD)
        pairs = plan(routing)
        y_AD = self.experts(gather(x_TD, pairs), pairs.count_E)
        return combine(y_AD, pairs)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Initialises everything, for a layer that was built on the meta device."""
        self.experts.reset_parameters(generator)
        self.router.reset_parameters(generator)


def EigenMoE(  # noqa: N802 (a factory that reads like the layer it makes)
    dim: int,
    hidden_dim: int | None = None,
    *,
    num_experts: int = 8,
    top_k: int = 2,
    rank: int | None = None,
    route_rank: int | None = None,
    threshold: float = 0.5,
    score: str = "eigenbasis",
    balance: str = "offset",
    below_threshold: str = "fill",
    capacity_factor: float | None = None,
    weight_floor: float = 1e-3,
    experts: str = "eigen",
    gated: bool = False,
    act_layer: Callable[[], nn.Module] = nn.GELU,
    bias: bool = True,
    drop: float = 0.0,
    generator: torch.Generator | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> MoE:
    """The ERMoE layer: experts kept as U diag(s) Vᵀ, and a router that borrows the first columns of their U.

    Args:
        dim: width D of the tokens.
        hidden_dim: width of the experts' hidden layer; 4·dim by default.
        num_experts: experts E.
        top_k: experts per token K. With K = 1 the mixing weight is constant, so routing gives the bases no gradient.
        rank: rank R of every expert weight; by default full, min(dim, hidden_dim).
        route_rank: columns r of each basis that route; max(8, 8⌊R / 8E⌋) by default. Must be smaller than dim.
        threshold: a token whose best score is below it fell back.
        score: "eigenbasis" (Eq. 5), "prototype" (Alg. 2), "energy" or "logit" (a learned gate).
        balance: "offset" steers towards equal load, "mean" removes each expert's mean score, "none" is the paper's.
        below_threshold: "fill" always uses K experts, "prune" only those that reach the threshold.
        capacity_factor: experts take at most ⌈N K f / E⌉ tokens of a sequence; None for no limit. A token that an
            expert turns away keeps the weights of its others, which then sum to less than 1.
        weight_floor: ε of the mixing weights, (max(score, 0) + ε) / Σ. The larger, the more even the mixture; 1 learns
            faster from scratch.
        experts: "eigen", or "dense" for plain weights beside a separate routing basis.
        gated: SwiGLU-like experts, act(x Wg) · (x Wu).
        act_layer, bias, drop: of the experts' MLPs.
        generator: source of all random numbers of the initialisation.
    """
    hidden_dim = 4 * dim if hidden_dim is None else hidden_dim
    rank = min(dim, hidden_dim) if rank is None else rank
    shared: dict[str, Any] = {"generator": generator, "device": device, "dtype": dtype}
    built = build_experts(
        dim,
        hidden_dim,
        num_experts=num_experts,
        experts=experts,
        rank=rank,
        gated=gated,
        act_layer=act_layer,
        bias=bias,
        drop=drop,
        **shared,
    )
    if route_rank is None:
        route_rank = min(max(8, 8 * (rank // (8 * num_experts))), rank)
    scorer = _build_score(score, dim, num_experts, rank, route_rank, shared)
    if scorer.needs_basis and experts == "dense":
        scorer.own_basis(num_experts, dim, **shared)
    router = TopKRouter(
        scorer,
        num_experts=num_experts,
        top_k=top_k,
        threshold=threshold,
        below_threshold=below_threshold,
        balance=_build_balance(balance, num_experts, device),
        capacity_factor=capacity_factor,
        weight_floor=weight_floor,
    )
    return MoE(router, built)


def _build_score(
    name: str,
    dim: int,
    num_experts: int,
    rank: int,
    route_rank: int,
    shared: dict[str, Any],
) -> Score:
    if name == "logit":
        return LogitScore(dim, num_experts, **shared)
    if not 1 <= route_rank <= rank:
        raise ValueError(
            f"route_rank={route_rank}: tokens are routed by the first columns of a basis of rank {rank}; "
            f"use 1 <= route_rank <= {rank}"
        )
    if name == "prototype":
        return PrototypeScore(num_experts, route_rank, **shared)
    kinds: dict[str, type[Score]] = {"eigenbasis": EigenbasisScore, "energy": EnergyScore}
    if name not in kinds:
        raise ValueError(f"score={name!r}: use 'eigenbasis', 'prototype', 'energy' or 'logit'")
    if route_rank == dim:
        raise ValueError(
            f"route_rank={route_rank} equals dim: a square orthonormal basis preserves lengths and angles, so the "
            f"{name} score would be the same for every expert and rounding would route; use route_rank < {dim}"
        )
    return kinds[name](route_rank)


def _build_balance(name: str, num_experts: int, device: torch.device | str | None) -> Balance | None:
    kinds: dict[str, type[Balance] | None] = {"offset": OffsetBalance, "mean": MeanBalance, "none": None}
    if name not in kinds:
        raise ValueError(f"balance={name!r}: use 'offset', 'mean' or 'none' (the paper's rule)")
    kind = kinds[name]
    return None if kind is None else kind(num_experts, device=device)


def groups(x: Tensor) -> Tensor:
    """(..., N, D) as (G, S, D)."""
    return x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:])


def only_real(x: Tensor, mask: Tensor | None) -> Tensor:
    """``x`` with zeros in place of padding: times a weight of zero, NaN would still be NaN."""
    return x if mask is None else x.masked_fill(~mask.unsqueeze(-1), 0)


def check_inputs(x: Tensor, context: Tensor | None, mask: Tensor | None, *, dim: int, needs_context: bool) -> None:
    """Raises a ValueError that says what is wrong with a layer's input."""
    if x.dim() < 2:
        raise ValueError(f"x has shape {tuple(x.shape)}: need (..., tokens, width)")
    if x.shape[-1] != dim:
        raise ValueError(f"x has width {x.shape[-1]}, the experts have {dim}: build the layer with dim={x.shape[-1]}")
    if context is None and needs_context:
        raise ValueError(
            "this layer scores a token against its attention context, and without one every score is 1: pass "
            "context= (see ermoe.nn.ContextAttention), or build the layer with score='prototype', 'energy' or 'logit'"
        )
    if context is not None and context.shape != x.shape:
        raise ValueError(f"context has shape {tuple(context.shape)}, x has {tuple(x.shape)}: they must be equal")
    if mask is not None and mask.shape != x.shape[:-1]:
        raise ValueError(f"mask has shape {tuple(mask.shape)}: need {tuple(x.shape[:-1])}, True for real tokens")
    if mask is not None and mask.dtype != torch.bool:
        raise ValueError(f"mask is {mask.dtype}: need torch.bool, True for real tokens")
    if not torch.compiler.is_compiling() and torch.is_anomaly_enabled():
        for name, tensor in (("x", x), ("context", context)):
            if tensor is not None and not bool(tensor.isfinite().all()):
                raise ValueError(f"{name} holds NaN or infinity (checked because torch's anomaly detection is on)")
