"""A dense feed-forward network through its weights, whichever library's module holds them.

Row convention, y = x W + b. Letters: T tokens, D model width, H hidden width, I input and O output width of one map, k
some hidden units.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

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

    ``norm`` is the normalisation through which tokens enter; ``inner_norm``, if there is one, that of what enters
    ``down``, after dropout.
    """

    up: Linear
    down: Linear
    act: nn.Module
    norm: nn.Module
    gate: Linear | None = None
    inner_norm: nn.Module | None = None
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

    @property
    def entry(self) -> Linear:
        """The map of `ermoe.nn.Experts.entry`."""
        return self.up if self.gate is None else self.gate

    def linears(self) -> list[Linear]:
        """The maps in the order of `ermoe.nn.Experts.linears`."""
        return [linear for linear in (self.gate, self.up, self.down) if linear is not None]

    def hidden(self, x_TD: Tensor) -> Tensor:
        """What enters ``down``, (T, H)."""
        up_TH = self.up(x_TD)
        hidden_TH: Tensor = self.act(up_TH) if self.gate is None else self.act(self.gate(x_TD)) * up_TH
        return hidden_TH if self.inner_norm is None else self.inner_norm(hidden_TH)

    def __call__(self, x_TD: Tensor) -> Tensor:
        """Outputs without dropout, (T, D)."""
        return self.down(self.hidden(x_TD))

    def to(self, dtype: torch.dtype) -> FFN:
        """The same network in another precision, beside the module and not in it."""

        def cast(linear: Linear) -> Linear:
            return Linear(linear.W.to(dtype), None if linear.b is None else linear.b.to(dtype))

        gate = None if self.gate is None else cast(self.gate)
        inner_norm = None if self.inner_norm is None else copy.deepcopy(self.inner_norm).to(dtype)
        return replace(self, gate=gate, up=cast(self.up), down=cast(self.down), inner_norm=inner_norm)

    def with_units(self, kept: Tensor) -> FFN:
        """The network of some of the hidden units, (k,), alone; an inner norm is then that of these units."""

        def columns(linear: Linear) -> Linear:
            return Linear(linear.W[:, kept], None if linear.b is None else linear.b[kept])

        whole, make_norm = self.folded(), self.norm_layer()
        gate = None if whole.gate is None else columns(whole.gate)
        down, norm = Linear(whole.down.W[kept], whole.down.b), None if make_norm is None else make_norm(len(kept))
        return replace(whole, gate=gate, up=columns(whole.up), down=down, inner_norm=norm)

    def folded(self) -> FFN:
        """The same network with a plain inner norm n: what that scales and shifts, (n(a) g + h) W, goes into ``down``.

        n(a) (diag(g) W) + (h W + b): a norm without parameters, which all experts can have.
        """
        norm: Any = self.inner_norm
        make_norm = self.norm_layer()
        if norm is None or make_norm is None or norm.weight is None:
            return self
        W_HD, b_D = self.down.W, self.down.b
        scaled_HD = (norm.weight.detach().unsqueeze(1).float() * W_HD.float()).to(W_HD.dtype)
        shift_H = getattr(norm, "bias", None)
        if shift_H is not None:
            moved_D = (shift_H.detach().float() @ W_HD.float()).to(W_HD.dtype)
            b_D = moved_D if b_D is None else b_D + moved_D
        return replace(self, down=Linear(scaled_HD, b_D), inner_norm=make_norm(self.hidden_dim))

    @torch.no_grad()
    def assign(self, linears: Iterable[tuple[Tensor, Tensor | None]]) -> None:
        """Writes weights and biases, in the order of `linears`, through the views; an inner norm becomes plain."""
        for linear, (weight, bias) in zip(self.linears(), linears, strict=True):
            linear.assign(weight, bias)
        norm: Any = self.inner_norm
        for parameter, value in (("weight", 1.0), ("bias", 0.0)):
            if getattr(norm, parameter, None) is not None:
                getattr(norm, parameter).fill_(value)

    def act_layer(self) -> Callable[[], nn.Module]:
        """A factory of this network's activation."""
        return lambda: self.act

    def norm_layer(self) -> Callable[[int], nn.Module] | None:
        """A factory of inner norms like this network's, of any width and without parameters; None if it has none."""
        norm: Any = self.inner_norm
        if norm is None:
            return None
        kind: Callable[..., nn.Module] = nn.LayerNorm if isinstance(norm, nn.LayerNorm) else nn.RMSNorm
        return partial(kind, eps=norm.eps, elementwise_affine=False)

    def fresh(self, generator: torch.Generator | None = None) -> FFN:
        """A network of the same shape with Xavier-uniform weights and zero biases; this one keeps its own."""

        def drawn(linear: Linear) -> Linear:
            weight = nn.init.xavier_uniform_(torch.empty_like(linear.W), generator=generator)
            return Linear(weight, None if linear.b is None else torch.zeros_like(linear.b))

        whole = self.folded()
        gate = None if whole.gate is None else drawn(whole.gate)
        return replace(whole, gate=gate, up=drawn(whole.up), down=drawn(whole.down))

    def defect(self) -> str | None:
        """Why experts cannot be made of it, as the end of a sentence about its block; None if they can."""
        if any(True for _ in self.act.parameters()):
            return f"its activation {type(self.act).__name__} has parameters, which experts do not have"
        if not all(bool(linear.W.isfinite().all()) for linear in self.linears() if not linear.W.is_meta):
            return "its feed-forward weights hold NaN or infinity"
        return None
