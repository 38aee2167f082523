"""One process at a time in a run folder or a file of records: by a lock of the operating system.

The system itself ends a lock with the process that holds it, however that process ends, so nobody has to guess whether
a lock that was left behind still means something.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ermoe.errors import UserError
from ermoe.files import UnwritableError, printable

try:
    import fcntl
except ImportError:  # not on this system
    fcntl = None  # type: ignore[assignment]

_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
_LONGEST_NOTE = 200
_PATIENCE, _PAUSE = 180.0, 0.2
"""Seconds: file servers keep the lock of a lost host for one or two minutes."""
_holders: dict[Path, int] = {}
"""Lock files of this process, and the thread that holds each."""
_descriptors: set[int] = set()


@contextmanager
def locked(path: Path, what: Path, *, wait: bool = False) -> Iterator[None]:
    """Within the block no other process comes past here with the same lock file, ``path``, for ``what``.

    Another one is refused at once, or waits for the first to end. The thread that holds a lock may ask for it again.
    Folders that had to be made for the lock and stayed empty are removed again.
    """
    path = Path(os.path.abspath(path))
    if _holders.get(path) == threading.get_ident():
        yield
        return
    made = _make(path.parent)
    descriptor = None
    try:
        descriptor = _acquire(path, what, wait)
        _holders[path] = threading.get_ident()
        yield
    finally:
        _release(path, descriptor)
        with suppress(OSError):
            for folder in made:
                folder.rmdir()


def _make(folder: Path) -> list[Path]:
    """Makes a folder; returns what was not there before, innermost first."""
    try:
        missing = [parent for parent in (folder, *folder.parents) if not parent.exists()]
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise UserError(
            f"{printable(folder)} cannot be a folder: {problem.strerror}; choose another place"
        ) from problem
    return missing


def _acquire(path: Path, folder: Path, wait: bool) -> int | None:
    """The descriptor that holds the lock; None where there can be none."""
    while True:
        descriptor = _opened(path)
        if descriptor is None:
            return None
        _descriptors.add(descriptor)
        if not _lock(descriptor, path, folder, wait):
            return descriptor
        if os.fstat(descriptor).st_nlink:  # else whoever held it before has just removed the file
            with suppress(OSError):  # it is a note for people
                os.ftruncate(descriptor, 0)
                os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}{_job()}\n".encode())
            return descriptor
        _close(descriptor)


def _opened(path: Path) -> int | None:
    """None in a folder where nobody may write, and nobody needs a lock."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    except OSError as problem:
        if problem.errno not in _FORBIDDEN:
            raise UnwritableError(path, problem) from problem
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)  # of somebody else, who may be at work
    except OSError:
        return None


def _lock(descriptor: int, path: Path, folder: Path, wait: bool) -> bool:
    """False where the system or the file system knows no locks, which is said."""
    if fcntl is not None:
        try:
            _lock_after_predecessors(descriptor, folder, wait)
        except BlockingIOError:
            holder = _note(descriptor)
            _close(descriptor)
            raise UserError(
                f"{printable(folder)} is in use by another run ({holder or 'which has just begun'}): wait until it is "
                "over, or choose another place"
            ) from None
        except OSError:
            pass
        else:
            return True
    logging.getLogger("ermoe").warning(
        "%s: there are no locks on this system; see to it that no second run writes there", printable(path.parent)
    )
    return False


def _lock_after_predecessors(descriptor: int, folder: Path, wait: bool) -> None:
    """Waits for an earlier life of the same job, which may be ending on another host; for others if asked to."""
    assert fcntl is not None
    until = time.monotonic() + _PATIENCE
    has_said = False
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            job, holder = _job(), _note(descriptor)
            is_predecessor = job and holder.endswith(job) and _may_have_predecessors()
            if not is_predecessor or time.monotonic() > until:
                raise
            if not has_said:
                logging.getLogger("ermoe").warning("%s: waiting for an earlier life, %s", printable(folder), holder)
            has_said = True
            time.sleep(_PAUSE)


def _note(descriptor: int) -> str:
    return os.pread(descriptor, _LONGEST_NOTE, 0).decode("utf-8", "replace").strip()


def _job() -> str:
    """What a note says of the job, torchrun's or SLURM's, that is the same in all its lives; nothing outside of one."""
    name = os.environ.get("TORCHELASTIC_RUN_ID", "none")  # which torchrun calls runs that were given no name
    name = os.environ.get("SLURM_JOB_ID", "") if name == "none" else name
    return f", job {name}" if name else ""


def _may_have_predecessors() -> bool:
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS") or os.environ.get("SLURM_RESTART_COUNT") or "0"
    return restarts != "0"


def _release(path: Path, descriptor: int | None) -> None:
    _holders.pop(path, None)
    if descriptor in _descriptors:  # not in a process that was forked meanwhile
        with suppress(OSError):
            path.unlink()
        _close(descriptor)


def _close(descriptor: int) -> None:
    _descriptors.discard(descriptor)
    os.close(descriptor)


def _forget() -> None:
    """In a child, which shares the lock of its parent and would keep it beyond the parent's end."""
    _holders.clear()
    for descriptor in tuple(_descriptors):
        _close(descriptor)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
