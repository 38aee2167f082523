"""Options of commands: what their help says, and how they are written to a file and read back.

A command is a frozen dataclass, with dataclasses of settings in it; every field is an option, documented where it is
defined. Nothing here imports torch, so that help appears at once.
"""

from __future__ import annotations

import inspect
import json
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, make_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import docstring_parser
import tyro

from ermoe.errors import UserError, unknown_name
from ermoe.files import Json, read_object, restored, to_json

_UNSET = ("None", "", "''")
_REMEDY = "write one with --print-config, or mend it"


@dataclass(frozen=True, slots=True)
class Values:
    """What every command takes beside its own options."""

    config: Path | None = None
    """A JSON file with values of these options, as --print-config shows them; what is typed besides counts more."""
    print_config: tyro.conf.FlagCreatePairsOff[bool] = False
    """Show every value that would be used, as JSON, and do nothing else."""


@cache
def as_typed(kind: type[Any]) -> type[Any]:
    """A command whose help has the texts of all fields, with the options of `Values` besides if it has any."""
    for part in (kind, Values):
        _describe(part)
    if not fields(kind):
        return kind
    hints = typing.get_type_hints(Values, include_extras=True)
    own = [(field.name, hints[field.name], field.default) for field in fields(Values)]
    about = {"__doc__": kind.__doc__, "__module__": kind.__module__}
    return make_dataclass(kind.__name__, own, bases=(kind,), namespace=about, frozen=True, kw_only=True)


def _describe(kind: type[Any]) -> None:
    """Puts the text of every field beside its type, for tyro: in one paragraph, and silent where nothing is default."""
    hints = typing.get_type_hints(kind, include_extras=True)
    for base in kind.__mro__:
        if not is_dataclass(base):
            continue
        texts = texts_of(base)
        for field in fields(base):
            if field.name not in inspect.get_annotations(base):
                continue
            hint = hints[field.name]
            if (nested := _dataclass_in(hint)) is not None:
                _describe(nested)
                continue
            told: Any = {"help": texts.get(field.name), "help_behavior_hint": _default_hint(field)}
            own = tyro.conf.arg(**told, metavar=_several(hint))
            base.__annotations__[field.name] = Annotated[hint, own]


def texts_of(kind: type[Any]) -> dict[str, str]:
    """The texts of a dataclass's own fields, from below them or from ``Args:``.

    >>> texts_of(Values)["print_config"]
    'Show every value that would be used, as JSON, and do nothing else.'
    """
    texts, hints = {}, typing.get_type_hints(kind)
    for found in docstring_parser.parse_from_object(kind).params:
        text = " ".join((found.description or "").split())
        for name in found.arg_name.replace(",", " ").split():
            is_value = text.split(" ")[0].strip(",:;") in _choices(hints.get(name))  # of which every letter counts
            texts[name] = text if is_value or found.args[0] != "param" else text[:1].upper() + text[1:]
    return texts


def _several(hint: Any) -> str | None:
    """How an option with any number of values is shown, unless it says itself.

    >>> _several(tuple[int, ...]), _several(tuple[Literal["a", "b"], ...]), _several(int)
    ('INT …', '{a,b} …', None)
    """
    bare, *notes = typing.get_args(hint) if typing.get_origin(hint) is Annotated else (hint,)
    parts = typing.get_args(bare)
    if parts[1:] != (Ellipsis,) or any(getattr(note, "metavar", None) for note in notes):
        return None
    choices = _choices(parts[0])
    return ("{" + ",".join(choices) + "}" if choices else str(parts[0].__name__).upper()) + " …"


def _default_hint(field: Field[Any]) -> Any:
    is_required = field.default is MISSING and field.default_factory is MISSING

    def hint(default: str) -> str:
        if default in _UNSET:
            return "(required)" if is_required else ""
        return f"(default: {default})"

    return hint


def _dataclass_in(hint: Any) -> type[Any] | None:
    """The dataclass that a field holds, bare or annotated."""
    bare = typing.get_args(hint)[0] if typing.get_origin(hint) is Annotated else hint
    return bare if isinstance(bare, type) and is_dataclass(bare) else None


def as_text(command: Any, name: str) -> str:
    """Every value of a command, as `with_values` reads it back."""
    return json.dumps({"command": name, **to_json(command)}, indent=1, ensure_ascii=False)


def read_values(path: Path, name: str) -> Json:
    """The values in a file, by the names of options; those of another command are refused."""
    stored = read_object(path, _REMEDY)
    written_for = stored.pop("command", name)
    if written_for != name:
        raise UserError(f"--config {path} holds the values of {written_for}, not of {name}: name another file")
    return {option.replace("-", "_"): value for option, value in stored.items()}


def with_values(settings: Any, values: Mapping[str, Any], path: Path) -> Any:
    """Settings with the values of a file; a name that is no field is looked for in the settings within."""
    changes: dict[str, Any] = {}
    hints = typing.get_type_hints(type(settings))
    own = {field.name for field in fields(settings)}
    nested = [name for name in own if is_dataclass(getattr(settings, name))]
    for name, value in values.items():
        if name in nested and isinstance(value, Mapping):
            changes[name] = with_values(changes.get(name, getattr(settings, name)), value, path)
        elif name in own:
            changes[name] = _checked(hints[name], value, f"{path}, {name}")
        elif (home := next((part for part in nested if name in _names(getattr(settings, part))), None)) is not None:
            changes[home] = with_values(changes.get(home, getattr(settings, home)), {name: value}, path)
        else:
            raise UserError(f"{path}: {unknown_name('option', name, sorted(_names(settings)))}")
    return replace(settings, **changes)


def _names(settings: Any) -> set[str]:
    """Of all fields, those of settings within too."""
    own = {field.name for field in fields(settings)}
    return own.union(*(_names(value) for name in own if is_dataclass(value := getattr(settings, name))))


def _checked(hint: Any, value: Any, where: str) -> Any:
    """A value of the type that a field declares; a sentence that names the file and the option if it is another."""
    if not _is_of(hint, value):
        wanted = ", ".join(map(str, _choices(hint))) or getattr(hint, "__name__", str(hint))
        raise UserError(f"{where} = {json.dumps(value, ensure_ascii=False)}: need {wanted}")
    return restored(hint, value, where)


def _is_of(hint: Any, value: Any) -> bool:
    """Whether JSON has a value of this type so.

    >>> _is_of(tuple[int, ...] | None, [1, 2]), _is_of(int, True), _is_of(float, 1), _is_of(Literal["a"], "b")
    (True, False, True, False)
    """
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return any(_is_of(part, value) for part in parts)
    if origin is Literal:
        return value in parts
    if origin is tuple:
        each = parts[:1] * len(value) if parts[-1] is Ellipsis and isinstance(value, list) else parts
        return isinstance(value, list) and len(value) == len(each) and all(map(_is_of, each, value))
    if is_dataclass(hint) or origin is Mapping:
        return isinstance(value, dict)
    if hint in (int, float):
        return isinstance(value, (int, hint)) and not isinstance(value, bool)
    return hint is Any or isinstance(value, str if hint is Path else hint)


def _choices(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) is Literal else ()
