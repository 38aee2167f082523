"""Speaking to people at a terminal, and listening to what they typed: one console, one way to run a command.

Nothing here imports torch, so that help appears at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, TypeVar

import tyro
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from ermoe.errors import UserError, harmless

Typed = TypeVar("Typed", bound="Command")
_OPTIONS = (tyro.conf.OmitArgPrefixes,)


class Terminal(Console):
    """A console that shows whatever a name holds, and does nothing else with it: no colours, titles or clipboards."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=harmless(segment.text))


class Command(Protocol):
    """A frozen dataclass whose fields are the options of a command, and which does it when called.

    One whose defaults depend on what was typed, such as on a preset, has a class method ``suited(argv)`` that gives an
    instance with those defaults.
    """

    def __call__(self, console: Console) -> None: ...


def say(console: Console | None, text: object) -> None:
    """Prints plain text: names of files are no markup, numbers get no colours, long lines are left to the terminal."""
    if console is not None:
        console.print(harmless(str(text)), highlight=False, markup=False, emoji=False, soft_wrap=True)


def run_command(commands: Mapping[str, type[Command]], argv: list[str], *, prog: str, description: str) -> None:
    """Finds the command that ``argv`` begins with, reads its options, and runs it."""
    kind = commands.get(argv[0]) if argv else None
    if kind is None:  # help, or a name that does not exist: tyro says which there are
        tyro.extras.subcommand_cli_from_dict(dict(commands), prog=prog, description=description, args=argv)
        return
    parse_command(kind, argv[1:], prog=f"{prog} {argv[0]}")(Terminal())


def parse_command(kind: type[Command], argv: list[str], *, prog: str) -> Command:
    """The command with the options that were typed; settings within settings are options of the same rank."""
    suited = getattr(kind, "suited", None)
    given: dict[str, Any] = {} if suited is None else {"default": suited(argv)}
    return tyro.cli(kind, prog=prog, args=argv, config=_OPTIONS, **given)


def first_read(default: Typed, argv: list[str]) -> Typed:
    """What was typed over ``default``, for a ``suited`` to find its preset in; ``default`` if it cannot be read yet."""
    words = [word for word in argv if word not in ("-h", "--help")]
    try:
        return tyro.cli(type(default), args=words, default=default, config=_OPTIONS, console_outputs=False)
    except (SystemExit, UserError):  # what is wrong is said when it is read again
        return default
