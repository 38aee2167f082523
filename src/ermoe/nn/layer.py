"""What all layers of experts have in common, whether they route tokens or mix them, and how to find them in a model.

Letters: G groups (images) of S tokens, D model width.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ermoe.nn.attention import Context
from ermoe.nn.experts import Experts
from ermoe.nn.routers import Router, TopKRouter
from ermoe.nn.routing import Routing
from ermoe.nn.scores import Score
from ermoe.nn.tracing import has_static_shapes, is_recomputing, is_transformed, refuse_jit_trace

_WRAPPERS = {"module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}


class MixtureLayer(nn.Module, ABC):
    """A feed-forward layer made of experts. ``router`` is None where nothing is chosen, as in Soft MoE.

    ``shared``, a stack of one expert, is met by every token: its output is added to the mixture, with weight 1.

    ``observers`` are functions of a `Routing`; each is called once per forward pass. With ``every_expert = True`` all
    experts run on all tokens: more work, the same numbers, and nothing but static matrix products, for exporters that
    know no other.
    """

    every_expert = False
    router: Router | None
    experts: Experts
    shared: Experts | None

    def __init__(self, experts: Experts, router: Router | None = None, shared: Experts | None = None) -> None:
        super().__init__()
        if shared is not None and (shared.num_experts, shared.dim) != (1, experts.dim):
            raise ValueError(
                f"shared is {shared.num_experts} experts of width {shared.dim}: need one of width {experts.dim}, "
                "beside those that are routed"
            )
        self.router = router
        self.experts = experts
        self.shared = shared
        self.observers: list[Callable[[Routing], None]] = []

    @property
    def score(self) -> Score | None:
        """The score by which tokens choose among experts, or None for layers that choose in another way."""
        return self.router.score if isinstance(self.router, TopKRouter) else None

    @property
    def needs_context(self) -> bool:
        """Whether tokens are compared with their attention context."""
        return self.router is not None and self.router.needs_context

    @abstractmethod
    def forward(self, x: Tensor, context: Tensor | Context | None = None, mask: Tensor | None = None) -> Tensor:
        """Mixes expert outputs, in the shape of ``x``, (..., N, D).

        ``context`` has the shape of ``x``, or is a `Context` yet to be averaged; ``mask``, (..., N), is True for real
        tokens. Padded tokens are not routed, not counted, and get zeros; what they hold, even NaN, reaches nothing.
        """

    @abstractmethod
    def route(self, x: Tensor, context: Tensor | Context | None = None, mask: Tensor | None = None) -> Routing:
        """The routing of ``x``, without running the experts and without counting."""

    @abstractmethod
    def reset_router(self, generator: torch.Generator | None = None) -> None:
        """Draws everything but the experts anew."""

    def reset_experts(self, generator: torch.Generator | None = None) -> None:
        """Draws all experts anew, the shared one too."""
        self.experts.reset_parameters(generator)
        if self.shared is not None:
            self.shared.reset_parameters(generator)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Initialises everything, for a layer that was built on the meta device."""
        self.reset_experts(generator)
        self.reset_router(generator)

    def grouped(
        self, x: Tensor, context: Tensor | Context | None, mask: Tensor | None
    ) -> tuple[Tensor, Tensor | Context | None, Tensor | None]:
        """The input of a forward pass, checked: x and context as (G, S, D) with zeros for padding, the mask (G, S)."""
        _check_inputs(x, context, mask, dim=self.experts.dim, needs_context=self.needs_context)
        mask_GS = None if mask is None else groups(mask.unsqueeze(-1)).squeeze(-1)
        if isinstance(context, Context):
            z_GSD = None if context.z_GSD is None else groups(only_real(context.z_GSD, mask))
            context = Context(groups(only_real(context.alpha_GSS, mask)), z_GSD)
        elif context is not None:
            context = groups(only_real(context, mask))
        return groups(only_real(x, mask)), context, mask_GS

    def with_shared(self, mixed_GSD: Tensor, x: Tensor, mask: Tensor | None) -> Tensor:
        """f_shared(x) + the mixture of the others, in the shape and precision of ``x``; zeros for padding."""
        mixed = mixed_GSD.view(x.shape)
        if self.shared is not None:
            shared = self.shared.alone(only_real(x, mask).reshape(-1, x.shape[-1])).view(x.shape)
            mixed = mixed + only_real(shared, mask)
        return mixed.to(x.dtype)

    def tell_observers(self, routing: Routing) -> None:
        """Shows a forward pass to whoever watches, unless it is a repetition of one already shown."""
        if self.observers and is_transformed():
            raise ValueError(
                "routing cannot be recorded inside torch.func's transformations, where a tensor stands for many "
                "samples: record a plain forward pass of the same images"
            )
        if self.observers and not is_recomputing():
            for observer in self.observers:
                observer(routing)


def moe_layers(model: nn.Module) -> dict[str, MixtureLayer]:
    """Every layer of experts in a model, by name; wrappers such as DDP leave no trace in the names.

    >>> from ermoe.nn import EigenMoE
    >>> list(moe_layers(nn.Sequential(nn.Linear(16, 16), EigenMoE(16, num_experts=2))))
    ['1']
    """
    return {
        ".".join(part for part in name.split(".") if part not in _WRAPPERS): module
        for name, module in model.named_modules()
        if isinstance(module, MixtureLayer)
    }


def groups(x: Tensor) -> Tensor:
    """(..., N, D) as (G, S, D)."""
    return x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:])


def only_real(x: Tensor, mask: Tensor | None) -> Tensor:
    """``x`` with zeros in place of padding: times a weight of zero, NaN would still be NaN."""
    return x if mask is None else x.masked_fill(~mask.unsqueeze(-1), 0)


def _check_inputs(
    x: Tensor, context: Tensor | Context | None, mask: Tensor | None, *, dim: int, needs_context: bool
) -> None:
    """Raises a ValueError that says what is wrong with a layer's input."""
    refuse_jit_trace()
    if x.dim() < 2:
        raise ValueError(f"x has shape {tuple(x.shape)}: need (..., tokens, width)")
    if x.shape[-1] != dim:
        raise ValueError(f"x has width {x.shape[-1]}, the experts have {dim}: build the layer with dim={x.shape[-1]}")
    if context is None and needs_context:
        raise ValueError(
            "this layer scores a token against its attention context, and without one every score is 1: pass "
            "context= (see ermoe.nn.ContextAttention), or build the layer with score='prototype', 'energy' or 'logit'"
        )
    alpha, z = context if isinstance(context, Context) else (None, context)
    if z is not None and z.shape != x.shape:
        raise ValueError(f"context has shape {tuple(z.shape)}, x has {tuple(x.shape)}: they must be equal")
    if alpha is not None and alpha.shape != (*x.shape[:-1], x.shape[-2]):
        raise ValueError(f"α has shape {tuple(alpha.shape)}, x has {tuple(x.shape)}: need a weight for each two tokens")
    if mask is not None and mask.shape != x.shape[:-1]:
        raise ValueError(f"mask has shape {tuple(mask.shape)}: need {tuple(x.shape[:-1])}, True for real tokens")
    if mask is not None and mask.dtype != torch.bool:
        raise ValueError(f"mask is {mask.dtype}: need torch.bool, True for real tokens")
    if not has_static_shapes() and torch.is_anomaly_enabled():
        for name, tensor in (("x", x), ("α", alpha), ("context", z)):
            if tensor is not None and not bool(tensor.isfinite().all()):
                raise ValueError(f"{name} holds NaN or infinity (checked because torch's anomaly detection is on)")
