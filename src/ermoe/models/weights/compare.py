"""What a model would lose if it were written down: the first difference from the model that is built again."""

from __future__ import annotations

import copy
import math
from enum import Enum
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from ermoe.nn.settings import LayerSettings

# Attributes that do not make it another model: how it is computed, trained or initialised, where it came from, and the
# number of classes, which the head itself shows.
_PASSING = {
    "training", "grad_checkpointing", "gradient_checkpointing", "fused_attn", "every_expert", "expert_by_expert",
    "base_is_frozen", "weight_init_mode", "fix_init", "head_init_scale", "name_or_path", "num_classes",
}  # fmt: skip
_RATE_TOLERANCE = 1e-5  # rates of dropout are read off models in float32
_HALF_TOLERANCE = 1e-2  # buffers are rounded when a model is cast to half precision, and stay so when it is cast back


def difference(model: nn.Module, rebuilt: nn.Module) -> str | None:
    """The first thing in which ``rebuilt``, which may be on the meta device, is not ``model``; None if it is.

    Modules are compared by class, plain attributes and buffers that are not saved; what is saved, by shape and
    precision. ``rebuilt`` takes over what modules save beside their tensors.
    """
    mine, theirs = dict(model.named_modules()), dict(rebuilt.named_modules())
    for name in {**mine, **theirs}:
        found = _module_difference(mine.get(name), theirs.get(name))
        if found is not None:
            return f"{name or 'the model'} {found}"
    return _state_difference(model.state_dict(), rebuilt.state_dict())


def _module_difference(module: nn.Module | None, twin: nn.Module | None) -> str | None:
    if module is None or twin is None or type(module) is not type(twin):
        return "is {}, and would come back as {}".format(*_class_names(module, twin))
    if type(module).get_extra_state is not nn.Module.get_extra_state:
        twin.set_extra_state(module.get_extra_state())
    for name in {**vars(module), **vars(twin)}:
        # What only the saved module has is a note of its owner: no code of its class asks for it.
        if name.startswith("_") or name in _PASSING or not hasattr(twin, name):
            continue
        before, after = getattr(module, name, None), getattr(twin, name)
        if _is_plain(before) and _is_plain(after) and not _is_same(before, after):
            return f"has {name} = {before!r}, and would come back with {after!r}"
    return _buffer_difference(module, twin)


def _class_names(module: nn.Module | None, twin: nn.Module | None) -> tuple[str, str]:
    """Short names, with their modules where they would be equal."""
    kinds = [None if m is None else type(m) for m in (module, twin)]
    short = ["absent" if kind is None else kind.__qualname__ for kind in kinds]
    if short[0] != short[1]:
        return short[0], short[1]
    whole = [f"{kind.__module__}.{kind.__qualname__}" for kind in kinds if kind is not None]
    return whole[0], whole[1]


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, (Real, str, Enum, torch.dtype, LayerSettings))


def _is_same(a: Any, b: Any) -> bool:
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(map(_is_same, a, b))
    if isinstance(a, Real) and isinstance(b, Real):
        return math.isclose(a, b, rel_tol=_RATE_TOLERANCE)
    return bool(a == b)


def _buffer_difference(module: nn.Module, twin: nn.Module) -> str | None:
    """Buffers that are not saved: tables that a module computes from its attributes."""
    names = module._non_persistent_buffers_set | twin._non_persistent_buffers_set
    computed = _computed(twin) if names else twin
    for name in sorted(names):
        before, after = getattr(module, name, None), getattr(computed, name, None)
        if _form(before) != _form(after):
            return f"has {name} of {_form(before)}, and would come back with {_form(after)}"
        if isinstance(before, Tensor) and isinstance(after, Tensor) and not _is_close(before, after):
            return f"has values of its own in {name}, which would be computed anew"
    return None


def _computed(twin: nn.Module) -> nn.Module:
    """The module with the values of its buffers, where it has timm's method that computes them."""
    if not hasattr(twin, "init_non_persistent_buffers"):
        return twin
    real = copy.deepcopy(twin).to_empty(device="cpu")
    computing: Any = real
    computing.init_non_persistent_buffers()
    return real


def _is_close(before: Tensor, after: Tensor) -> bool:
    if after.is_meta or before.is_meta:
        return True
    before, after = before.cpu().double(), after.double()
    return torch.allclose(before, after, rtol=_HALF_TOLERANCE, atol=_HALF_TOLERANCE, equal_nan=True)


def _state_difference(mine: dict[str, Any], theirs: dict[str, Any]) -> str | None:
    for name in {**mine, **theirs}:
        before, after = _form(mine.get(name)), _form(theirs.get(name))
        if before != after:
            return f"{name} is {before}, and would come back as {after}"
    return None


def _form(value: Any) -> str:
    if not isinstance(value, Tensor):
        return "absent" if value is None else type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
