"""The original BASE layer, as the golden vectors of fairseq need it: an extra layer between blocks."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ermoe.nn import Experts, MoE, Routing, build_experts
from ermoe.nn.rivals.base import BaseRouter


class Sublayers(nn.Module):
    """For every expert a stack of u ← u + MLP(LN u); what it returns is the stack's change to its input, N_e(h) − h.

    The interface is that of `Experts`, so `MoE` can run it.
    """

    token_basis = None

    def __init__(self, dim: int, stack: list[Experts], *, eps: float = 1e-5) -> None:
        super().__init__()
        self.stack = nn.ModuleList(stack)
        parameter = stack[0].up.matrices()
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
                experts.down.matrices().zero_()

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
        **start,
    ) -> None:
        if num_sublayers < 1:
            raise ValueError(f"num_sublayers={num_sublayers}: every expert needs at least one")
        stack = [
            build_experts(dim, hidden_dim, num_experts=num_experts, act_layer=act_layer, **start)
            for _ in range(num_sublayers)
        ]
        router = BaseRouter(dim, num_experts, **start)
        super().__init__(router, Sublayers(dim, stack))

    def mix(self, x_TD: Tensor, routing: Routing) -> Tensor:
        """h + α (N_e(h) − h) for a given routing, (T, D)."""
        residual_TD = x_TD if routing.mask_T is None else x_TD * routing.mask_T.unsqueeze(1)
        return residual_TD + super().mix(x_TD, routing)
