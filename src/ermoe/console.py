"""Speaking to people at a terminal, and listening to what they typed: one console, one way to run a command.

Nothing here imports torch, so that help appears at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol, TypeVar

import tyro
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from ermoe import options
from ermoe.errors import UserError, harmless, unknown_name

Typed = TypeVar("Typed", bound="Command")
_OPTIONS = (tyro.conf.OmitArgPrefixes, tyro.conf.DisallowNone)


class Terminal(Console):
    """A console that shows whatever a name holds, and does nothing else with it: no colours, titles or clipboards."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=harmless(segment.text))


class Command(Protocol):
    """A frozen dataclass whose fields are the options of a command, and which does it when called.

    One whose defaults depend on its preset has a class method ``suited(argv, preset)`` that gives an instance with
    them; ``preset`` is that of a file, if there is one.
    """

    def __call__(self, console: Console) -> None: ...


def say(console: Console | None, text: object) -> None:
    """Prints plain text: names of files are no markup, numbers get no colours, long lines are left to the terminal."""
    if console is not None:
        console.print(harmless(str(text)), highlight=False, markup=False, emoji=False, soft_wrap=True)


def run_command(commands: Mapping[str, type[Command]], argv: list[str], *, prog: str, description: str) -> None:
    """Finds the command that ``argv`` begins with, reads its options, and runs it."""
    if not argv or argv[0] in ("-h", "--help"):
        print(usage(prog, description, {name: _first_sentence(kind) for name, kind in commands.items()}))
        return
    if argv[0] not in commands:
        raise unknown_name(f"command of {prog}", argv[0], commands)
    parse_command(commands[argv[0]], argv[1:], prog=f"{prog} {argv[0]}")(Terminal())


def usage(prog: str, description: str, purposes: Mapping[str, str], *, ending: str = "") -> str:
    """What a command with commands below it says of itself."""
    width = max(map(len, purposes))
    lines = "\n".join(f"  {name:{width}}  {purpose}" for name, purpose in purposes.items())
    return (
        f"{description}\n\nusage: {prog} COMMAND [OPTIONS]\n\n{lines}\n\n"
        f"  {prog} COMMAND --help   the options of a command{ending}"
    )


def _first_sentence(kind: type[Command]) -> str:
    return (kind.__doc__ or "").partition("\n")[0]


def parse_command(kind: type[Command], argv: list[str], *, prog: str) -> Command:
    """The command with the options that were typed; settings within settings are options of the same rank.

    With ``--config FILE``, what was not typed is taken from the file; ``--print-config`` shows all values and ends.
    """
    typed = options.as_typed(kind)
    default = _default(kind, argv, prog)
    known = {} if default is None else {"default": typed(**_values(default))}
    read: Any = tyro.cli(typed, prog=prog, args=argv, config=_OPTIONS, **known)
    command = kind(**{name: getattr(read, name) for name in _names(kind)})
    if getattr(read, "print_config", False):
        print(options.as_text(command, prog))
        raise SystemExit(0)
    return command


def first_read(default: Typed, argv: list[str]) -> Typed:
    """What was typed over ``default``, for a ``suited`` to find its preset in; ``default`` if it cannot be read yet."""
    words = [word for word in argv if word not in ("-h", "--help")]
    typed = options.as_typed(type(default))
    try:
        read = tyro.cli(typed, args=words, default=typed(**_values(default)), config=_OPTIONS, console_outputs=False)
    except (SystemExit, UserError):  # what is wrong is said when it is read again
        return default
    return type(default)(**{name: getattr(read, name) for name in _names(type(default))})


def _default(kind: type[Any], argv: list[str], prog: str) -> Any:
    """The values that hold where nothing is typed, if they are not those of the class alone."""
    path = _typed_path(argv)
    suited = getattr(kind, "suited", None)
    if path is None:
        return None if suited is None else suited(argv)
    values = options.read_values(path, prog)
    if suited is None:
        required = [field for field in fields(kind) if field.default is MISSING and field.default_factory is MISSING]
        return options.with_values(kind(**{field.name: tyro.MISSING for field in required}), values, path)
    return options.with_values(suited(argv, values.get("preset")), values, path)


def _typed_path(argv: list[str]) -> Path | None:
    """The file of ``--config FILE`` or ``--config=FILE``.

    >>> _typed_path(["a", "--config", "x.json"]), _typed_path(["--config=y.json"]), _typed_path(["--config"])
    (PosixPath('x.json'), PosixPath('y.json'), None)
    """
    for word, following in pairwise([*argv, ""]):
        name, _, value = word.partition("=")
        if name == "--config" and (value or following):
            return Path(value or following)
    return None


def _names(kind: type[Any]) -> list[str]:
    return [field.name for field in fields(kind)]


def _values(settings: Any) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in _names(type(settings))}
