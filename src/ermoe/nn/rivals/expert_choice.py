"""Expert choice: every expert takes the tokens that suit it best (Zhou et al. 2022; V-MoE's form of it).

Letters: G groups (images) of S tokens, D width, E experts, C places per expert and group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor

from ermoe.nn.capacity import places, places_per_group
from ermoe.nn.order import falling_order
from ermoe.nn.rivals.router import GatedRouter
from ermoe.nn.routing import Routing, count_pairs
from ermoe.nn.settings import RouterSettings
from ermoe.nn.start import Start
from ermoe.nn.tracing import has_static_shapes


@dataclass(frozen=True)
class ExpertChoice(RouterSettings):
    """The options of expert choice.

    Args:
        top_k: experts a token meets on average.
        capacity_factor: C = ⌈S f / E⌉, raised to a multiple of ``capacity_multiple``; ``top_k`` by default. Padded
            tokens do not count.
        capacity_multiple: 1, or 4 for the reference's golden vectors.
        noise_std: ε is Gaussian with σ = noise_std / E, in training only.
    """

    top_k: int = 2
    capacity_factor: float | None = None
    capacity_multiple: int = 1
    noise_std: float = 1.0

    def __post_init__(self) -> None:
        if self.capacity_factor is not None and not self.capacity_factor > 0:
            raise ValueError(f"capacity_factor={self.capacity_factor}: use a positive number")
        if self.capacity_multiple < 1:
            raise ValueError(f"capacity_multiple={self.capacity_multiple}: need at least 1")

    def router(self, dim: int, num_experts: int, **start: Unpack[Start]) -> ExpertChoiceRouter:
        return ExpertChoiceRouter(dim, num_experts, self, **start)


class ExpertChoiceRouter(GatedRouter):
    """Each expert takes the C tokens of an image with its largest gates; gates are softmax(x W + ε) over experts.

    The load is equal by construction and needs no loss, but a token may meet no expert at all, or every one. The
    weights are the gates as they are. A token's experts depend on the rest of its image, on other images they don't.

    >>> routing = ExpertChoiceRouter(16, 4, ExpertChoice(top_k=1))(torch.randn(2, 8, 16))
    >>> routing.count_E.tolist()
    [4, 4, 4, 4]
    """

    settings: ExpertChoice

    def __init__(self, dim: int, num_experts: int, settings: ExpertChoice, **start: Unpack[Start]) -> None:
        super().__init__(dim, num_experts, settings, top_k=None, **start)

    @property
    def capacity_factor(self) -> float:
        """Experts that a token meets on average, f."""
        return self.settings.top_k if self.settings.capacity_factor is None else self.settings.capacity_factor

    @property
    def experts_per_token(self) -> float:
        """In the mean; places are whole, so a few more than f."""
        return min(self.capacity_factor, self.num_experts)

    def decide(self, x_GSD: Tensor, mask_GS: Tensor | None) -> Routing:
        logit_GSE = self.gate(x_GSD)
        if self.training and self.settings.noise_std > 0:
            logit_GSE = logit_GSE + self.settings.noise_std / self.num_experts * torch.randn_like(logit_GSE)
        return self.choose(logit_GSE.softmax(-1), mask_GS)

    def choose(self, gate_GSE: Tensor, mask_GS: Tensor | None = None) -> Routing:
        """The decision on given gates."""
        num_groups, num_tokens, num_experts = gate_GSE.shape
        token_GEC, kept_GEC = self._take(gate_GSE.detach(), mask_GS)
        weight_GEC = gate_GSE.mT.gather(-1, token_GEC)
        first_token_G = num_tokens * torch.arange(num_groups, device=gate_GSE.device)
        expert_E = torch.arange(num_experts, device=gate_GSE.device)
        pairs = [token_GEC + first_token_G[:, None, None], expert_E[:, None].expand_as(token_GEC), weight_GEC]
        kept_A = None
        if kept_GEC is not None and has_static_shapes():
            pairs[-1] = weight_GEC.masked_fill(~kept_GEC, 0)
            kept_A = kept_GEC.reshape(-1)
        elif kept_GEC is not None:
            pairs = [part[kept_GEC] for part in pairs]
        token_A, expert_A, weight_A = (part.reshape(-1) for part in pairs)
        return Routing(
            token_A=token_A,
            expert_A=expert_A,
            weight_A=weight_A,
            num_tokens=num_groups * num_tokens,
            num_experts=num_experts,
            count_E=count_pairs(expert_A, num_experts, kept_A),
            score_TE=gate_GSE.flatten(0, 1),
            mask_T=None if mask_GS is None else mask_GS.reshape(-1),
        )

    @torch.no_grad()
    def _take(self, gate_GSE: Tensor, mask_GS: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Tokens in the order each expert likes them, cut at its places, and which of them are real takings."""
        shape = (1, self.num_experts, self.capacity_factor, self.settings.capacity_multiple)
        most = min(places(gate_GSE.shape[1], *shape), gate_GSE.shape[1])
        liking_GES = gate_GSE.mT if mask_GS is None else gate_GSE.mT.masked_fill(~mask_GS.unsqueeze(1), -torch.inf)
        token_GEC = falling_order(liking_GES)[..., :most]
        if mask_GS is None:
            return token_GEC, None
        rank_C = torch.arange(most, device=gate_GSE.device)
        within_GC = rank_C < torch.minimum(places_per_group(mask_GS, *shape), mask_GS.sum(1)).unsqueeze(1)
        return token_GEC, within_GC.unsqueeze(1).expand_as(token_GEC)
