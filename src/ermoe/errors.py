"""The one exception that means: the user can mend this; and text that does nothing to a terminal but appear."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from importlib import import_module
from typing import Any

# Control characters, of which terminals make colours, titles and clipboards; marks that turn the direction of writing
# round; and halves of characters, which no terminal can show. Names of files may hold all of them.
_HARMFUL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")

_LONGEST = 1800  # letters of a sentence


def harmless(text: str) -> str:
    r"""A text with everything but letters, tabs and ends of lines written as escapes; a byte that is no UTF-8 too.

    >>> print(harmless("\x1b[31mred"), harmless("menu\udce9.png"))
    \x1b[31mred menu\xe9.png
    """
    return _HARMFUL.sub(_escaped, text)


def _escaped(letter: re.Match[str]) -> str:
    code = ord(letter[0])
    code = code - 0xDC00 if 0xDC80 <= code <= 0xDCFF else code  # a byte, as Python keeps it in names of files
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


class UserError(ValueError):
    """A mistake a person can correct. The command line prints its one sentence and exits with code 2.

    A sentence that quotes more than a person would read has its middle left out.
    """

    def __str__(self) -> str:
        text = harmless(super().__str__())
        return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 300]}…{text[-300:]}"


def unknown_name(kind: str, name: str, known: Iterable[str], *, listed_by: str | None = None) -> UserError:
    """What to raise for a name that does not exist: says which was meant, and which there are or who lists them.

    >>> str(unknown_name("preset", "tinny", ["small", "tiny"]))
    "there is no preset 'tinny': did you mean tiny? There are small, tiny"
    >>> str(unknown_name("preset", "tinny", ["small", "tiny"], listed_by="ermoe image presets"))
    "there is no preset 'tinny': did you mean tiny? ermoe image presets lists them"
    """
    known = list(known)
    nearest = difflib.get_close_matches(name, known, n=1)
    meant = f"did you mean {nearest[0]}? " if nearest else ""
    there = "There" if nearest else "there"
    there_are = f"{there} are {', '.join(known)}" if listed_by is None else f"{listed_by} lists them"
    return UserError(f"there is no {kind} {name!r}: {meant}{there_are}")


def library(name: str, purpose: str, extra: str) -> Any:
    """A module that not every installation has; without it, ``purpose`` says what needs it and pip what brings it."""
    try:
        return import_module(name)
    except ImportError:
        raise UserError(f"{purpose}: pip install 'ermoe[{extra}]'") from None
