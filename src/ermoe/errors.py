"""The one exception that means: the user can mend this."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from importlib import import_module
from typing import Any


class UserError(ValueError):
    """A mistake a person can correct. The command line prints its one sentence and exits with code 2."""


def unknown_name(kind: str, name: str, known: Iterable[str]) -> UserError:
    """What to raise for a name that does not exist: says which was probably meant, and which there are.

    >>> str(unknown_name("preset", "tinny", ["small", "tiny"]))
    "there is no preset 'tinny': did you mean tiny? There are small, tiny"
    """
    known = list(known)
    nearest = difflib.get_close_matches(name, known, n=1)
    meant = f"did you mean {nearest[0]}? " if nearest else ""
    return UserError(f"there is no {kind} {name!r}: {meant}There are {', '.join(known)}")


def library(name: str, purpose: str, extra: str) -> Any:
    """A module that not every installation has; without it, ``purpose`` says what needs it and pip what brings it."""
    try:
        return import_module(name)
    except ImportError:
        raise UserError(f"{purpose}: pip install 'ermoe[{extra}]'") from None
