"""Files: replaced in one step, so that nobody reads half of one; read with one sentence about what is wrong; and
settings as JSON.

There is one pair of functions, `to_json` and `from_json`, for every frozen dataclass that is written to a file.
"""

from __future__ import annotations

import errno
import gzip
import json
import math
import os
import re
import stat
import types
import typing
import uuid
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from ermoe.errors import UserError, harmless

Json = dict[str, Any]
"""An object as JSON has it: text, numbers, truth values, None, and lists and objects of these."""
Settings = TypeVar("Settings")
StrPath = str | os.PathLike[str]
"""What names a file or folder."""
_FULL = (errno.ENOSPC, errno.EDQUOT)
LARGEST_DATA, LARGEST_TEXT, LARGEST_JSON = 2**30, 2**28, 2**24
"""Bytes of a file that is read whole, unpacked: of a data set, a table or list, and settings."""
_COPY = "look at its permissions, or copy it again"
_PORTION = 2**20
_KINDS = ((stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"))
_LONGEST_NAME = 200
_DRAFT = re.compile(r"\..+\.[0-9a-f]{32}(\.\w+)?")


class UnwritableError(UserError):
    """A file that the disk refuses: ``reason`` is the system's, ``remedy`` what would help."""

    def __init__(self, path: Path, problem: OSError) -> None:
        self.path = path
        self.reason = problem.strerror
        self.remedy = "free some space" if problem.errno in _FULL else "make it writable"
        super().__init__(f"{path} cannot be written: {self.reason}; {self.remedy}, or choose another place")
        self._given = (path, problem)

    def __reduce__(self) -> tuple[type[UnwritableError], tuple[Path, OSError]]:
        return UnwritableError, self._given  # so that one process can tell the others


@contextmanager
def replacing(path: StrPath) -> Iterator[Path]:
    """A path to write to. When the block succeeds, what was written takes the place of ``path`` in one step.

    Readers see the old file or the new one, also if the machine stops in between. When the block fails, the old file
    stays and nothing is left behind. Missing folders are made. Who may read the file is for the umask to say, and not
    for whatever library writes it: safetensors would leave it to its owner alone.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with replacing(Path(folder, "notes", "a.txt")) as draft:
    ...         size = draft.write_text("whole")
    ...     Path(folder, "notes", "a.txt").read_text(), len(os.listdir(Path(folder, "notes")))
    ('whole', 1)
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise UserError(f"{path} is a folder: name a file")
    except OSError as problem:
        place = printable(path if problem.filename == str(path) else path.parent)
        raise UserError(f"{place} cannot be a folder: {problem.strerror}; choose another place") from problem
    # The suffix stays, because some writers choose the format by it.
    draft = path.with_name(f".{path.stem}.{uuid.uuid4().hex}{path.suffix}")
    try:
        mode = _usual_mode(draft)
        yield draft
        draft.chmod(mode)
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


def _usual_mode(path: Path) -> int:
    """The permissions that a new file has here."""
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    path.unlink()
    return mode


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


def append(path: Path, data: bytes) -> None:
    """Adds ``data`` at the end of a file: all of it, or nothing if the disk refuses."""
    if path.exists():
        file_size(path, "remove it, or choose another place")  # a pipe would wait for somebody to read it
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


def cache_folder(name: str) -> Path:
    """Where things of one kind are kept that can be made again: in ``$ERMOE_CACHE``, or among the user's caches.

    >>> cache_folder("brain").name
    'brain'
    """
    own = os.environ.get("ERMOE_CACHE")
    return Path(own or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ermoe") / name


def file_size(path: StrPath, remedy: str = _COPY) -> int:
    """Bytes of a plain file; anything else is refused, for reading a pipe, a socket or a device may never end."""
    try:
        state = os.stat(path)
    except (OSError, ValueError) as problem:
        raise _unreadable(path, problem, remedy) from problem
    if not stat.S_ISREG(state.st_mode):
        kind = next((name for is_kind, name in _KINDS if is_kind(state.st_mode)), "a device")
        raise UserError(f"{printable(path)} is {kind}, not a file: {remedy}")
    return state.st_size


def read_bytes(path: StrPath, remedy: str = _COPY, *, limit: int = LARGEST_DATA) -> bytes:
    """What a file holds, unpacked if its name ends in .gz; at most ``limit`` bytes."""
    is_small = file_size(path, remedy) <= limit
    data = read_start(path, limit + 1, remedy) if is_small else b""
    if not is_small or len(data) > limit:
        raise UserError(f"{printable(path)} is too large: it holds more than {limit / 2**20:,.0f} MB; {remedy}")
    return data


def read_start(path: StrPath, size: int, remedy: str = _COPY) -> bytes:
    """The first ``size`` bytes of a file, or all it has, unpacked if its name ends in .gz."""
    path = Path(path)
    there = file_size(path, remedy)
    try:
        with path.open("rb") as file:
            return _unpacked(file, size) if path.suffix == ".gz" else file.read(min(size, there))
    except (OSError, EOFError, zlib.error) as problem:
        raise _unreadable(path, problem, remedy) from problem


def _unpacked(packed: BinaryIO, size: int) -> bytes:
    """No more than was asked for, of a file that may unpack to a thousand times its own size."""
    portions = []
    with gzip.open(packed) as unpacked:
        while size > 0 and (portion := unpacked.read(min(size, _PORTION))):
            portions.append(portion)
            size -= len(portion)
    return b"".join(portions)


def _unreadable(path: StrPath, problem: Exception, remedy: str) -> UserError:
    reason = getattr(problem, "strerror", None) or problem
    return UserError(f"{printable(path)} cannot be read: {reason}; {remedy}")


def read_text(path: StrPath, remedy: str = _COPY, *, limit: int = LARGEST_TEXT) -> str:
    """The text of a file, gzipped or not."""
    data = read_bytes(path, remedy, limit=limit)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        start, reason = problem.start, f"is 0x{data[problem.start]:02x}"
    else:
        if "\0" not in text:
            return text
        start, reason = data.index(b"\0"), "is 0, as in UTF-16 and in no text"
    line = data.count(b"\n", 0, start) + 1
    encoding = "utf-16" if b"\0" in data[:_PORTION] else "latin1"
    raise UserError(
        f"{printable(path)} is not UTF-8 text: byte {start}, in line {line}, {reason}; convert it, for example with "
        f"iconv -f {encoding} -t utf-8"
    )


@contextmanager
def naming_what_cannot_be_read() -> Iterator[None]:
    """For looking around in folders: whatever the system refuses, to list or even to look at, is named."""
    try:
        yield
    except OSError as problem:
        if problem.filename is None:
            raise
        raise _unreadable(problem.filename, problem, "look at the path and its permissions") from problem


def is_hidden(path: Path, below: Path | None = None) -> bool:
    """Whether a name begins with a dot: what systems keep for themselves, like the "._" twins that macOS leaves.

    With ``below``, whether any folder from there on does.

    >>> is_hidden(Path("anat/._sub-01_T1w.nii.gz")), is_hidden(Path("a/.git/b.png"), below=Path("a"))
    (True, True)
    """
    parts = (path.name,) if below is None else path.relative_to(below).parts
    return any(part.startswith(".") for part in parts)


def printable(path: StrPath) -> str:
    r"""A path for messages: what no terminal should be sent as escapes, and the middle of a very long one left out.

    >>> print(printable(os.fsdecode(b"menu\xe9.png")))
    menu\xe9.png
    """
    text = os.fspath(path)
    if len(text) > 2 * _LONGEST_NAME:
        text = f"{text[:_LONGEST_NAME]}…{text[-_LONGEST_NAME:]}"
    return harmless(text).replace("\t", "\\t").replace("\n", "\\n")


def several(paths: StrPath | Sequence[StrPath]) -> list[str]:
    """Paths, of which there may be one alone.

    >>> several("a.png"), several([Path("a.png"), "b.png"])
    (['a.png'], ['a.png', 'b.png'])
    """
    return [os.fspath(path) for path in ([paths] if isinstance(paths, str | os.PathLike) else paths)]


def is_plain_name(name: object) -> bool:
    """Whether a text of a table or a configuration can name a file or a folder, here and nowhere else.

    >>> is_plain_name("fold-0"), is_plain_name("../fold-0"), is_plain_name(""), is_plain_name("a" * 300)
    (True, False, False, False)
    """
    if not isinstance(name, str) or name in ("", ".", "..") or set("/\\") & set(name) or printable(name) != name:
        return False
    return len(name.encode()) <= _LONGEST_NAME


def write_json(path: StrPath, content: Any) -> None:
    """Replaces a file by ``content`` as JSON that people can read."""
    with replacing(path) as draft:
        draft.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read_json(path: StrPath, remedy: str, *, limit: int = LARGEST_JSON) -> Any:
    """What a file of JSON holds; one that cannot be read or is no JSON is named, with what to do about it."""
    text = read_text(path, remedy, limit=limit)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise UserError(f"{printable(path)} cannot be read: it is damaged; {remedy}") from problem


def read_object(path: StrPath, remedy: str, *, limit: int = LARGEST_JSON) -> Json:
    """The same of a file that must hold an object."""
    content = read_json(path, remedy, limit=limit)
    if not isinstance(content, dict):
        raise UserError(f"{printable(path)} is damaged: it holds no object; {remedy}")
    return content


def to_json(value: Any) -> Any:
    """Plain values: dataclasses and mappings become objects, sequences lists, paths text; NaN, which JSON lacks, None.

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class Grid:
    ...     shape: tuple[int, int] = (2, 3)
    >>> to_json({"grid": Grid(), "loss": float("nan")})
    {'grid': {'shape': [2, 3]}, 'loss': None}
    """
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(name): to_json(item) for name, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [to_json(item) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return None if isinstance(value, float) and math.isnan(value) else value


def from_json(kind: type[Settings], stored: Mapping[str, Any], *, where: str) -> Settings:
    """The settings that `to_json` wrote; fields that are lacking have their defaults, unknown ones are refused.

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class Grid:
    ...     shape: tuple[int, int] = (2, 3)
    >>> from_json(Grid, {"shape": [4, 5]}, where="config.json")
    Grid(shape=(4, 5))
    """
    known = typing.get_type_hints(kind)
    names = {field.name for field in fields(kind) if field.init}  # type: ignore[arg-type]
    if unknown := sorted(set(stored) - names):
        raise UserError(f"{where} has the unknown settings {', '.join(unknown)}: it is of a newer ermoe")
    return kind(**{name: restored(known[name], value, where) for name, value in stored.items()})


def restored(kind: Any, value: Any, where: str) -> Any:
    """A value of the type that a field declares: JSON has no tuples, no paths and no dataclasses."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        chosen = next((part for part in arguments if _fits(part, value)), None)
        return value if chosen is None else restored(chosen, value, where)
    if is_dataclass(kind) and isinstance(value, Mapping):
        return from_json(kind, value, where=where)  # type: ignore[arg-type]
    if origin is tuple and isinstance(value, list):
        each = arguments[:1] * len(value) if arguments[-1] is Ellipsis else arguments
        return tuple(restored(part, item, where) for part, item in zip(each, value, strict=True))
    if kind is Path and isinstance(value, str):
        return Path(value)
    if origin is Mapping and isinstance(value, Mapping):
        return {name: restored(arguments[1], item, where) for name, item in value.items()}
    return value


def _fits(kind: Any, value: Any) -> bool:
    if value is None or kind is types.NoneType:
        return value is None and kind is types.NoneType
    if isinstance(value, Mapping):
        return is_dataclass(kind) or typing.get_origin(kind) in (dict, Mapping)
    return not isinstance(value, list) or typing.get_origin(kind) is tuple
