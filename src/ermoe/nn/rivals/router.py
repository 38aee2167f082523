"""What the rivals share: they route by tokens alone, most of them through a learned gate, and may leave a loss.

Letters: G groups of S tokens, T = G·S tokens, D width, E experts, K experts per token, A pairs, R basis rank.
"""

from __future__ import annotations

from abc import abstractmethod
from functools import partial
from typing import Any, Unpack

import torch
from torch import Tensor

from ermoe.nn.attention import Context
from ermoe.nn.gate import Gate
from ermoe.nn.order import stable_top_k
from ermoe.nn.routers import Router, check_top_k
from ermoe.nn.routing import Routing
from ermoe.nn.settings import RouterSettings
from ermoe.nn.start import Start
from ermoe.nn.tracing import has_static_shapes, is_recomputing, is_transformed

_MOST_FORWARDS = 8  # of one step: views of an image, uses of a layer


class RivalRouter(Router):
    """A router that looks at tokens alone, neither at their contexts nor at the experts' bases.

    Where its training forwards have an auxiliary loss, they leave it for `ermoe.auxiliary_loss` to pull. A loss that
    nobody pulls is forgotten when gradients pass through its forward pass, for its graph is gone then. Of forward
    passes that are neither pulled nor used, the last few are kept.
    """

    settings: RouterSettings | None = None

    def __init__(self) -> None:
        super().__init__()
        self._losses: list[Tensor] = []

    def forward(
        self,
        x_GSD: Tensor,
        context: Tensor | Context | None = None,
        mask_GS: Tensor | None = None,
        basis_EDR: Tensor | None = None,
    ) -> Routing:
        return self.decide(x_GSD, mask_GS)

    @abstractmethod
    def decide(self, x_GSD: Tensor, mask_GS: Tensor | None) -> Routing:
        """The routing of all tokens."""

    def observe(self, routing: Routing) -> None:
        """Takes the loss of a forward pass, unless that is a repetition of one already taken."""
        loss = routing.auxiliary_loss
        if loss is None or is_recomputing():
            return
        if has_static_shapes():  # no hooks there, so nobody would say that a loss is spent
            self._losses = [loss]
            return
        self._losses = [*self._losses[1 - _MOST_FORWARDS :], loss]
        if routing.weight_A.requires_grad:
            routing.weight_A.register_hook(partial(self._forget, loss))

    def _forget(self, loss: Tensor, grad_A: Tensor) -> None:
        self._losses = [other for other in self._losses if other is not loss]

    def pull(self) -> Tensor | None:
        """The mean over the forward passes since the last pull, or None if there was none; forgets them."""
        losses, self._losses = self._losses, []
        if not is_transformed():  # what torch.func left behind is worth nothing outside
            losses = [loss for loss in losses if not torch._C._functorch.is_functorch_wrapped_tensor(loss)]
        return torch.stack(losses).mean() if losses else None

    def extra_repr(self) -> str:
        return "" if self.settings is None else repr(self.settings)

    def __getstate__(self) -> dict[str, Any]:
        """A copy of a model has not run forward: tensors with a history can be neither copied nor saved."""
        return {**self.__dict__, "_losses": []}


class GatedRouter(RivalRouter):
    """A rival with a learned gate; ``top_k`` is None where tokens do not all choose equally many experts."""

    def __init__(
        self, dim: int, num_experts: int, settings: RouterSettings, *, top_k: int | None, **start: Unpack[Start]
    ) -> None:
        super().__init__()
        if top_k is not None:
            check_top_k(top_k, num_experts)
        self.gate = Gate(dim, num_experts, **start)
        self.num_experts = num_experts
        self.top_k = top_k
        self.settings = settings

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        self.gate.reset_parameters(generator)


def weighted_top_k(
    score_TE: Tensor, k: int, *, ranking_TE: Tensor | None = None, normalised: bool = False
) -> tuple[Tensor, Tensor]:
    """Of each token the K best experts and their scores, (T, K) each, best by score unless a ranking is given.

    ``normalised`` scores are divided by their sum over the K.
    """
    expert_TK = stable_top_k((score_TE if ranking_TE is None else ranking_TE).detach(), k)
    weight_TK = score_TE.gather(1, expert_TK)
    if normalised:
        weight_TK = weight_TK / weight_TK.sum(-1, keepdim=True).clamp_min(torch.finfo(weight_TK.dtype).tiny)
    return expert_TK, weight_TK
