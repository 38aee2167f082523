"""A dense feed-forward network, seen through its weights, whatever module holds them.

Row convention, y = x W + b. Letters: T tokens, D model width, H hidden width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ermoe.errors import UserError


@dataclass(slots=True)
class Linear:
    """The weight (I, O) and bias (O,) of one linear map, as views of the module's own parameters."""

    W: Tensor
    b: Tensor | None

    @classmethod
    def of(cls, linear: nn.Linear, rows: slice = slice(None)) -> Linear:
        """Views of a torch linear layer, or of some of its output ``rows`` when several maps are packed in one."""
        weight, bias = linear.weight.detach(), linear.bias
        return cls(weight[rows].t(), None if bias is None else bias.detach()[rows])

    def __call__(self, x: Tensor) -> Tensor:
        return x @ self.W if self.b is None else torch.addmm(self.b, x, self.W)

    def assign(self, weight: Tensor, bias: Tensor | None) -> None:
        """Writes through the views into the module. A missing bias must be zero where there is no place for it."""
        self.W.copy_(weight)
        if self.b is not None:
            self.b.copy_(torch.zeros_like(self.b) if bias is None else bias)
        elif bias is not None and bool(bias.any()):
            raise UserError(
                "the experts have learned a bias where the dense network has none: it cannot be dense again"
            )


@dataclass(slots=True)
class FFN:
    """down(act(up(x))), or down(act(gate(x)) · up(x)) when gated, with dropout ``drop`` after each of the two steps.

    ``norm`` is the normalisation through which tokens enter.
    """

    up: Linear
    down: Linear
    act: nn.Module
    norm: nn.Module
    gate: Linear | None = None
    drop: float = 0.0

    @property
    def dim(self) -> int:
        """Model width, D."""
        return self.up.W.shape[0]

    @property
    def hidden_dim(self) -> int:
        """Hidden width, H."""
        return self.up.W.shape[1]

    @property
    def has_bias(self) -> bool:
        """Whether any of its maps has a bias; experts then have one in all."""
        return any(linear.b is not None for linear in self.linears())

    def linears(self) -> list[Linear]:
        """The maps in the order of `ermoe.nn.Experts.linears`."""
        return [linear for linear in (self.gate, self.up, self.down) if linear is not None]

    def hidden(self, x_TD: Tensor) -> Tensor:
        """What enters ``down``, (T, H)."""
        up_TH = self.up(x_TD)
        hidden_TH: Tensor = self.act(up_TH) if self.gate is None else self.act(self.gate(x_TD)) * up_TH
        return hidden_TH

    def __call__(self, x_TD: Tensor) -> Tensor:
        """Outputs without dropout, (T, D)."""
        return self.down(self.hidden(x_TD))

    def act_layer(self) -> Callable[[], nn.Module]:
        """A factory of this network's activation."""
        return lambda: self.act

    def fresh(self, generator: torch.Generator | None = None) -> FFN:
        """A network of the same shape with Xavier-uniform weights and zero biases; this one keeps its own."""

        def drawn(linear: Linear) -> Linear:
            weight = nn.init.xavier_uniform_(torch.empty_like(linear.W), generator=generator)
            return Linear(weight, None if linear.b is None else torch.zeros_like(linear.b))

        gate = None if self.gate is None else drawn(self.gate)
        return replace(self, gate=gate, up=drawn(self.up), down=drawn(self.down))

    def defect(self) -> str | None:
        """Why experts cannot be made of it, as the end of a sentence about its block; None if they can."""
        if any(True for _ in self.act.parameters()):
            return f"its activation {type(self.act).__name__} has parameters, which experts do not have"
        if not all(bool(linear.W.isfinite().all()) for linear in self.linears() if not linear.W.is_meta):
            return "its feed-forward weights hold NaN or infinity"
        return None
