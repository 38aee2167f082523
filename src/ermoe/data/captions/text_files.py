"""Reading text that people made: UTF-8 or a sentence about where it is not."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from ermoe.errors import UserError


def read_text(path: Path) -> str:
    """The text of a file, gzipped or not."""
    try:
        data = path.read_bytes()
        data = gzip.decompress(data) if path.suffix == ".gz" else data
    except (OSError, EOFError) as problem:
        raise UserError(f"{path} cannot be read: {problem}; look at the path and its permissions") from problem
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        line = data.count(b"\n", 0, problem.start) + 1
        raise UserError(
            f"{path} is not UTF-8 text: byte {problem.start}, in line {line}, is 0x{data[problem.start]:02x}; convert "
            f"it, for example with iconv -f latin1 -t utf-8"
        ) from problem


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
