"""What was once read from a shard is kept: headers lie all over it, and every process needs them at every start.

It is kept among the caches, and holds as long as the shard has the same path, size and time.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from ermoe.errors import UserError
from ermoe.files import cache_folder, file_size, read_bytes, replacing

Rows = list[list[Any]]
"""Of every image of a shard, some plain values."""
_WORTH_KEEPING = 100
"""Rows; fewer are read from the shard as fast."""
_Thing = TypeVar("_Thing")
_Made = TypeVar("_Made")


def kept(shard: Path, what: str, read: Callable[[], Rows], types: tuple[type, ...]) -> Rows:
    """The rows that ``read`` finds in ``shard``, values of those ``types``; read once, whoever asks."""
    file_size(shard, "mend or replace it")
    state = shard.stat()
    stamp = [os.path.abspath(shard), what, state.st_size, state.st_mtime_ns]
    try:
        place = cache_folder("shards") / hashlib.sha256(json.dumps(stamp).encode()).hexdigest()[:32]
    except RuntimeError:  # no home to keep it in
        return read()
    rows = _read(place, types)
    if rows is None:
        rows = read()
        if len(rows) >= _WORTH_KEEPING:
            _keep(place, rows)
    return rows


def _read(place: Path, types: tuple[type, ...]) -> Rows | None:
    """None of what is not there, or damaged: it can be made again."""
    if not place.is_file():
        return None
    try:
        count, *rows = [json.loads(line) for line in read_bytes(place).splitlines()]
    except (UserError, ValueError, RecursionError):
        return None
    is_whole = count == len(rows) and all(isinstance(row, list) and tuple(map(type, row)) == types for row in rows)
    return rows if is_whole else None


def _keep(place: Path, rows: Rows) -> None:
    """Where the caches cannot be written, it will be read from the shard again."""
    with suppress(OSError, UserError), replacing(place) as draft:
        draft.write_text("".join(f"{json.dumps(line)}\n" for line in (len(rows), *rows)), encoding="ascii")


def each(things: Sequence[_Thing], do: Callable[[_Thing], _Made]) -> list[_Made]:
    """What ``do`` makes of each; every process of a run begins elsewhere, and comes to what others have kept.

    >>> each([1, 2, 3], lambda number: 10 * number)
    [10, 20, 30]
    """
    rank, num_processes = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    first = len(things) * rank // max(num_processes, 1)
    done = [do(thing) for thing in (*things[first:], *things[:first])]
    return done[len(things) - first :] + done[: len(things) - first]
