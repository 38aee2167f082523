"""``{presets} ermoe.images.presets``: every preset of a module with all its values, and the families they come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from importlib import import_module
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective


def values(recipe: Any, prefix: str = "") -> dict[str, str]:
    """The plain values of nested dataclasses and mappings, by dotted name."""
    if is_dataclass(recipe):
        pairs = {field.name: getattr(recipe, field.name) for field in fields(recipe)}
    else:
        pairs = dict(recipe)
    flat: dict[str, str] = {}
    for name, value in pairs.items():
        if is_dataclass(value) or (isinstance(value, Mapping) and value):
            flat |= values(value, f"{prefix}{name}.")
        else:
            flat[prefix + str(name)] = "" if value is None else str(value)
    return flat


def table(recipes: Mapping[str, Any]) -> str:
    """Values that presets share once, and below them those in which each differs."""
    found = {name: values(recipe) for name, recipe in recipes.items()}
    names = list(dict.fromkeys(key for own in found.values() for key in own))
    shared = [key for key in names if len({own.get(key, "–") for own in found.values()}) == 1 and key != "preset"]
    differing = [key for key in names if key not in shared and key != "preset"]
    lines = []
    if len(recipes) > 1:
        lines += ["| preset | in what it differs |", "| :-- | :-- |"]
        for name, own in found.items():
            said = ", ".join(f"{key.removeprefix('sparsity.')} {own[key]}" for key in differing if own.get(key))
            lines.append(f"| `{name}` | {said} |")
        lines += ["", "All of them:", ""]
    lines += ["| value | |", "| :-- | :-- |"]
    lines += [f"| `{key}` | {next(iter(found.values()))[key] or '–'} |" for key in shared]
    return "\n".join(lines)


def families(presets: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Presets by what their names begin with."""
    groups: dict[str, dict[str, Any]] = {}
    for name, make in presets.items():
        recipe = make() if callable(make) and not is_dataclass(make) else make
        family = "All of them" if hasattr(recipe, "about") else "-".join(_prefix(name))
        groups.setdefault(family, {})[name] = recipe
    return groups


def _prefix(name: str) -> list[str]:
    words = name.split("-")
    return words[:2] if words[0] in ("deit", "openai", "laion", "imagenet") else words[:1]


class Presets(SphinxDirective):
    """The directive: a module with a mapping ``PRESETS``."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        presets = import_module(self.arguments[0]).PRESETS
        text = "\n\n".join(f"### {family}\n\n{table(group)}" for family, group in families(presets).items())
        return self.parse_text_to_nodes(text, allow_section_headings=True)


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.add_directive("presets", Presets)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
