"""``{command} image``: the options of every command below ``ermoe image``, from its dataclasses."""

from __future__ import annotations

import io
import re
import warnings
from argparse import SUPPRESS, Action, ArgumentParser
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any
from unittest.mock import patch

import tyro
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from ermoe.cli.main import COMMANDS, main

Words = tuple[str, ...]


class _FoundError(Exception):
    """Raised where a command would have read its options."""


def below(words: Words) -> list[Words]:
    """The commands that begin with these words, the words themselves if they are one."""
    said = io.StringIO()
    with _instead("tyro.cli", _stop), redirect_stdout(said):
        _run([*words, "--help"])
    _, _, listed = said.getvalue().partition("COMMAND [OPTIONS]\n\n")
    names = [line.split()[0] for line in listed.partition("\n\n")[0].splitlines()]
    return [(*words, name) for name in names] or [words]


def parser_of(words: Words) -> ArgumentParser:
    """What reads the options of a command, with the defaults that its help shows."""
    found: list[ArgumentParser] = []

    def read(kind: Any, **given: Any) -> Any:
        if "--help" not in given["args"]:  # a first look for a preset
            return original(kind, **given)
        known = {name: given[name] for name in ("prog", "description", "default", "config") if name in given}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            found.append(tyro.extras.get_parser(kind, **known))
        raise _FoundError

    original = tyro.cli
    with _instead("tyro.cli", read):
        _run([*words, "--help"])
    (parser,) = found
    return parser


def every_command() -> list[Words]:
    """All of them, with the words that call them."""
    return [words for name in COMMANDS for words in below((name,))]


def options(parser: ArgumentParser) -> Iterator[tuple[str, Action]]:
    """Each argument with the heading of its group."""
    for group in parser._action_groups:
        title = re.sub(r"^.*\.| options$", "", group.title or "")
        for action in group._group_actions:
            if action.dest != "help" and action.help != SUPPRESS:
                yield title, action


def written(words: Words) -> str:
    """A command as Markdown: what it does, and a table of its options."""
    parser = parser_of(words)
    rows = [f"| {_spelling(action)} | {_default(action)} | {_text(action)} |" for _, action in options(parser)]
    description = (parser.description or "").strip()
    call = " ".join(
        ("ermoe", *words, *(str(action.metavar) for _, action in options(parser) if not action.option_strings))
    )
    table = "\n".join(["| option | default | |", "| :-- | :-- | :-- |", *rows]) if rows else "It has no options."
    return f"## ermoe {' '.join(words)}\n\n```sh\n{call}\n```\n\n{_escaped(description)}\n\n{table}\n"


def _spelling(action: Action) -> str:
    if not action.option_strings:
        return f"`{action.metavar}`".replace("|", r"\|")
    names = " / ".join(f"`{name}`" for name in action.option_strings)
    return f"{names} `{action.metavar}`".replace("|", r"\|") if action.metavar else names


def _parts(action: Action) -> tuple[str, str]:
    text, _, default = " ".join((action.help or "").split()).partition("(default: ")
    return text.removesuffix("(required)").strip(), default.removesuffix(")").removesuffix("(repeatable)")


def _default(action: Action) -> str:
    default = _parts(action)[1]
    return f"`{default}`".replace("|", r"\|") if default not in ("", "None") else ""


def _text(action: Action) -> str:
    text = _parts(action)[0]
    if not text:
        raise ValueError(f"{action.option_strings or action.metavar} has no text: document the field of its dataclass")
    return _escaped(text)


def _escaped(text: str) -> str:
    plain = re.sub(r"([*_<|\[\]])", r"\\\1", text)
    return re.sub(r"docs/([\w/-]+)\.md", r"[\1](/\1.md)", plain)


def _stop(*_: Any, **__: Any) -> None:
    raise _FoundError


@contextmanager
def _instead(name: str, function: Callable[..., Any]) -> Iterator[None]:
    with patch(name, function):
        yield


def _run(argv: list[str]) -> None:
    try:
        main(argv)
    except (_FoundError, SystemExit):
        return


class Commands(SphinxDirective):
    """The directive."""

    required_arguments = 1
    optional_arguments = 3

    def run(self) -> list[nodes.Node]:
        try:
            text = "\n\n".join(written(words) for words in below(tuple(self.arguments)))
        except ValueError as lack:
            raise self.error(str(lack)) from lack
        return self.parse_text_to_nodes(text, allow_section_headings=True)


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.add_directive("command", Commands)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
