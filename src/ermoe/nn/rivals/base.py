"""BASE: every expert gets equally many tokens in training, every token its best expert at test (Lewis et al. 2021).

Two forms. `BaseRouter` in a `MoE` replaces the feed-forward layer of a block: the block normalises before it and adds
the residual after it, x + α MLP_e(LN x). `BaseLayer` is the original, an extra layer between blocks with its own
normalisation, residual and stack of sublayers inside: y = α N_e(h) + (1 − α) h.

Letters: G groups of S tokens, T = G·S tokens, D width, E experts, A pairs of token and expert.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ermoe.nn.experts import Experts, build_experts
from ermoe.nn.moe import MoE
from ermoe.nn.precision import full_precision, widen
from ermoe.nn.rivals.assignment import balanced_assignment
from ermoe.nn.routers import Router, stable_top_k
from ermoe.nn.routing import Routing


class BaseRouter(Router):
    """One expert per token, mixed in by α = sigmoid(⟨h, w_e⟩); the expert vectors w learn through α alone.

    In training the assignment is the best among those with equal loads, over all tokens of the forward pass, so there
    it depends on the whole batch (each process balances its own tokens). At inference a token takes its best expert.
    Where E does not divide the number of tokens, loads differ by one.

    >>> router = BaseRouter(16, num_experts=4)
    >>> router(torch.randn(2, 10, 16)).count_E.tolist()
    [5, 5, 5, 5]
    """

    experts_per_token = 1

    def __init__(
        self,
        dim: int,
        *,
        num_experts: int = 8,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.centroid_ED = nn.Parameter(torch.empty(num_experts, dim, device=device, dtype=dtype))
        self.reset_parameters(generator)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Orthogonal vectors of length 0.1, so that α starts near one half."""
        if not self.centroid_ED.is_meta:
            device = generator.device if generator is not None else None
            start_ED = torch.empty(self.centroid_ED.shape, device=device)  # in float32, whatever the parameter is in
            with torch.no_grad():
                self.centroid_ED.copy_(nn.init.orthogonal_(start_ED, gain=0.1, generator=generator))

    def forward(
        self,
        x_GSD: Tensor,
        context_GSD: Tensor | None = None,
        mask_GS: Tensor | None = None,
        basis_EDR: Tensor | None = None,
    ) -> Routing:
        with full_precision(x_GSD):
            score_TE = widen(x_GSD).flatten(0, 1) @ widen(self.centroid_ED).mT
        mask_T = None if mask_GS is None else mask_GS.reshape(-1)
        return self.choose(score_TE, self.best_experts(score_TE, mask_T), mask_T)

    def best_experts(self, score_TE: Tensor, mask_T: Tensor | None = None) -> Tensor:
        """The expert of each token, (T,): balanced over the real tokens in training, greedy at inference."""
        greedy_T = stable_top_k(score_TE.detach(), 1).squeeze(1)
        if not self.training:
            return greedy_T
        balanced: Tensor = balanced_assignment(score_TE if mask_T is None else score_TE[mask_T])
        return balanced if mask_T is None else greedy_T.masked_scatter(mask_T, balanced)

    def choose(self, score_TE: Tensor, expert_T: Tensor, mask_T: Tensor | None = None) -> Routing:
        """The routing of a given assignment."""
        expert_T1 = expert_T.unsqueeze(1)
        return Routing.from_choice(
            expert_T1,
            score_TE.gather(1, expert_T1).sigmoid(),
            num_experts=self.num_experts,
            kept_TK=None if mask_T is None else mask_T.unsqueeze(1),
            score_TE=score_TE,
            mask_T=mask_T,
        )


class Sublayers(nn.Module):
    """For every expert a stack of u ← u + MLP(LN u); what it returns is the stack's change to its input, N_e(h) − h.

    The interface is that of `Experts`, so `MoE` can run it.
    """

    token_basis = None

    def __init__(self, dim: int, stack: list[Experts], *, eps: float = 1e-5) -> None:
        super().__init__()
        self.stack = nn.ModuleList(stack)
        parameter = stack[0].up.weight()
        shape = (len(stack), stack[0].num_experts, dim)
        self.ln_weight_LED = nn.Parameter(parameter.new_empty(shape))
        self.ln_bias_LED = nn.Parameter(parameter.new_empty(shape))
        self.eps = eps
        self._reset_norms()

    @property
    def num_experts(self) -> int:
        """Number of experts, E."""
        return self.ln_weight_LED.shape[1]

    @property
    def dim(self) -> int:
        """Width of the tokens, D."""
        return self.ln_weight_LED.shape[2]

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Random MLPs with zero output weights: every expert starts as the identity."""
        for experts in self._layers():
            experts.reset_parameters(generator)
        self._reset_norms()

    def _reset_norms(self) -> None:
        with torch.no_grad():
            self.ln_weight_LED.fill_(1)
            self.ln_bias_LED.zero_()
            for experts in self._layers():
                experts.down.weight().zero_()

    def _layers(self) -> list[Experts]:
        return [experts for experts in self.stack if isinstance(experts, Experts)]

    def forward(self, x_AD: Tensor, count_E: Tensor) -> Tensor:
        """The change to rows sorted by expert, (A, D)."""
        expert_A = torch.repeat_interleave(count_E, output_size=len(x_AD))
        u_AD = x_AD
        for layer, experts in enumerate(self._layers()):
            weight_AD, bias_AD = self.ln_weight_LED[layer][expert_A], self.ln_bias_LED[layer][expert_A]
            normal_AD = F.layer_norm(u_AD, u_AD.shape[-1:], eps=self.eps) * weight_AD + bias_AD
            u_AD = u_AD + experts(normal_AD, count_E)
        return u_AD - x_AD

    def every_expert(self, x_TD: Tensor) -> Tensor:
        """All experts' changes to all tokens, (E, T, D)."""
        u_ETD = x_ETD = x_TD.expand(self.num_experts, *x_TD.shape)
        for layer, experts in enumerate(self._layers()):
            weight_E1D, bias_E1D = self.ln_weight_LED[layer].unsqueeze(1), self.ln_bias_LED[layer].unsqueeze(1)
            normal_ETD = F.layer_norm(u_ETD, u_ETD.shape[-1:], eps=self.eps) * weight_E1D + bias_E1D
            u_ETD = u_ETD + experts.batched(normal_ETD)
        return u_ETD - x_ETD

    def prefers_grouped(self, x: Tensor) -> bool:
        """As `Experts.prefers_grouped`."""
        return all(experts.prefers_grouped(x) for experts in self._layers())


class BaseLayer(MoE):
    """The original BASE layer: y = α N_e(h) + (1 − α) h, with the residual inside.

    N_e is a stack of ``num_sublayers`` times u ← u + MLP(LN u). Output weights start at zero, so the layer starts as
    the identity. Padded tokens get zeros.

    >>> layer = BaseLayer(16, 32, num_experts=4, num_sublayers=2)
    >>> x = torch.randn(2, 10, 16)
    >>> torch.equal(layer(x), x)
    True
    """

    def __init__(
        self,
        dim: int,
        hidden_dim: int | None = None,
        *,
        num_experts: int = 8,
        num_sublayers: int = 1,
        act_layer: Callable[[], nn.Module] = nn.ReLU,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if num_sublayers < 1:
            raise ValueError(f"num_sublayers={num_sublayers}: every expert needs at least one")
        stack = [
            build_experts(
                dim,
                hidden_dim,
                num_experts=num_experts,
                act_layer=act_layer,
                generator=generator,
                device=device,
                dtype=dtype,
            )
            for _ in range(num_sublayers)
        ]
        router = BaseRouter(dim, num_experts=num_experts, generator=generator, device=device, dtype=dtype)
        super().__init__(router, Sublayers(dim, stack))  # type: ignore[arg-type]

    def mix(self, x_TD: Tensor, routing: Routing) -> Tensor:
        """h + α (N_e(h) − h) for a given routing, (T, D)."""
        residual_TD = x_TD if routing.mask_T is None else x_TD * routing.mask_T.unsqueeze(1)
        return residual_TD + super().mix(x_TD, routing)
