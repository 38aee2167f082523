"""Figures for TensorBoard, written where they arise: without a thread, what the disk refuses is known at once."""

from __future__ import annotations

import io
import os
import socket
import time
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from ermoe.files import append


class Board:
    """An events file in ``folder``, begun with its first figures; it voids what others say after ``first_step``."""

    def __init__(self, folder: Path, first_step: int) -> None:
        self.path = folder / f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
        began = Event(step=first_step + 1, session_log=SessionLog(status=SessionLog.START))
        self._pending = _record(Event(file_version="brain.Event:2")) + _record(began)

    def write(self, step: int, figures: dict[str, float]) -> None:
        """All figures of a step."""
        values = [Summary.Value(tag=name, simple_value=value) for name, value in figures.items()]
        append(self.path, self._pending + _record(Event(step=step, summary=Summary(value=values))))
        self._pending = b""


def _record(event: Event) -> bytes:
    event.wall_time = time.time()
    record = io.BytesIO()
    RecordWriter(record).write(event.SerializeToString())
    return record.getvalue()
