"""The mixture-of-experts layer: route, dispatch, run the experts, combine.

Letters: G groups (images) of S tokens, T = G·S tokens, D model width, E experts, A pairs of token and expert, C places
per expert and group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ermoe.nn.attention import Context
from ermoe.nn.capacity import places
from ermoe.nn.dispatch import combine, gather, plan
from ermoe.nn.experts import Experts
from ermoe.nn.layer import MixtureLayer, groups, only_real
from ermoe.nn.order import falling_order
from ermoe.nn.precision import widen
from ermoe.nn.routers import Router
from ermoe.nn.routing import Routing
from ermoe.nn.tracing import has_static_shapes


class MoE(MixtureLayer):
    """A feed-forward layer in which every token meets only the experts that ``router`` chooses for it, and ``shared``.

    ``forced_G``, experts (G,), sends all tokens of each group to one expert, whatever the router says; scores stay what
    they are, and offsets learn nothing from it. With a ``static_capacity`` f, experts have ⌈S K f / E⌉ places per group
    whatever tokens want: shapes are static, as files want them, and tokens that find an expert full do without it. With
    ``expert_by_expert = True`` each expert looks for its own tokens, one expert after the other, which files can do too
    if their readers take shapes that depend on data.

    >>> from ermoe.nn import EigenMoE
    >>> layer = EigenMoE(32, num_experts=4)
    >>> x, context = torch.randn(2, 10, 32), torch.randn(2, 10, 32)
    >>> layer(x, context).shape
    torch.Size([2, 10, 32])
    >>> layer.route(x, context).expert_TK.shape
    torch.Size([20, 2])
    """

    router: Router
    forced_G: Tensor | None = None
    static_capacity: float | None = None
    expert_by_expert = False

    def __init__(self, router: Router, experts: Experts, shared: Experts | None = None) -> None:
        if router.num_experts != experts.num_experts:
            raise ValueError(
                f"the router chooses among {router.num_experts} experts, but there are {experts.num_experts}: "
                "build both with the same num_experts"
            )
        super().__init__(experts, router, shared)

    def forward(self, x: Tensor, context: Tensor | Context | None = None, mask: Tensor | None = None) -> Tensor:
        routing = self.route(x, context, mask)
        if self.training and self.forced_G is None:
            self.router.observe(routing)
        self.tell_observers(routing)
        x_GSD = groups(only_real(x, mask))
        if self.static_capacity is not None and self.experts.num_experts > 1:
            mixed = self._mix_in_places(x_GSD, routing, self.static_capacity)
        else:
            mixed = self.mix(x_GSD.flatten(0, 1), routing)
        return self.with_shared(mixed, x, mask)

    def route(self, x: Tensor, context: Tensor | Context | None = None, mask: Tensor | None = None) -> Routing:
        routing: Routing = self.router(*self.grouped(x, context, mask), self.experts.token_basis)
        return routing if self.forced_G is None else routing.forced(self.forced_G)

    def mix(self, x_TD: Tensor, routing: Routing) -> Tensor:
        """Σ_e w_e f_e(x) over the routed experts for a given routing, (T, D)."""
        if self.experts.num_experts == 1:
            y_TD = widen(self.experts.alone(x_TD))
            return y_TD if routing.meets_all else routing.dense_weights() * y_TD
        if self.expert_by_expert:
            return self._mix_expert_by_expert(x_TD, routing)
        if self.every_expert or (has_static_shapes() and not self.experts.prefers_grouped(x_TD)):
            outputs_ETD = self.experts.every_expert(x_TD)
            return torch.einsum("te,etd->td", routing.dense_weights().to(outputs_ETD.dtype), outputs_ETD)
        pairs = plan(routing)
        y_AD = self.experts(gather(x_TD, pairs), pairs.count_E)
        return combine(y_AD, pairs)

    def _mix_expert_by_expert(self, x_TD: Tensor, routing: Routing) -> Tensor:
        """The mixture without a sort: every expert finds its own tokens, and adds to them."""
        weight_TE = routing.dense_weights()
        mixed_TD = torch.zeros_like(x_TD, dtype=weight_TE.dtype)
        for index in range(self.experts.num_experts):
            token_A = weight_TE[:, index].nonzero().squeeze(1)
            y_AD = self.experts.one_of_many(x_TD[token_A], index)
            mixed_TD = mixed_TD.index_add(0, token_A, weight_TE[token_A, index].unsqueeze(1) * y_AD)
        return mixed_TD

    def _mix_in_places(self, x_GSD: Tensor, routing: Routing, capacity_factor: float) -> Tensor:
        """The mixture of those pairs that find a place, filled in the order of falling weight, (G, S, D)."""
        num_tokens, num_experts = x_GSD.shape[1], routing.num_experts
        wanted = places(num_tokens, self.router.experts_per_token, num_experts, capacity_factor)
        weight_GSE = routing.dense_weights().view(-1, num_tokens, num_experts)
        token_GCE = falling_order(weight_GSE, dim=1)[:, :wanted]  # ties: first come
        weight_GCE = weight_GSE.gather(1, token_GCE)
        place_GAD = token_GCE.flatten(1).unsqueeze(-1).expand(-1, -1, x_GSD.shape[2])
        x_GCED = x_GSD.gather(1, place_GAD).unflatten(1, token_GCE.shape[1:])
        y_EAD = self.experts.batched(x_GCED.permute(2, 0, 1, 3).flatten(1, 2))
        y_GCED = y_EAD.unflatten(1, (-1, token_GCE.shape[1])).permute(1, 2, 0, 3)
        weighted_GAD = (weight_GCE.to(y_GCED.dtype).unsqueeze(-1) * y_GCED).flatten(1, 2)
        return torch.zeros_like(x_GSD).scatter_add(1, place_GAD, weighted_GAD.to(x_GSD.dtype))

    def reset_router(self, generator: torch.Generator | None = None) -> None:
        self.router.reset_parameters(generator)
