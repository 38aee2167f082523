"""Names of ours that docstrings and pages mention exist: a reference to one that does not ends a strict build."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.util import logging

LOGGER = logging.getLogger(__name__)


def found(name: str) -> Any:
    """What a dotted name of ours stands for; raises AttributeError or ImportError where it stands for nothing."""
    parts = name.split(".")
    thing = import_module(parts[0])
    for end, part in enumerate(parts[1:], start=2):
        try:
            thing = getattr(thing, part)
        except AttributeError:
            fields = getattr(thing, "__annotations__", {}) | getattr(thing, "__dataclass_fields__", {})
            if part in fields and end == len(parts):
                return fields[part]
            thing = import_module(".".join(parts[:end]))
    return thing


def resolved(_: Sphinx, __: Any, node: pending_xref, shown: nodes.TextElement) -> nodes.TextElement | None:
    """Leaves the text of a reference that has no page, after a look whether the thing exists."""
    target = node.get("reftarget", "")
    if node.get("refdomain") != "py":
        return None
    if target.startswith("ermoe."):
        try:
            found(target)
        except (AttributeError, ImportError):
            LOGGER.warning("there is no %s", target, location=node)
    return shown


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("missing-reference", resolved)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
