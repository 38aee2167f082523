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
    except RecursionError as problem:
        raise UserError(f"{path} is nested too deeply for a caption file: name another") from problem


def one_split(splits: dict[str, str], file: str, split: str, where: str) -> None:
    """Notes the split of an image, which may not be in two."""
    if splits.setdefault(file, split) != split:
        raise UserError(f"{where}: image {file} is in the splits {splits[file]!r} and {split!r}; decide for one")


def is_broken(text: str) -> bool:
    """Whether a text holds a lone surrogate, half of a character, which JSON may and no file can."""
    return any("\ud800" <= letter <= "\udfff" for letter in text)


def checked_caption(text: Any, where: str) -> str:
    """A caption without surrounding white space; ``where`` says whose it is."""
    if not isinstance(text, str):
        raise UserError(f"{where}: a caption is {text!r}, not text; mend the file")
    if not text.strip():
        raise UserError(f"{where}: a caption is empty; write one, or remove its entry")
    if is_broken(text):
        raise UserError(f"{where}: a caption holds half of a character ({text!r}); mend the file")
    return " ".join(text.split())
