"""The built site asks no other host for anything: a page, style or script that would ends a strict build."""

from __future__ import annotations

import re
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.util import logging

LOGGER = logging.getLogger(__name__)
ASKS = {
    ".html": r"<(?:link|script|img|iframe|source|object|embed)\b[^>]*\b(?:href|src|data)=\"((?:https?:)?//[^\"]+)",
    ".css": r"(?:url\(|@import)\s*[\"']?((?:https?:)?//[^\"')]+)",
    ".js": r"(?:fetch|import|importScripts)\(\s*[\"']((?:https?:)?//[^\"']+)",
}


def outside(folder: Path) -> list[tuple[str, str]]:
    """Files of a site and what they would ask of others."""
    found = []
    for path in sorted(folder.rglob("*")):
        if path.suffix in ASKS:
            text = path.read_text(encoding="utf-8", errors="replace")
            found += [(str(path.relative_to(folder)), address) for address in re.findall(ASKS[path.suffix], text)]
    return found


def look(app: Sphinx, problem: Exception | None) -> None:
    """At the end of a build."""
    if problem is None and app.builder.format == "html":
        for name, address in outside(Path(app.outdir)):
            LOGGER.warning("%s would ask %s", name, address)


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("build-finished", look)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
