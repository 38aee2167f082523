"""The cosine router of Tutel and Swin-MoE: a small projection, compared with one direction per expert.

Letters: G groups of S tokens, T = G·S tokens, D width, P projected width, E experts, K experts per token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ermoe.nn.precision import full_precision, widen
from ermoe.nn.rivals.losses import gshard_loss
from ermoe.nn.rivals.router import RivalRouter, weighted_top_k
from ermoe.nn.routers import check_top_k
from ermoe.nn.routing import Routing
from ermoe.nn.settings import RouterSettings
from ermoe.nn.start import Start, parameter

_LARGEST_SCALE = 100.0


@dataclass(frozen=True)
class Cosine(RouterSettings):
    """The options of the cosine router.

    Args:
        top_k: experts per token K.
        proj_dim: width P in which tokens and expert directions are compared.
        temperature: 1 / s at the start.
        gshard_weight: of the GShard loss over all tokens of a forward pass; 0 leaves it out.
    """

    top_k: int = 2
    proj_dim: int = 256
    temperature: float = 0.5
    gshard_weight: float = 0.01

    def __post_init__(self) -> None:
        if not self.temperature >= 1 / _LARGEST_SCALE:
            raise ValueError(f"temperature={self.temperature}: need at least {1 / _LARGEST_SCALE}")

    def router(self, dim: int, num_experts: int, **start: Unpack[Start]) -> CosineRouter:
        return CosineRouter(dim, num_experts, self, **start)


class CosineRouter(RivalRouter):
    """Gates are softmax(s · cos(x A + a, m_e)) with a learned scale s ≤ 100; the K largest share a weight of 1.

    >>> CosineRouter(16, 4, Cosine())(torch.randn(2, 9, 16)).weight_TK.sum(-1).allclose(torch.ones(18))
    True
    """

    top_k: int
    settings: Cosine

    def __init__(self, dim: int, num_experts: int, settings: Cosine, **start: Unpack[Start]) -> None:
        super().__init__()
        check_top_k(settings.top_k, num_experts)
        self.projection = nn.Linear(dim, settings.proj_dim, device=start.get("device"), dtype=start.get("dtype"))
        self.direction_PE = parameter(settings.proj_dim, num_experts, **start)
        self.log_scale = parameter(1, **start)
        self.num_experts = num_experts
        self.top_k = settings.top_k
        self.settings = settings
        self.reset_parameters(start.get("generator"))

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """A linear layer's usual start, small random directions, and the starting temperature."""
        if self.log_scale.is_meta:
            return
        bound = self.projection.in_features**-0.5
        with torch.no_grad():
            self.projection.weight.uniform_(-bound, bound, generator=generator)
            self.projection.bias.uniform_(-bound, bound, generator=generator)
            self.direction_PE.normal_(std=0.01, generator=generator)
            self.log_scale.fill_(-math.log(self.settings.temperature))

    def decide(self, x_GSD: Tensor, mask_GS: Tensor | None) -> Routing:
        gate_TE = self.gates(x_GSD.flatten(0, 1))
        mask_T = None if mask_GS is None else mask_GS.reshape(-1)
        routing = self.choose(gate_TE, mask_T)
        if self.training and self.settings.gshard_weight:
            mask_1T = None if mask_T is None else mask_T.unsqueeze(0)
            routing.auxiliary_loss = self.settings.gshard_weight * gshard_loss(gate_TE.unsqueeze(0), mask_1T).squeeze(0)
        return routing

    def gates(self, x_TD: Tensor) -> Tensor:
        """softmax(s · cos), (T, E), in at least float32."""
        with full_precision(x_TD):
            projected_TP = F.linear(widen(x_TD), widen(self.projection.weight), widen(self.projection.bias))
            cosine_TE = F.normalize(projected_TP, dim=1) @ F.normalize(widen(self.direction_PE), dim=0)
            scale = widen(self.log_scale).clamp(max=math.log(_LARGEST_SCALE)).exp()
            return (scale * cosine_TE).softmax(-1)

    def choose(self, gate_TE: Tensor, mask_T: Tensor | None = None) -> Routing:
        """The decision on given gates."""
        # With one expert the plain gate stays, or the router would get no gradient.
        chosen = weighted_top_k(gate_TE, self.top_k, normalised=self.top_k > 1)
        return Routing.from_choice(*chosen, num_experts=self.num_experts, score_TE=gate_TE, mask_T=mask_T)
