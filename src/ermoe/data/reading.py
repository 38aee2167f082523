"""Reading files that people made: what they hold, or one sentence that names the file and says why not."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ermoe.errors import UserError


def read_bytes(path: str | os.PathLike[str], remedy: str = "look at its permissions, or copy it again") -> bytes:
    """What a file holds, unpacked if its name ends in .gz."""
    path = Path(path)
    try:
        data = path.read_bytes()
        return gzip.decompress(data) if path.suffix == ".gz" else data
    except (OSError, EOFError, zlib.error) as problem:
        reason = getattr(problem, "strerror", None) or problem
        raise UserError(f"{printable(path)} cannot be read: {reason}; {remedy}") from problem


def read_text(path: str | os.PathLike[str], remedy: str = "look at its permissions, or copy it again") -> str:
    """The text of a file, gzipped or not."""
    data = read_bytes(path, remedy)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        line = data.count(b"\n", 0, problem.start) + 1
        raise UserError(
            f"{printable(path)} is not UTF-8 text: byte {problem.start}, in line {line}, is "
            f"0x{data[problem.start]:02x}; convert it, for example with iconv -f latin1 -t utf-8"
        ) from problem


@contextmanager
def naming_what_cannot_be_read() -> Iterator[None]:
    """For looking around in folders: whatever the system refuses, to list or even to look at, is named."""
    try:
        yield
    except OSError as problem:
        if problem.filename is None:
            raise
        refused = printable(problem.filename)
        raise UserError(
            f"{refused} cannot be read: {problem.strerror}; look at the path and its permissions"
        ) from problem


def is_hidden(path: Path, below: Path | None = None) -> bool:
    """Whether a name begins with a dot: what systems keep for themselves, like the "._" twins that macOS leaves.

    With ``below``, whether any folder from there on does.

    >>> is_hidden(Path("anat/._sub-01_T1w.nii.gz")), is_hidden(Path("a/.git/b.png"), below=Path("a"))
    (True, True)
    """
    parts = (path.name,) if below is None else path.relative_to(below).parts
    return any(part.startswith(".") for part in parts)


def printable(path: str | os.PathLike[str]) -> str:
    r"""A path for messages: bytes of its name that are not UTF-8, which no terminal can show, as escapes.

    >>> print(printable(os.fsdecode(b"menu\xe9.png")))
    menu\xe9.png
    """
    return os.fsencode(path).decode("utf-8", "backslashreplace")
