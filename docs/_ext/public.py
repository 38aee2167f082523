"""``{public} ermoe.nn``: every name of a package's ``__all__``, from its docstring; without one the build ends."""

from __future__ import annotations

import inspect
from dataclasses import is_dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

PACKAGES = ("ermoe.nn", "ermoe.images", "ermoe.brain", "ermoe.retrieval", "ermoe")
MEMBERS = ":members:\n   :show-inheritance:"


def kind_of(thing: Any) -> str:
    """The directive of autodoc for it."""
    if inspect.isclass(thing):
        return "autoexception" if issubclass(thing, BaseException) else "autoclass"
    return "autofunction" if callable(thing) else "autodata"


def undocumented(module: ModuleType, name: str) -> list[str]:
    """What a public name lacks: its own text, or that of its methods."""
    thing = getattr(module, name)
    parts = {name: thing}
    if inspect.isclass(thing):
        own = {key: value for key, value in vars(thing).items() if not key.startswith("_")}
        parts |= {
            f"{name}.{key}": value for key, value in own.items() if callable(value) or isinstance(value, property)
        }
    return [part for part, value in parts.items() if callable(value) and not inspect.getdoc(value)]


def home(module: ModuleType, name: str) -> str:
    """Where a name is described, of the packages that offer it: the same thing has one description."""
    for package in PACKAGES:
        other = import_module(package)
        if name in other.__all__ and getattr(other, name) is getattr(module, name):
            return package
    return module.__name__


def written(module: ModuleType, names: list[str]) -> str:
    """The names as Markdown that hands them to autodoc, or leads to where they are described."""
    blocks = []
    for name in names:
        thing, place = getattr(module, name), home(module, name)
        if place != module.__name__:
            link = f":py:obj:`{module.__name__}.{name} <{place}.{name}>`"
            blocks.append(f"```{{eval-rst}}\n{link}: {_first_line(thing)}\n```")
            continue
        members = f"\n   {MEMBERS}" if inspect.isclass(thing) else ""
        blocks.append(f"```{{eval-rst}}\n.. {kind_of(thing)}:: {module.__name__}.{name}{members}\n```")
    return "\n\n".join(blocks)


def _first_line(thing: Any) -> str:
    return (inspect.getdoc(thing) or "").splitlines()[0]


def of_settings(_: Sphinx, what: str, __: str, thing: Any, ___: Any, signature: str | None, returns: str | None) -> Any:
    """Of a dataclass the names and defaults of its fields; their types are for the command line, their texts below."""
    if what != "class" or not is_dataclass(thing) or "Annotated" not in (signature or ""):
        return signature, returns
    fields = [
        own.name if own.default is own.empty else f"{own.name}={_shown(own.default)}"
        for own in inspect.signature(thing).parameters.values()
    ]
    return f"({', '.join(fields)})", returns


def _shown(default: Any) -> str:
    return "..." if repr(default).startswith("<") else repr(default)


class Public(SphinxDirective):
    """The directive; names after the module's choose some of it."""

    required_arguments = 1
    optional_arguments = 100

    def run(self) -> list[nodes.Node]:
        module = import_module(self.arguments[0])
        names = self.arguments[1:] or sorted(module.__all__, key=lambda name: (name[0].isupper(), name.lower()))
        lacking = [part for name in names for part in undocumented(module, name)]
        if lacking:
            raise self.error(f"{module.__name__} has public names without a docstring: {', '.join(lacking)}")
        return self.parse_text_to_nodes(written(module, names))


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.add_directive("public", Public)
    app.connect("autodoc-process-signature", of_settings)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
