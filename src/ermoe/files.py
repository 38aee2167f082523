"""Writing files so that nobody ever reads half of one."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ermoe.errors import UserError


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
    except PermissionError as problem:
        if problem.filename != str(draft):
            raise
        raise UserError(f"{path} cannot be written: {problem.strerror}; choose another place") from problem
    finally:
        draft.unlink(missing_ok=True)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
