"""Writing files so that nobody ever reads half of one, and what the disk refuses is said in one sentence."""

from __future__ import annotations

import errno
import json
import os
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ermoe.errors import UserError

StrPath = str | os.PathLike[str]
"""What names a file or folder."""
_FULL = (errno.ENOSPC, errno.EDQUOT)
_DRAFT = re.compile(r"\..+\.[0-9a-f]{32}(\.\w+)?")


class UnwritableError(UserError):
    """A file that the disk refuses: ``reason`` is the system's, ``remedy`` what would help."""

    def __init__(self, path: Path, problem: OSError) -> None:
        self.path = path
        self.reason = problem.strerror
        self.remedy = "free some space" if problem.errno in _FULL else "make it writable"
        super().__init__(f"{path} cannot be written: {self.reason}; {self.remedy}, or choose another place")


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A path to write to. When the block succeeds, what was written takes the place of ``path`` in one step.

    Readers see the old file or the new one, also if the machine stops in between. When the block fails, the old file
    stays and nothing is left behind. Missing folders are made.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with replacing(Path(folder, "notes", "a.txt")) as draft:
    ...         size = draft.write_text("whole")
    ...     Path(folder, "notes", "a.txt").read_text(), len(os.listdir(Path(folder, "notes")))
    ('whole', 1)
    """
    path = Path(path)
    if path.is_dir():
        raise UserError(f"{path} is a folder: name a file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise UserError(f"{path.parent} cannot be a folder: {problem.strerror}; choose another place") from problem
    # The suffix stays, because some writers choose the format by it.
    draft = path.with_name(f".{path.stem}.{uuid.uuid4().hex}{path.suffix}")
    try:
        yield draft
        _flush(draft)
        os.replace(draft, path)
        _flush(path.parent)
    except UserError:
        raise
    except Exception as problem:
        if (refusal := _refusal(problem, draft)) is not None:
            raise UnwritableError(path, refusal) from problem
        raise
    finally:
        with suppress(OSError):
            draft.unlink(missing_ok=True)


def _refusal(problem: Exception, draft: Path) -> OSError | None:
    """The disk's own error behind one that was raised while ``draft`` was written; None if the disk is not to blame.

    Libraries hide it: on a full disk torch speaks of an unexpected position, safetensors of serialising. So the disk
    is asked once more.
    """
    if isinstance(problem, OSError) and problem.errno is not None:
        is_own = problem.filename is None or str(problem.filename) in (str(draft), str(draft.parent))
        return problem if is_own else None
    try:
        with draft.open("ab") as file:
            file.write(bytes(2**20))
    except OSError as refusal:
        return refusal
    return None


def cache_folder(name: str) -> Path:
    """Where things of one kind are kept that can be made again: in ``$ERMOE_CACHE``, or among the user's caches.

    >>> cache_folder("brain").name
    'brain'
    """
    own = os.environ.get("ERMOE_CACHE")
    return Path(own or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ermoe") / name


def write_json(path: str | os.PathLike[str], content: Any) -> None:
    """Replaces a file by ``content`` as JSON that people can read."""
    with replacing(path) as draft:
        draft.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read_json(path: str | os.PathLike[str], remedy: str) -> Any:
    """What a file of JSON holds; one that cannot be read or is no JSON is named, with what to do about it."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else "it is damaged"
        raise UserError(f"{path} cannot be read: {reason}; {remedy}") from problem


def append(path: Path, data: bytes) -> None:
    """Adds ``data`` at the end of a file: all of it, or nothing if the disk refuses."""
    try:
        with path.open("ab", buffering=0) as file:
            size = file.tell()
            try:
                while data:  # a disk that fills up takes a part first, and refuses the rest
                    data = data[file.write(data) :]
            except OSError:
                file.truncate(size)
                raise
    except OSError as problem:
        raise UnwritableError(path, problem) from problem


def remove_drafts(folder: Path) -> None:
    """Removes what killed processes left of files they were replacing in ``folder``; nobody may be writing there."""
    for path in folder.glob(".*"):
        if _DRAFT.fullmatch(path.name):
            with suppress(OSError):
                path.unlink()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
