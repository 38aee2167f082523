"""How well each token fits each expert: the scores among which a router chooses.

Every score is computed in at least float32 whatever autocast says, because half precision invents ties.

Letters: G groups (images) of S tokens, T = G·S tokens, D model width, E experts, R basis rank, r routing rank (the
first r columns of a basis route).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from ermoe.nn.attention import Context
from ermoe.nn.basis import random_basis
from ermoe.nn.gate import Gate
from ermoe.nn.precision import full_precision, widen
from ermoe.nn.sharding import everywhere
from ermoe.nn.start import Start, parameter

_SMALLEST_NORM = 1e-10


def project(x_TD: Tensor, basis_EDr: Tensor) -> Tensor:
    """Uᵀx for every expert in one product, (T, E, r) (Eq. 4)."""
    num_experts, dim, route_rank = basis_EDr.shape
    columns = basis_EDr.transpose(0, 1).reshape(dim, num_experts * route_rank)
    return (x_TD @ columns).view(-1, num_experts, route_rank)


def project_context(context: Tensor | Context, x_TD: Tensor, token_TEr: Tensor, basis_EDr: Tensor) -> Tensor:
    """Uᵀc for every expert, (T, E, r), with the tokens and their own projections at hand.

    Of a context that is yet to be averaged it is Σ α Uᵀz wherever that is cheaper than Uᵀ Σ α z.
    """
    if isinstance(context, Tensor):
        return project(context, basis_EDr)
    alpha_GSS = widen(context.alpha_GSS)
    of_tokens = context.z_GSD is None
    z_TD = x_TD if context.z_GSD is None else widen(context.z_GSD).flatten(0, 1)
    if not averages_projections(alpha_GSS.shape[-1], basis_EDr, of_tokens=of_tokens):
        return project(_averaged(alpha_GSS, z_TD), basis_EDr)
    return _averaged(alpha_GSS, token_TEr if of_tokens else project(z_TD, basis_EDr))


def _averaged(alpha_GSS: Tensor, z_Tx: Tensor) -> Tensor:
    """Σ α z of each group, in the shape of z, (T, ...)."""
    return (alpha_GSS @ z_Tx.reshape(*alpha_GSS.shape[:2], z_Tx.shape[1:].numel())).view(z_Tx.shape)


def averages_projections(num_tokens: int, basis_EDr: Tensor, *, of_tokens: bool) -> bool:
    """Whether Σ α Uᵀz takes fewer operations than Uᵀ Σ α z, for ``num_tokens`` in a group.

    A token's average costs N columns; a projection, D·E·r, is at hand already where z is the tokens themselves.
    """
    num_experts, dim, route_rank = basis_EDr.shape
    columns = num_experts * route_rank
    return num_tokens * columns < num_tokens * dim + (dim * columns if of_tokens else 0)


class _Cosine(torch.autograd.Function):
    """cos = ⟨u, v⟩ / (‖u‖ ‖v‖), with ∂cos/∂u = v / (‖u‖ ‖v‖) − cos u / ‖u‖²: half the passes that autograd makes."""

    generate_vmap_rule = True

    @staticmethod
    def forward(u: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        norm_u, norm_v = torch.linalg.vector_norm(u, dim=-1), torch.linalg.vector_norm(v, dim=-1)
        vanishes = torch.minimum(norm_u, norm_v) <= _SMALLEST_NORM
        return (_dot(u, v) / (norm_u * norm_v)).masked_fill(vanishes, 0), norm_u, norm_v

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor, Tensor]) -> None:
        ctx.save_for_backward(*inputs, *output)
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
        u, v, cos, norm_u, norm_v = ctx.saved_tensors
        grad = grad.masked_fill(torch.minimum(norm_u, norm_v) <= _SMALLEST_NORM, 0)
        norm_u, norm_v = norm_u.clamp_min(_SMALLEST_NORM), norm_v.clamp_min(_SMALLEST_NORM)
        across, along = (grad / (norm_u * norm_v)).unsqueeze(-1), grad * cos
        grad_u = torch.addcmul(v * across, u, (along / norm_u.square()).unsqueeze(-1), value=-1)
        grad_v = torch.addcmul(u * across, v, (along / norm_v.square()).unsqueeze(-1), value=-1)
        return grad_u.sum_to_size(u.shape), grad_v.sum_to_size(v.shape)


def cosine(u: Tensor, v: Tensor) -> Tensor:
    """⟨u, v⟩ / (‖u‖ ‖v‖) over the last axis (Eq. 5); exactly 0, with zero gradient, where a vector vanishes."""
    # Without gradients it is only a function: what surrounds it takes as long as the arithmetic of a small layer.
    cos, *_ = _Cosine.apply(u, v) if torch.is_grad_enabled() else _Cosine.forward(u, v)
    return cos


def _dot(u: Tensor, v: Tensor) -> Tensor:
    return (u * v).sum(-1)


def _inverse_norm(u: Tensor) -> Tensor:
    squared = _dot(u, u)
    return torch.where(squared > _SMALLEST_NORM**2, squared, math.inf).rsqrt()


class Score(nn.Module, ABC):
    """A score of every token for every expert.

    ``basis_EDR`` is what the experts offer as their token basis. A score may keep one of its own, ``self.basis``: for
    every expert, or one that all experts share, (1, D, r).
    """

    needs_context = False
    needs_basis = False

    def __init__(self, route_rank: int | None = None) -> None:
        super().__init__()
        self.route_rank = route_rank
        self.basis: nn.Parameter | None = None

    def own_basis(
        self,
        num_experts: int,
        dim: int,
        **start: Unpack[Start],
    ) -> None:
        """Gives the score a routing basis (E, D, r) of its own; of one expert, if all are to share it."""
        assert self.route_rank is not None
        self.basis = parameter(num_experts, dim, self.route_rank, **start)
        self.reset_parameters(start.get("generator"))

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draws the score's own parameters anew."""
        if self.basis is not None and not self.basis.is_meta:
            with torch.no_grad():
                self.basis.copy_(random_basis(*self.basis.shape, generator=generator))

    def forward(self, x_TD: Tensor, context: Tensor | Context | None, basis_EDR: Tensor | None) -> Tensor:
        """Scores (T, E), in at least float32; ``context`` is (T, D), or yet to be averaged."""
        with full_precision(x_TD):
            context = widen(context) if isinstance(context, Tensor) else context
            return self.score(widen(x_TD), context, self.routing_basis(basis_EDR))

    def routing_basis(self, basis_EDR: Tensor | None) -> Tensor | None:
        """The columns (E, D, r) that route, of the experts' token basis or of the score's own."""
        basis = self.basis if self.basis is not None else basis_EDR
        if basis is None or not self.needs_basis:
            return None
        # Where experts are shared out among processes, every process gets these columns of all of them. E·r is about
        # R, so they do not grow with the experts: 1.4 MB a layer at ViT-B's shape (D 768, R 504), where the tokens of
        # 8 images that travel to experts and back are 19 MB. Copies that stay would save that and cost a second truth.
        return widen(everywhere(basis[:, :, : self.route_rank]))

    @abstractmethod
    def score(self, x_TD: Tensor, context: Tensor | Context | None, basis_EDr: Tensor | None) -> Tensor:
        """The formula itself, on float32 tensors, with the routing columns of the basis."""


class EigenbasisScore(Score):
    """cos(Uᵀx, Uᵀc): how well a token and its attention context agree within an expert's subspace (Eq. 5)."""

    needs_context = True
    needs_basis = True

    def score(self, x_TD: Tensor, context: Tensor | Context | None, basis_EDr: Tensor | None) -> Tensor:
        """In [−1, 1]."""
        assert context is not None
        assert basis_EDr is not None
        token_TEr = project(x_TD, basis_EDr)
        return cosine(token_TEr, project_context(context, x_TD, token_TEr, basis_EDr))


class PrototypeScore(Score):
    """cos(Uᵀx, ψ) with a learned direction ψ per expert (Alg. 2, ERMoE-ba); needs no context."""

    needs_basis = True

    def __init__(
        self,
        num_experts: int,
        route_rank: int,
        **start: Unpack[Start],
    ) -> None:
        super().__init__(route_rank)
        self.psi = parameter(num_experts, route_rank, **start)
        self.reset_parameters(start.get("generator"))

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Random unit directions."""
        super().reset_parameters(generator)
        if not self.psi.is_meta:
            with torch.no_grad():
                self.psi.normal_(generator=generator)
                self.psi.div_(self.psi.norm(dim=-1, keepdim=True))

    def score(self, x_TD: Tensor, context: Tensor | Context | None, basis_EDr: Tensor | None) -> Tensor:
        """In [−1, 1]."""
        assert basis_EDr is not None
        psi_Er = widen(self.psi)
        if basis_EDr.shape[0] > 1:
            return cosine(project(x_TD, basis_EDr), psi_Er)
        # In a basis that all experts share, Uᵀx and ψᵀUᵀx are one product: narrow ones take as long as wider ones.
        basis_Dr, direction_rE = basis_EDr[0], (psi_Er * _inverse_norm(psi_Er).unsqueeze(1)).mT
        both = x_TD @ torch.cat([basis_Dr, basis_Dr @ direction_rE], 1)
        projected_Tr, along_TE = both[:, : basis_Dr.shape[1]], both[:, basis_Dr.shape[1] :]
        return along_TE * _inverse_norm(projected_Tr).unsqueeze(1)


class EnergyScore(Score):
    """‖Uᵀx‖ / ‖x‖: the share of a token that lies within an expert's subspace; needs no context."""

    needs_basis = True

    def score(self, x_TD: Tensor, context: Tensor | Context | None, basis_EDr: Tensor | None) -> Tensor:
        """In [0, 1]."""
        assert basis_EDr is not None
        projected_TEr = project(x_TD, basis_EDr)
        squared_TE = _dot(projected_TEr, projected_TEr)
        # The root has an infinite slope at 0, where a token is orthogonal to the whole subspace.
        visible = squared_TE > _SMALLEST_NORM**2
        norm_TE = torch.where(visible, squared_TE, 1.0).sqrt() * visible
        return norm_TE * _inverse_norm(x_TD).unsqueeze(-1)


class LogitScore(Score):
    """softmax(x G) with a learned gate G (D, E): what the paper's "learned-logit router" ablation means."""

    def __init__(
        self,
        dim: int,
        num_experts: int,
        **start: Unpack[Start],
    ) -> None:
        super().__init__()
        self.gate = Gate(dim, num_experts, **start)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draws the gate anew."""
        self.gate.reset_parameters(generator)

    def score(self, x_TD: Tensor, context: Tensor | Context | None, basis_EDr: Tensor | None) -> Tensor:
        """In [0, 1], summing to 1 over experts."""
        logit_TE: Tensor = self.gate(x_TD)
        return logit_TE.softmax(-1)
