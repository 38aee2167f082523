"""Settings as JSON and back: one pair of functions for every frozen dataclass that is written to a file."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from os import PathLike, fspath
from typing import Any, TypeVar

from ermoe.errors import UserError

Json = dict[str, Any]
"""An object as JSON has it: text, numbers, truth values, None, and lists and objects of these."""
Settings = TypeVar("Settings")


def to_json(value: Any) -> Any:
    """Plain values: dataclasses and mappings become objects, sequences lists, paths text; NaN, which JSON lacks, None.

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class Grid:
    ...     shape: tuple[int, int] = (2, 3)
    >>> to_json({"grid": Grid(), "loss": float("nan")})
    {'grid': {'shape': [2, 3]}, 'loss': None}
    """
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(name): to_json(item) for name, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [to_json(item) for item in value]
    if isinstance(value, PathLike):
        return fspath(value)
    return None if isinstance(value, float) and math.isnan(value) else value


def from_json(kind: type[Settings], stored: Mapping[str, Any], *, source: str) -> Settings:
    """The settings that `to_json` wrote; fields that are lacking have their defaults, unknown ones are refused.

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class Grid:
    ...     shape: tuple[int, int] = (2, 3)
    >>> from_json(Grid, {"shape": [4, 5]}, source="config.json")
    Grid(shape=(4, 5))
    """
    known = typing.get_type_hints(kind)
    names = {field.name for field in fields(kind) if field.init}  # type: ignore[arg-type]
    if unknown := sorted(set(stored) - names):
        raise UserError(f"{source} has the unknown settings {', '.join(unknown)}: it is of a newer ermoe")
    return kind(**{name: _restored(known[name], value, source) for name, value in stored.items()})


def _restored(kind: Any, value: Any, source: str) -> Any:
    """A value of the type that a field declares: JSON has no tuples and no dataclasses."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        chosen = next((part for part in arguments if _fits(part, value)), None)
        return value if chosen is None else _restored(chosen, value, source)
    if is_dataclass(kind) and isinstance(value, Mapping):
        return from_json(kind, value, source=source)  # type: ignore[arg-type]
    if origin is tuple and isinstance(value, list):
        each = arguments[:1] * len(value) if arguments[-1] is Ellipsis else arguments
        return tuple(_restored(part, item, source) for part, item in zip(each, value, strict=True))
    return value


def _fits(kind: Any, value: Any) -> bool:
    if value is None or kind is types.NoneType:
        return value is None and kind is types.NoneType
    if isinstance(value, Mapping):
        return is_dataclass(kind) or typing.get_origin(kind) in (dict, Mapping)
    return not isinstance(value, list) or typing.get_origin(kind) is tuple
