"""V-MoE: noisy top-k of a softmax gate, with importance and load losses and limited places (Riquelme et al. 2021).

Letters: G groups of S tokens, T = G·S tokens, D width, E experts, K experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor

from ermoe.nn.capacity import places, places_per_group, within_capacity
from ermoe.nn.rivals.losses import gshard_loss, importance_loss, load_loss, mean_over_groups
from ermoe.nn.rivals.router import GatedRouter, weighted_top_k
from ermoe.nn.routing import Routing
from ermoe.nn.settings import RouterSettings
from ermoe.nn.start import Start
from ermoe.nn.tracing import is_any_number

_PRIORITIES = ("never", "eval", "always")


@dataclass(frozen=True)
class VMoE(RouterSettings):
    """The options of V-MoE.

    Args:
        top_k: experts per token K.
        noise_std: E times the deviation σ of the noise.
        group_size: images that share one capacity and one set of losses. Where it does not divide the batch, the
            largest divisor of the batch below it is used.
        capacity_factor: C = ⌈S K f / E⌉, raised to a multiple of ``capacity_multiple``; None for no limit. Padded
            tokens do not count.
        eval_capacity_factor: the same at inference; "same" takes ``capacity_factor``.
        batch_priority: when tokens with larger gates queue first: "never", at "eval", or "always".
        importance_weight, load_weight, gshard_weight: of the three losses; 0 leaves one out, as V-MoE does the third,
            which is here for the golden vectors. Without noise there is no load loss.
    """

    top_k: int = 2
    noise_std: float = 1.0
    group_size: int = 8
    capacity_factor: float | None = 1.05
    eval_capacity_factor: float | str | None = "same"
    capacity_multiple: int = 4
    batch_priority: str = "eval"
    importance_weight: float = 0.005
    load_weight: float = 0.005
    gshard_weight: float = 0.0

    def __post_init__(self) -> None:
        if self.group_size < 1 or self.capacity_multiple < 1:
            raise ValueError(
                f"group_size={self.group_size}, capacity_multiple={self.capacity_multiple}: both must be at least 1"
            )
        if self.batch_priority not in _PRIORITIES:
            raise ValueError(f"batch_priority={self.batch_priority!r}: use one of {', '.join(_PRIORITIES)}")
        for name in ("capacity_factor", "eval_capacity_factor"):
            factor = getattr(self, name)
            if factor not in (None, "same") and (isinstance(factor, str) or not factor > 0):
                raise ValueError(f"{name}={factor!r}: use a positive number, or None for no limit")

    @property
    def capacity_factors(self) -> tuple[float | None, float | None]:
        """Those of training and of evaluation."""
        if isinstance(self.eval_capacity_factor, str):
            return self.capacity_factor, self.capacity_factor
        return self.capacity_factor, self.eval_capacity_factor

    def router(self, dim: int, num_experts: int, **start: Unpack[Start]) -> VMoERouter:
        return VMoERouter(dim, num_experts, self, **start)


class VMoERouter(GatedRouter):
    """Each token takes the K largest of softmax(x W + ε), weighted by those gates as they are, not renormalised.

    Noise, losses and the order of assignment are the reference's: ε is Gaussian with σ = ``noise_std`` / E, in training
    only; experts have C places per group, first choices queue before second choices, and who finds no place is
    dropped. With a capacity, what a token gets depends on the rest of its group, also at inference:
    ``eval_capacity_factor=None`` removes the limit there, and with it the dependence.

    >>> router = VMoERouter(16, 4, VMoE(capacity_factor=None))
    >>> router(torch.randn(2, 9, 16)).expert_TK.shape
    torch.Size([18, 2])
    """

    top_k: int
    settings: VMoE

    def __init__(self, dim: int, num_experts: int, settings: VMoE, **start: Unpack[Start]) -> None:
        super().__init__(dim, num_experts, settings, top_k=settings.top_k, **start)

    @property
    def capacity_factor(self) -> float | None:
        """The one in force: of training, or of evaluation."""
        return self.settings.capacity_factors[0 if self.training else 1]

    @property
    def shares_places(self) -> bool:  # type: ignore[override]
        """At inference, images of a group compete for the same places."""
        return self.settings.group_size > 1 and self.settings.capacity_factors[1] is not None

    def decide(self, x_GSD: Tensor, mask_GS: Tensor | None) -> Routing:
        num_images, tokens_per_image = x_GSD.shape[:2]
        is_grouped = self.training or self.shares_places  # if not, nothing depends on the group
        if is_grouped and is_any_number(num_images):
            raise ValueError(
                "images of a batch share the places of V-MoE's experts, so its graph depends on the batch: export it "
                "with ermoe.export(model, file, dynamic_batch=False), or build it with eval_capacity_factor=None"
            )
        images = _images_per_group(num_images, self.settings.group_size) if is_grouped else 1
        shape_GS = (num_images // images, images * tokens_per_image)
        clean_GSE = self.gate(x_GSD).view(*shape_GS, self.num_experts)
        mask_GS = None if mask_GS is None else mask_GS.reshape(shape_GS)
        is_noisy = self.training and self.settings.noise_std > 0
        noisy_GSE = clean_GSE + self._sigma() * torch.randn_like(clean_GSE) if is_noisy else clean_GSE
        routing = self.choose(noisy_GSE.softmax(-1), mask_GS)
        if self.training:
            routing.auxiliary_loss = self.loss(clean_GSE, noisy_GSE, mask_GS)
        return routing

    def choose(self, gate_GSE: Tensor, mask_GS: Tensor | None = None) -> Routing:
        """The decision on given gates."""
        num_groups, num_tokens, _ = gate_GSE.shape
        gate_TE = gate_GSE.flatten(0, 1)
        expert_TK, weight_TK = weighted_top_k(gate_TE, self.top_k)
        shape_GSK = (num_groups, num_tokens, self.top_k)
        wanted_GSK = None if mask_GS is None else mask_GS.unsqueeze(-1).expand(shape_GSK)
        kept_GSK, num_dropped = wanted_GSK, None
        if self.capacity_factor is not None:
            kept_GSK = within_capacity(
                expert_TK.view(shape_GSK),
                self.num_experts,
                self._places(num_tokens, mask_GS, self.capacity_factor),
                kept_GSK=wanted_GSK,
                priority_GS=weight_TK.detach()[:, 0].view(num_groups, num_tokens) if self._has_priority() else None,
            )
            num_dropped = (~kept_GSK if wanted_GSK is None else wanted_GSK & ~kept_GSK).sum()
        return Routing.from_choice(
            expert_TK,
            weight_TK,
            num_experts=self.num_experts,
            kept_TK=None if kept_GSK is None else kept_GSK.reshape(expert_TK.shape),
            score_TE=gate_TE,
            mask_T=None if mask_GS is None else mask_GS.reshape(-1),
            num_dropped=num_dropped,
        )

    def _places(self, num_tokens: int, mask_GS: Tensor | None, capacity_factor: float) -> int | Tensor:
        shape = (self.top_k, self.num_experts, capacity_factor, self.settings.capacity_multiple)
        return places(num_tokens, *shape) if mask_GS is None else places_per_group(mask_GS, *shape)

    def _has_priority(self) -> bool:
        when = self.settings.batch_priority
        return when == "always" or (when == "eval" and not self.training)

    def _sigma(self) -> float:
        """Of the noise."""
        return self.settings.noise_std / self.num_experts

    def loss(self, clean_GSE: Tensor, noisy_GSE: Tensor, mask_GS: Tensor | None = None) -> Tensor:
        """The weighted sum of the losses, averaged over groups; a loss of weight 0 is not computed."""
        settings = self.settings
        loss_G = clean_GSE.new_zeros(clean_GSE.shape[0])
        if settings.importance_weight:
            loss_G = loss_G + settings.importance_weight * importance_loss(clean_GSE.softmax(-1), mask_GS)
        if settings.load_weight and settings.noise_std > 0:
            load_G = load_loss(clean_GSE, noisy_GSE, self._sigma(), self.top_k, mask_GS)
            loss_G = loss_G + settings.load_weight * load_G
        if settings.gshard_weight:
            loss_G = loss_G + settings.gshard_weight * gshard_loss(noisy_GSE.softmax(-1), mask_GS)
        return mean_over_groups(loss_G, mask_GS)


def _images_per_group(num_images: int, group_size: int) -> int:
    """The largest divisor of the batch that is no larger than ``group_size``."""
    return next((size for size in range(min(group_size, num_images), 0, -1) if num_images % size == 0), 1)
