"""The ERMoE layer: experts kept as U diag(s) Vᵀ, and a router that borrows the first columns of their U."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Unpack

import torch
from torch import nn

from ermoe.nn.balance import Balance, MeanBalance, OffsetBalance
from ermoe.nn.experts import Experts, build_experts
from ermoe.nn.moe import MoE
from ermoe.nn.routers import OneWayRouter, Router, TopKRouter, check_top_k
from ermoe.nn.scores import EigenbasisScore, EnergyScore, LogitScore, PrototypeScore, Score
from ermoe.nn.start import Start


class EigenMoE(MoE):
    """The ERMoE layer: experts kept as U diag(s) Vᵀ, and a router that borrows the first columns of their U.

    Args:
        dim: width D of the tokens.
        hidden_dim: width of the experts' hidden layer; 4·dim by default.
        num_experts: experts E. A single one is met by every token: there is nothing to route, and nothing is computed.
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
        experts: "eigen", or "dense" for plain weights.
        routing_basis: whose columns route: those of the "experts" themselves (their U), which dense ones do not have;
            bases of the router's "own", one an expert; or one "shared" by all experts, which takes a prototype score
            to tell them apart and costs an E-th. By default that of the experts where they have one.
        gated: SwiGLU-like experts, act(x Wg) · (x Wu).
        act_layer, norm_layer, bias, drop: of the experts' MLPs; see `ermoe.nn.Experts`.
        shared_dim: hidden width of an expert with plain weights that every token meets beside those it is routed to;
            None for none.
        start: ``generator``, source of all random numbers of the initialisation, ``device`` and ``dtype``.
    """

    def __init__(
        self,
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
        routing_basis: str | None = None,
        gated: bool = False,
        act_layer: Callable[[], nn.Module] = nn.GELU,
        norm_layer: Callable[[int], nn.Module] | None = None,
        bias: bool = True,
        drop: float = 0.0,
        shared_dim: int | None = None,
        **start: Unpack[Start],
    ) -> None:
        hidden_dim = 4 * dim if hidden_dim is None else hidden_dim
        rank = min(dim, hidden_dim) if rank is None else rank
        mlp: dict[str, Any] = {"gated": gated, "act_layer": act_layer, "norm_layer": norm_layer}
        build: Callable[..., Experts] = partial(build_experts, dim, **mlp, bias=bias, drop=drop, **start)
        built = build(hidden_dim, num_experts=num_experts, experts=experts, rank=rank)
        shared = None if shared_dim is None else build(shared_dim, num_experts=1)
        router: Router
        if num_experts == 1:
            check_top_k(top_k, num_experts)
            router = OneWayRouter()
        else:
            routing_basis = routing_basis or ("experts" if experts == "eigen" else "own")
            scorer = _build_score(score, dim, num_experts, rank, route_rank, **start)
            _check_routing_basis(routing_basis, experts, scorer)
            if scorer.needs_basis and routing_basis != "experts":
                scorer.own_basis(1 if routing_basis == "shared" else num_experts, dim, **start)
            router = TopKRouter(
                scorer,
                num_experts=num_experts,
                top_k=top_k,
                threshold=threshold,
                below_threshold=below_threshold,
                balance=_build_balance(balance, num_experts, start.get("device")),
                capacity_factor=capacity_factor,
                weight_floor=weight_floor,
            )
        super().__init__(router, built, shared)


def _build_score(
    name: str,
    dim: int,
    num_experts: int,
    rank: int,
    route_rank: int | None,
    **start: Unpack[Start],
) -> Score:
    if name == "logit":
        return LogitScore(dim, num_experts, **start)
    if route_rank is None:
        route_rank = min(max(8, 8 * (rank // (8 * num_experts))), rank)
    if not 1 <= route_rank <= rank:
        raise ValueError(
            f"route_rank={route_rank}: tokens are routed by the first columns of a basis of rank {rank}; "
            f"use 1 <= route_rank <= {rank}"
        )
    if name == "prototype":
        return PrototypeScore(num_experts, route_rank, **start)
    kinds: dict[str, type[Score]] = {"eigenbasis": EigenbasisScore, "energy": EnergyScore}
    if name not in kinds:
        raise ValueError(f"score={name!r}: use 'eigenbasis', 'prototype', 'energy' or 'logit'")
    if route_rank == dim:
        raise ValueError(
            f"route_rank={route_rank} equals dim: a square orthonormal basis preserves lengths and angles, so the "
            f"{name} score would be the same for every expert and rounding would route; use route_rank < {dim}"
        )
    return kinds[name](route_rank)


def _check_routing_basis(name: str, experts: str, score: Score) -> None:
    if name not in ("experts", "own", "shared"):
        raise ValueError(f"routing_basis={name!r}: use 'experts', 'own' or 'shared'")
    if name == "experts" and experts == "dense" and score.needs_basis:
        raise ValueError("routing_basis='experts': dense experts have no basis; use 'own' or 'shared'")
    if name == "shared" and not isinstance(score, PrototypeScore):
        raise ValueError("routing_basis='shared': only score='prototype' tells experts apart that share a basis")


def _build_balance(name: str, num_experts: int, device: torch.device | str | None) -> Balance | None:
    kinds: dict[str, type[Balance] | None] = {"offset": OffsetBalance, "mean": MeanBalance, "none": None}
    if name not in kinds:
        raise ValueError(f"balance={name!r}: use 'offset', 'mean' or 'none' (the paper's rule)")
    kind = kinds[name]
    return None if kind is None else kind(num_experts, device=device)
