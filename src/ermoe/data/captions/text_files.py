"""Text about images: JSON files and captions, or a sentence about what is wrong with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ermoe.data.reading import read_text
from ermoe.errors import UserError


def read_json(path: Path) -> Any:
    """The content of a JSON file."""
    try:
        return json.loads(read_text(path))
    except json.JSONDecodeError as problem:
        raise UserError(
            f"{path} is no valid JSON (line {problem.lineno}: {problem.msg}): copy or download it again"
        ) from problem


def checked_caption(text: Any, where: str) -> str:
    """A caption without surrounding white space; ``where`` says whose it is."""
    if not isinstance(text, str):
        raise UserError(f"{where}: a caption is {text!r}, not text; mend the file")
    if not text.strip():
        raise UserError(f"{where}: a caption is empty; write one, or remove its entry")
    return " ".join(text.split())
