"""EMoE's router: the shares of a token's energy along the columns of one basis that all experts share (Cheng et al.
2026, arXiv 2601.12137).

Letters: G groups of S tokens, T = G·S tokens, D width, r columns of the basis, E experts, K experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor

from ermoe.nn.attention import Context
from ermoe.nn.precision import widen
from ermoe.nn.rivals.router import RivalRouter, weighted_top_k
from ermoe.nn.routers import check_top_k
from ermoe.nn.routing import Routing
from ermoe.nn.scores import Score
from ermoe.nn.settings import RouterSettings
from ermoe.nn.start import Start, parameter

_COLUMNS = 128  # the authors' choice for a width of 768
_SMALLEST_ENERGY = 1e-20


@dataclass(frozen=True)
class EMoE(RouterSettings):
    """The options of EMoE's router.

    Args:
        top_k: experts per token K.
        route_rank: columns r of the basis; min(128, D) by default.
        temperature: by which logits are divided.
        normalise: weights divided by their sum over the K chosen, so that equal experts keep their outputs. With K = 1
            that leaves the router without gradient. False weighs by the plain gates, as published.
    """

    top_k: int = 2
    route_rank: int | None = None
    temperature: float = 1.0
    normalise: bool = True

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"temperature={self.temperature}: need a positive number")

    def router(self, dim: int, num_experts: int, **start: Unpack[Start]) -> EMoERouter:
        return EMoERouter(dim, num_experts, self, **start)


class EnergyGates(Score):
    """softmax((Σ_r γ_r m_er ε_r + b_e) / τ): gates from the shares ε_r = (Qᵀx)²_r / Σ_r (Qᵀx)²_r.

    Q (D, r) is orthonormal and kept so as every basis is, by `ermoe.orthogonality_loss` and `ermoe.retract`; m is the
    softmax over experts of a learned mask, so that every column is shared out among them.
    """

    needs_basis = True

    def __init__(self, dim: int, num_experts: int, route_rank: int, temperature: float, **start: Unpack[Start]) -> None:
        super().__init__(route_rank)
        self.mask_Er = parameter(num_experts, route_rank, **start)
        self.gamma_r = parameter(route_rank, **start)
        self.bias_E = parameter(num_experts, **start)
        self.temperature = temperature
        self.own_basis(1, dim, **start)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """A random orthonormal basis and mask, γ = 1, b = 0."""
        super().reset_parameters(generator)
        if not self.mask_Er.is_meta:
            with torch.no_grad():
                self.mask_Er.normal_(generator=generator)
                self.gamma_r.fill_(1)
                self.bias_E.zero_()

    def score(self, x_TD: Tensor, context: Tensor | Context | None, basis_EDr: Tensor | None) -> Tensor:
        """In [0, 1], summing to 1 over experts."""
        assert basis_EDr is not None
        energy_Tr = (x_TD @ basis_EDr.squeeze(0)).square()
        share_Tr = energy_Tr / energy_Tr.sum(-1, keepdim=True).clamp_min(_SMALLEST_ENERGY)
        part_Er = widen(self.mask_Er).softmax(0) * widen(self.gamma_r)
        return ((share_Tr @ part_Er.mT + widen(self.bias_E)) / self.temperature).softmax(-1)


class EMoERouter(RivalRouter):
    """Each token takes the K largest gates of `EnergyGates`; no loss, and no offsets.

    >>> EMoERouter(16, 4, EMoE())(torch.randn(2, 9, 16)).weight_TK.sum(-1).allclose(torch.ones(18))
    True
    """

    top_k: int
    settings: EMoE

    def __init__(self, dim: int, num_experts: int, settings: EMoE, **start: Unpack[Start]) -> None:
        super().__init__()
        check_top_k(settings.top_k, num_experts)
        route_rank = min(_COLUMNS, dim) if settings.route_rank is None else settings.route_rank
        if not 1 <= route_rank <= dim:
            raise ValueError(f"route_rank={route_rank}: a basis of width {dim} has 1 to {dim} columns")
        self.gates = EnergyGates(dim, num_experts, route_rank, settings.temperature, **start)
        self.num_experts = num_experts
        self.top_k = settings.top_k
        self.settings = settings

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        self.gates.reset_parameters(generator)

    def decide(self, x_GSD: Tensor, mask_GS: Tensor | None) -> Routing:
        gate_TE = self.gates(x_GSD.flatten(0, 1), None, None)
        chosen = weighted_top_k(gate_TE, self.top_k, normalised=self.settings.normalise)
        mask_T = None if mask_GS is None else mask_GS.reshape(-1)
        return Routing.from_choice(*chosen, num_experts=self.num_experts, score_TE=gate_TE, mask_T=mask_T)
