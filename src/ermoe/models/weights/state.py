"""Putting named tensors into a model, and saying exactly what did not fit."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ermoe.errors import UserError
from ermoe.models.weights.checkpoints import first_line

_LISTED = 6
_CHECKS_ITSELF = "_extra_state"  # torch's name for what a module reads with a method of its own


@dataclass(frozen=True, slots=True)
class Fit:
    """How weights fitted a model: names the file lacked, names it had in excess, and what was resized to fit."""

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    resized: tuple[str, ...] = ()


def load_state(
    model: nn.Module,
    state: dict[str, Tensor],
    *,
    source: str | os.PathLike[str],
    strict: bool = True,
    resized: tuple[str, ...] = (),
) -> Fit:
    """Copies ``state`` into ``model``. Unless ``strict`` is off, a name, shape or type that does not fit is an error.

    A tensor of the wrong shape counts as missing and unexpected at once, and so does one of a type that would lose
    something, like complex numbers for real ones. Weights that are not numbers, the end of a run that diverged, are
    refused always.
    """
    wanted = model.state_dict()
    shared = {name: state[name] for name in wanted if name in state and not name.endswith(_CHECKS_ITSELF)}
    shapes = {
        name: f"{name} {tuple(tensor.shape)} instead of {tuple(wanted[name].shape)}"
        for name, tensor in shared.items()
        if tensor.shape != wanted[name].shape
    }
    types = {
        name: f"{name} {tensor.dtype} instead of {wanted[name].dtype}"
        for name, tensor in shared.items()
        if name not in shapes and not torch.can_cast(tensor.dtype, wanted[name].dtype)
    }
    wrong = shapes.keys() | types.keys()
    fit = Fit(
        missing=tuple(sorted(wanted.keys() - state.keys() | wrong)),
        unexpected=tuple(sorted(state.keys() - wanted.keys() | wrong)),
        resized=resized,
    )
    if strict and (fit.missing or fit.unexpected):
        raise UserError(f"{source} does not fit this {type(model).__name__}: {_explain(fit, shapes, types)}")
    fitting = {name: tensor for name, tensor in state.items() if name in wanted and name not in wrong}
    parameters = {name for name, _ in model.named_parameters()}
    if broken := [
        name for name, tensor in fitting.items() if not _has_numbers(tensor, may_be_infinite=name not in parameters)
    ]:
        raise UserError(
            f"{source} holds values that are not numbers: {_listed(broken)}; its training diverged, or the file is "
            "damaged: use an earlier checkpoint, or copy it again"
        )
    try:
        model.load_state_dict(fitting, strict=False)
    except (RuntimeError, TypeError, ValueError) as problem:
        raise UserError(f"{source} does not fit this {type(model).__name__}: {first_line(problem)}") from problem
    return fit


def _has_numbers(tensor: Tensor, *, may_be_infinite: bool) -> bool:
    """Whether no value is NaN, and none infinite unless that may be: buffers hold masks of −∞."""
    if not tensor.is_floating_point():
        return True
    return not bool(tensor.isnan().any() if may_be_infinite else (~tensor.isfinite()).any())


def _explain(fit: Fit, shapes: dict[str, str], types: dict[str, str]) -> str:
    parts = []
    for what, wrong in (("shape", shapes), ("type", types)):
        if wrong:
            parts.append(f"wrong {what} {_listed(list(wrong.values()))}")
    for what, names in (("missing", fit.missing), ("unexpected", fit.unexpected), ("resized", fit.resized)):
        names = tuple(name for name in names if name not in shapes and name not in types)
        if names:
            parts.append(f"{what} {_listed(names)}")
    return "; ".join(parts)


def _listed(names: list[str] | tuple[str, ...]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
