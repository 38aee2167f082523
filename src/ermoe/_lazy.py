"""Public names of a package that are imported when they are first asked for, so that help need not wait for torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def offer(
    package: str, homes: Mapping[str, tuple[str, ...]], parts: tuple[str, ...] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """What to call ``__getattr__`` and ``__dir__`` in a package; ``homes`` are modules with the names they bring.

    ``parts`` are packages below that need no import of their own.
    """
    home = {name: module for module, names in homes.items() for name in names}

    def find(name: str) -> Any:
        if name in parts:
            return import_module(f"{package}.{name}")
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(home[name]), name)

    def names() -> list[str]:
        return sorted([*vars(import_module(package)), *home, *parts])

    return find, names
