"""One run folder for all hosts: every process must see what the first one wrote there."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from ermoe.errors import UserError
from ermoe.train.compute import Processes

_PATIENCE = 60.0
"""Seconds for which a network file system may go on showing what was."""

Seen = tuple[tuple[int, int] | None, ...]


def check_shared(folder: Path, files: Sequence[Path], group: Processes, *, patience: float = _PATIENCE) -> None:
    """Goes on when all processes see the same ``files``; called on every one of them.

    Processes that went on from different checkpoints, or one from none, would wait for each other for ever.
    """
    if group.num == 1:
        return
    until = time.monotonic() + patience
    while True:
        views: list[tuple[Seen, str, float]] = [((), "", 0.0)] * group.num
        dist.all_gather_object(views, (_seen(files), socket.gethostname(), until - time.monotonic()))
        odd = next((view for view in views if view[0] != views[0][0]), None)
        if odd is None:
            return
        if views[0][2] < 0:
            lacks = next(path for path, mine, other in zip(files, views[0][0], odd[0], strict=True) if mine != other)
            raise UserError(
                f"{odd[1]} does not see the {os.path.relpath(lacks, folder)} in {folder} that {views[0][1]} sees: give "
                "--out a folder on storage that all hosts share"
            )
        time.sleep(1)


def _seen(files: Sequence[Path]) -> Seen:
    """Size and time of each file; of one that is opened, a network file system tells the truth."""
    return tuple(map(_state, files))


def _state(path: Path) -> tuple[int, int] | None:
    try:
        with path.open("rb") as file:
            state = os.fstat(file.fileno())
    except OSError:
        return None
    return state.st_size, state.st_mtime_ns
