"""Putting named tensors into a model, and saying exactly what did not fit."""

from __future__ import annotations

import os
from dataclasses import dataclass

from torch import Tensor, nn

from ermoe.errors import UserError

_LISTED = 6


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
    """Copies ``state`` into ``model``. Unless ``strict`` is off, a name or shape that does not fit is an error.

    A tensor of the wrong shape counts as missing and unexpected at once.
    """
    wanted = {name: tensor.shape for name, tensor in model.state_dict().items()}
    wrong = {name for name in wanted.keys() & state.keys() if wanted[name] != state[name].shape}
    fit = Fit(
        missing=tuple(sorted(wanted.keys() - state.keys() | wrong)),
        unexpected=tuple(sorted(state.keys() - wanted.keys() | wrong)),
        resized=resized,
    )
    if strict and (fit.missing or fit.unexpected):
        shapes = {name: f"{name} {tuple(state[name].shape)} instead of {tuple(wanted[name])}" for name in wrong}
        raise UserError(f"{source} does not fit this {type(model).__name__}: {_explain(fit, shapes)}")
    fitting = {name: tensor for name, tensor in state.items() if name in wanted and name not in wrong}
    model.load_state_dict(fitting, strict=False)
    return fit


def _explain(fit: Fit, shapes: dict[str, str]) -> str:
    parts = []
    if shapes:
        parts.append(f"wrong shape {_listed(list(shapes.values()))}")
    for what, names in (("missing", fit.missing), ("unexpected", fit.unexpected), ("resized", fit.resized)):
        names = tuple(name for name in names if name not in shapes)
        if names:
            parts.append(f"{what} {_listed(names)}")
    return "; ".join(parts)


def _listed(names: list[str] | tuple[str, ...]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
