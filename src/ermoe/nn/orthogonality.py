"""Keeping every basis of a model orthonormal: the penalty during training, the retraction between epochs.

Under FSDP2 the stacked parameters are sharded over experts, so each process holds whole bases: the penalty is summed
over processes, and every process retracts its own experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ermoe.nn.basis import orthogonality_penalty, orthonormality_error, polar_factor
from ermoe.nn.experts import DenseLinear, EigenLinear
from ermoe.nn.precision import double
from ermoe.nn.scores import LogitScore, PrototypeScore, Score
from ermoe.nn.sharding import by_mesh, over_processes, own_experts

_SMALL_STACK = 2**18  # numbers, up to which copying stacks into one costs less than a product of each


@dataclass(slots=True, frozen=True)
class Retraction:
    """What `retract` did to one stack of weights: the worst expert's figures.

    ``error_before`` and ``error_after`` are spectral, max(‖UᵀU − I‖₂, ‖VᵀV − I‖₂); ``weight_change`` is the relative
    change of W in the Frobenius norm.
    """

    error_before: float
    error_after: float
    weight_change: float


def bases(model: nn.Module) -> Iterator[Tensor]:
    """Every stack of bases (E, n, R) of a model: U and V of the experts, and routing bases of their own."""
    for module in model.modules():
        if isinstance(module, EigenLinear):
            yield module.U
            yield module.V
        elif isinstance(module, Score) and module.basis is not None:
            yield module.basis


def orthogonality_loss(model: nn.Module) -> Tensor:
    """Σ over layers, experts and bases of ‖UᵀU − I‖²_F (Eq. 9), a differentiable scalar; 0 without bases.

    >>> from ermoe.nn import EigenMoE
    >>> bool(orthogonality_loss(EigenMoE(16, num_experts=2)) < 1e-9)
    True
    """
    penalties = []
    for group in by_mesh(bases(model)):
        stacks = _alike(own_experts(basis) for basis in group)
        own = torch.stack([orthogonality_penalty(stack) for stack in stacks]).sum()
        penalties.append(over_processes(own, group[0], "sum"))
    return torch.stack(penalties).sum() if penalties else torch.zeros(())


def _alike(stacks: Iterable[Tensor]) -> Iterator[Tensor]:
    """The same bases in fewer stacks: small ones of equal shape in one, for they cost little more than one of them."""
    groups: dict[Any, list[Tensor]] = {}
    for stack in stacks:
        if stack.numel() > _SMALL_STACK:
            yield stack
        else:
            groups.setdefault((stack.shape, stack.dtype, stack.device), []).append(stack)
    for group in groups.values():
        yield group[0] if len(group) == 1 else torch.cat(group)


@torch.no_grad()
def retract(model: nn.Module, *, report: bool = True) -> dict[str, Retraction]:
    """Replaces every basis by the nearest orthonormal one and refits s, in place; call it once an epoch.

    Columns keep their place, so the ones that route go on routing. Returns what was done, by module name; figures take
    longer than the deed, and without ``report`` there are none.
    """
    found = {}
    for name, module in model.named_modules():
        factors = _factors(module)
        if not factors:
            continue
        own = [own_experts(factor).detach() for factor in factors]
        before = [double(factor).clone() for factor in own] if report else []
        if len(own[0]):  # else there are more processes than experts
            _retract(*own)
        if report:
            done = _compared(before, [double(factor) for factor in own]) if len(own[0]) else Retraction(0.0, 0.0, 0.0)
            found[name] = _worst_process(done, factors[0])
    return found


def _factors(module: nn.Module) -> tuple[Tensor, ...]:
    """U, s and V of stacked weights, a score's own basis alone, or nothing."""
    if isinstance(module, EigenLinear):
        return module.U, module.s, module.V
    return (module.basis,) if isinstance(module, Score) and module.basis is not None else ()


def _retract(U: Tensor, s: Tensor | None = None, V: Tensor | None = None) -> None:
    new_U = polar_factor(U)
    if s is not None and V is not None:
        new_V = polar_factor(V)
        # s'_i = (QᵤᵀWQᵥ)_ii with W = U diag(s) Vᵀ, through the R×R products alone
        turned_U, turned_V = new_U.mT @ double(U), new_V.mT @ double(V)
        s.copy_(((turned_U * double(s).unsqueeze(1)) * turned_V).sum(-1))
        V.copy_(new_V)
    U.copy_(new_U)


def _compared(old: list[Tensor], new: list[Tensor]) -> Retraction:
    change = _relative_change(old, new) if len(new) > 1 else 0.0
    return Retraction(_worst(old[::2]), _worst(new[::2]), change)


def _worst(stacks: list[Tensor]) -> float:
    return max(float(orthonormality_error(stack).max()) for stack in stacks)


def _relative_change(old: list[Tensor], new: list[Tensor]) -> float:
    """max_e ‖W' − W‖ / ‖W‖ without building a W: ⟨U s Vᵀ, Q t Pᵀ⟩ = Σ_ij s_i (UᵀQ)_ij t_j (VᵀP)_ij."""

    def inner(a: list[Tensor], b: list[Tensor]) -> Tensor:
        return torch.einsum("ei,eij,ej,eij->e", a[1], a[0].mT @ b[0], b[1], a[2].mT @ b[2])

    before = inner(old, old)
    squared_change = (before - 2 * inner(old, new) + inner(new, new)).clamp_min(0)
    return float((squared_change / before.clamp_min(torch.finfo(torch.float64).tiny)).sqrt().max())


def _worst_process(own: Retraction, parameter: Tensor) -> Retraction:
    figures = torch.tensor([own.error_before, own.error_after, own.weight_change], device=parameter.device)
    return Retraction(*over_processes(figures, parameter, "max").tolist())


def no_weight_decay(model: nn.Module) -> set[str]:
    """Names of the parameters that weight decay must not touch: bases, s, ψ, expert biases.

    Decay would pull the columns of a basis away from length one. Expert biases are listed because they are stacked,
    (E, n), and so escape the usual rule that exempts vectors.
    """
    names: set[str] = set()
    for prefix, module in model.named_modules():
        exempt: tuple[str, ...] = ()
        if isinstance(module, EigenLinear):
            exempt = ("U", "s", "V", "bias")
        elif isinstance(module, DenseLinear):
            exempt = ("bias",)
        elif isinstance(module, Score) and not isinstance(module, LogitScore):
            exempt = ("basis", "psi") if isinstance(module, PrototypeScore) else ("basis",)
        own = dict(module.named_parameters(recurse=False))
        names.update(f"{prefix}.{name}" if prefix else name for name in exempt if name in own)
    return names
