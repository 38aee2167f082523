"""Soft MoE: experts see mixtures of tokens, tokens get mixtures of expert outputs (Puigcerver et al. 2024).

Letters: G groups (images) of S tokens, D width, E experts, P slots per expert, Q = E·P slots, T = G·S tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor

from ermoe.nn.attention import Context
from ermoe.nn.capacity import places
from ermoe.nn.experts import Experts
from ermoe.nn.layer import MixtureLayer
from ermoe.nn.precision import full_precision, widen
from ermoe.nn.routing import Routing
from ermoe.nn.settings import LayerSettings
from ermoe.nn.start import Start, parameter
from ermoe.nn.tracing import has_static_shapes

_NORM_EPS = 1e-6  # inside the root, as in the reference


@dataclass(frozen=True)
class Soft(LayerSettings):
    """The options of Soft MoE.

    Args:
        slots_per_expert: P; by default ``num_tokens`` · ``capacity_factor`` / E rounded (half to even, at least 1).
            Without ``num_tokens`` it is 1, the reference's choice for many experts.
        noise_std: of Gaussian noise on the logits in training.
    """

    slots_per_expert: int | None = None
    num_tokens: int | None = None
    capacity_factor: float = 1.0
    noise_std: float = 0.0

    def __post_init__(self) -> None:
        if self.slots_per_expert is not None and self.slots_per_expert < 1:
            raise ValueError(f"slots_per_expert={self.slots_per_expert}: every expert needs at least one slot")

    def layer(self, dim: int, experts: Experts, shared: Experts | None = None, **start: Unpack[Start]) -> SoftMoE:
        return SoftMoE(dim, experts, self, shared, **start)


class SoftMoE(MixtureLayer):
    """Every expert has P slots; a slot's input is a convex mixture of the tokens of an image, and its output returns
    to every token in proportion.

    Logits are scale · ⟨x / ‖x‖, φ / ‖φ‖⟩ with learned slot vectors φ and a learned scale. Dispatch is their softmax
    over tokens, combine their softmax over all slots; the tokens that are mixed are the raw ones. Nothing is chosen,
    so nothing is dropped and every slot gets a gradient. A token's output depends on the rest of its image, on other
    images it doesn't.

    `route` tells, for analyses, which expert has the largest share Σ_p C in each token.

    >>> from ermoe.nn import build_experts
    >>> layer = SoftMoE(16, build_experts(16, 32, num_experts=4), Soft(num_tokens=12))
    >>> layer(torch.randn(2, 12, 16)).shape, layer.slots_per_expert
    (torch.Size([2, 12, 16]), 3)
    """

    def __init__(
        self, dim: int, experts: Experts, settings: Soft, shared: Experts | None = None, **start: Unpack[Start]
    ) -> None:
        super().__init__(experts, shared=shared)
        self.settings = settings
        self.slots_per_expert = settings.slots_per_expert or places(
            settings.num_tokens or 0, 1, experts.num_experts, settings.capacity_factor, rounding="round"
        )
        self.phi = parameter(dim, experts.num_experts, self.slots_per_expert, **start)
        self.scale = parameter(**start)
        self.reset_router(start.get("generator"))

    def reset_router(self, generator: torch.Generator | None = None) -> None:
        """Slots of unit variance, and a scale of 1."""
        if not self.phi.is_meta:
            with torch.no_grad():
                self.phi.normal_(std=self.phi.shape[0] ** -0.5, generator=generator)
                self.scale.fill_(1)

    def forward(self, x: Tensor, context: Tensor | Context | None = None, mask: Tensor | None = None) -> Tensor:
        """As every layer, but ``context`` is ignored; padded tokens enter no slot."""
        x_GSD, _, mask_GS = self.grouped(x, None, mask)
        dispatch_GSQ, combine_GSQ = self.weights(x_GSD, mask_GS)
        if self.observers:
            self.tell_observers(self._summary(combine_GSQ.detach(), mask_GS))
        slot_GQD = dispatch_GSQ.mT.to(x.dtype) @ x_GSD
        output_GQD = self._run_experts(slot_GQD)
        return self.with_shared(combine_GSQ.to(output_GQD.dtype) @ output_GQD, x, mask)

    def route(self, x: Tensor, context: Tensor | Context | None = None, mask: Tensor | None = None) -> Routing:
        """The expert with the largest share in each token's output, as a top-1 routing; experts do not run."""
        x_GSD, _, mask_GS = self.grouped(x, None, mask)
        return self._summary(self.weights(x_GSD, mask_GS)[1], mask_GS)

    def weights(self, x_GSD: Tensor, mask_GS: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Dispatch and combine weights, (G, S, Q) each, in at least float32; zero for padded tokens."""
        with full_precision(x_GSD):
            x_GSD = widen(x_GSD)
            phi_DQ = _unit(widen(self.phi).flatten(1), dim=0)
            logit_GSQ = _unit(x_GSD, dim=-1) @ (phi_DQ * widen(self.scale))
            if self.training and self.settings.noise_std > 0:
                logit_GSQ = logit_GSQ + self.settings.noise_std * torch.randn_like(logit_GSQ)
            combine_GSQ = logit_GSQ.softmax(-1)
            if mask_GS is None:
                return logit_GSQ.softmax(1), combine_GSQ
            real_GS1 = mask_GS.unsqueeze(-1)
            lowest = torch.finfo(logit_GSQ.dtype).min  # not −∞: an image of nothing but padding would give NaN
            return logit_GSQ.masked_fill(~real_GS1, lowest).softmax(1) * real_GS1, combine_GSQ * real_GS1

    def _run_experts(self, slot_GQD: Tensor) -> Tensor:
        num_groups, _, dim = slot_GQD.shape
        num_experts = self.experts.num_experts
        slot_EGPD = slot_GQD.view(num_groups, num_experts, self.slots_per_expert, dim).transpose(0, 1)
        slot_EAD = slot_EGPD.reshape(num_experts, num_groups * self.slots_per_expert, dim)
        if self.every_expert or has_static_shapes():  # equal loads need no sorting and no grouped product
            output_EAD = self.experts.batched(slot_EAD)
        else:
            count_E = torch.full((num_experts,), slot_EAD.shape[1], device=slot_EAD.device)
            output_EAD = self.experts(slot_EAD.flatten(0, 1), count_E)
        output_EGPD = output_EAD.reshape(slot_EGPD.shape)
        return output_EGPD.transpose(0, 1).flatten(1, 2)

    def _summary(self, combine_GSQ: Tensor, mask_GS: Tensor | None) -> Routing:
        num_experts = self.experts.num_experts
        share_TE = combine_GSQ.reshape(-1, num_experts, self.slots_per_expert).sum(-1)
        weight_T1, expert_T1 = share_TE.max(-1, keepdim=True)
        mask_T = None if mask_GS is None else mask_GS.reshape(-1)
        return Routing.from_choice(
            expert_T1,
            weight_T1,
            num_experts=num_experts,
            kept_TK=None if mask_T is None else mask_T.unsqueeze(1),
            score_TE=share_TE,
            mask_T=mask_T,
        )


def _unit(vectors: Tensor, dim: int) -> Tensor:
    return vectors * (vectors.square().sum(dim, keepdim=True) + _NORM_EPS).rsqrt()
