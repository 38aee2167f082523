"""The router of CLIP-MoE (Zhang et al. 2024): renormalised top-k of a learned gate, and a balancing loss.

Letters: G groups (images or texts) of S tokens, T = G·S tokens, E experts, K experts per token, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Unpack

from torch import Tensor

from ermoe.nn.rivals.router import GatedRouter, weighted_top_k
from ermoe.nn.routing import Routing
from ermoe.nn.settings import RouterSettings
from ermoe.nn.start import Start


@dataclass(frozen=True)
class ClipMoE(RouterSettings):
    """Experts per token, and the weight of the balancing loss."""

    top_k: int = 2
    balance_weight: float = 0.01

    def router(self, dim: int, num_experts: int, **start: Unpack[Start]) -> ClipMoERouter:
        return ClipMoERouter(dim, num_experts, self, **start)


class ClipMoERouter(GatedRouter):
    """The K largest of softmax(x W), renormalised, in at least float32.

    The balancing loss is E Σ_e f_e m_e, with f_e the choices of expert e per token and m_e its mean gate: K where
    both are equal over experts.
    """

    top_k: int
    settings: ClipMoE

    def __init__(self, dim: int, num_experts: int, settings: ClipMoE, **start: Unpack[Start]) -> None:
        super().__init__(dim, num_experts, settings, top_k=settings.top_k, **start)

    def decide(self, x_GSD: Tensor, mask_GS: Tensor | None) -> Routing:
        gate_TE = self.gate(x_GSD).flatten(0, 1).softmax(-1)
        chosen = weighted_top_k(gate_TE, self.top_k, normalised=True)
        mask_T = None if mask_GS is None else mask_GS.reshape(-1)
        routing = Routing.from_choice(*chosen, num_experts=self.num_experts, score_TE=gate_TE, mask_T=mask_T)
        if self.training:
            routing.auxiliary_loss = self.settings.balance_weight * self._imbalance(gate_TE, routing.count_E, mask_T)
        return routing

    def _imbalance(self, gate_TE: Tensor, count_E: Tensor, mask_T: Tensor | None) -> Tensor:
        real_T = gate_TE.new_ones(len(gate_TE)) if mask_T is None else mask_T.to(gate_TE)
        num_real = real_T.sum().clamp_min(1)
        return self.num_experts * ((count_E / num_real) * (real_T @ gate_TE / num_real)).sum()
