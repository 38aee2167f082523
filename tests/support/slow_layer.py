"""The layer written with loops straight from the paper's equations: slow, obvious, and the judge of the fast one.

Everything is done token by token and expert by expert on plain tensors; autograd gives its gradients.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ermoe.nn import Experts, MoE


def slow_cosine(u: Tensor, v: Tensor) -> Tensor:
    if not bool(u.any()) or not bool(v.any()):
        return (u * 0).sum() + (v * 0).sum()
    return (u @ v) / (u.norm() * v.norm())


def slow_score(layer: MoE, x: Tensor, c: Tensor | None, e: int) -> Tensor:
    score = layer.router.score
    name = type(score).__name__
    if name == "LogitScore":
        logits = [x @ score.gate.W[:, i] for i in range(layer.router.num_experts)]
        total = sum(logit.exp() for logit in logits)
        return logits[e].exp() / total
    basis = score.basis if score.basis is not None else layer.experts.token_basis
    U = basis[e if len(basis) > 1 else 0, :, : score.route_rank]  # or one that all experts share
    if name == "EigenbasisScore":
        return slow_cosine(U.T @ x, U.T @ c)
    if name == "PrototypeScore":
        return slow_cosine(U.T @ x, score.psi[e])
    assert name == "EnergyScore"
    if not bool(x.any()):
        return (x * 0).sum()
    return (U.T @ (x / x.norm())).norm()


def slow_choice(layer: MoE, scores: list[Tensor]) -> list[int]:
    """Eq. 6: the chosen experts of one token, best first."""
    router = layer.router
    plain = [s.item() for s in scores]
    offset = [0.0] * len(plain) if router.balance is None else router.balance.offset_E.tolist()
    order = sorted(range(len(plain)), key=lambda e: (-(plain[e] + offset[e]), e))
    if router.below_threshold == "fill":
        eligible = [e for e in order if plain[e] >= router.threshold]
        rest = [e for e in order if plain[e] < router.threshold]
        if layer.router.balance is None:
            return (eligible + rest)[: router.top_k]
        return order[: router.top_k]
    eligible = [e for e in order if plain[e] >= router.threshold][: router.top_k]
    return eligible or [min(range(len(plain)), key=lambda e: (-plain[e], e))]


def slow_linear(linear: torch.nn.Module, e: int, x: Tensor) -> Tensor:
    if hasattr(linear, "U"):
        W = linear.U[e] @ torch.diag(linear.s[e]) @ linear.V[e].T
    else:
        W = linear.W[e]
    y = x @ W
    return y if linear.bias is None else y + linear.bias[e]


def slow_expert(experts: Experts, e: int, x: Tensor) -> Tensor:
    hidden = slow_linear(experts.up, e, x)
    hidden = experts.act(hidden) if experts.gate is None else experts.act(slow_linear(experts.gate, e, x)) * hidden
    return slow_linear(experts.down, e, hidden)


def slow_layer(layer: MoE, x: Tensor, context: Tensor | None, mask: Tensor | None) -> Tensor:
    """The output for (B, N, D) inputs. Capacity counts per sequence, first choices before second ones."""
    return torch.stack(
        [
            _slow_sequence(
                layer, x[b], None if context is None else context[b], [True] * x.shape[1] if mask is None else mask[b]
            )
            for b in range(x.shape[0])
        ]
    )


def _slow_sequence(layer: MoE, x_ND: Tensor, context_ND: Tensor | None, real_N: list[bool] | Tensor) -> Tensor:
    router = layer.router
    score: list[list[Tensor]] = []
    choice: list[list[int]] = []
    for i in range(len(x_ND)):
        c = None if context_ND is None else context_ND[i]
        score.append([slow_score(layer, x_ND[i], c, e) for e in range(router.num_experts)])
        choice.append(slow_choice(layer, score[i]) if real_N[i] else [])
    admitted = [list(chosen) for chosen in choice]
    if router.capacity_factor is not None:
        real = sum(map(bool, real_N))  # padding earns no places
        free = [math.ceil(real * router.top_k * router.capacity_factor / router.num_experts)] * router.num_experts
        admitted = [[] for _ in choice]
        for rank in range(router.top_k):
            for i, chosen in enumerate(choice):
                if rank < len(chosen) and free[chosen[rank]] > 0:
                    free[chosen[rank]] -= 1
                    admitted[i].append(chosen[rank])
    outputs = []
    for i in range(len(x_ND)):
        total = sum(score[i][e].clamp(min=0) + 1e-3 for e in choice[i])
        y = torch.zeros_like(x_ND[i])
        for e in admitted[i]:
            y = y + (score[i][e].clamp(min=0) + 1e-3) / total * slow_expert(layer.experts, e, x_ND[i])
        if layer.shared is not None and real_N[i]:
            y = y + slow_expert(layer.shared, 0, x_ND[i])
        outputs.append(y)
    return torch.stack(outputs)
