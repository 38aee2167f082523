"""Who is told the figures of a run, beside its own metrics.jsonl: TensorBoard, Weights & Biases, or code of yours."""

from __future__ import annotations

import hashlib
import io
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ermoe.errors import UserError
from ermoe.files import Json, append


class Callback(Protocol):
    """Is told of a run by its main process. Whatever has these names can listen; who inherits may leave some out.

    What it raises ends the run, which goes on from its last checkpoint when it is started again.

    >>> class Best(Callback):
    ...     top1 = 0.0
    ...
    ...     def figures(self, step, kind, figures):
    ...         self.top1 = max(self.top1, figures.get("top1", 0.0))
    >>> best = Best()  # for fit(…, compute=Compute(callbacks=[best])) or train(…, callbacks=[best])
    """

    def begin(self, folder: Path, config: Json, first_step: int) -> None:
        """A run begins, or goes on after ``first_step`` steps: what was told of later ones will be told again."""
        return None

    def figures(self, step: int, kind: str, figures: Mapping[str, float]) -> None:
        """What was measured after so many steps, by name; ``kind`` is "train" or "test"."""
        return None

    def end(self) -> None:
        """The run is over, or failed."""
        return None


@dataclass(slots=True)
class TensorBoard(Callback):
    """An events file in the run folder, begun with its first figures; it voids what others say after the first step.

    It is written where figures arise: without a thread, what the disk refuses is known at once.
    """

    _path: Path = field(default=Path(), init=False)
    _pending: bytes = field(default=b"", init=False)

    def begin(self, folder: Path, config: Json, first_step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        self._path = folder / f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
        began = Event(step=first_step + 1, session_log=SessionLog(status=SessionLog.START))
        self._pending = _record(Event(file_version="brain.Event:2")) + _record(began)

    def figures(self, step: int, kind: str, figures: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=f"{kind}/{name}", simple_value=value) for name, value in figures.items()]
        append(self._path, self._pending + _record(Event(step=step, summary=Summary(value=values))))
        self._pending = b""


def _record(event: Any) -> bytes:
    from tensorboard.summary.writer.record_writer import RecordWriter

    event.wall_time = time.time()
    record = io.BytesIO()
    RecordWriter(record).write(event.SerializeToString())
    return record.getvalue()


@dataclass(slots=True)
class WeightsAndBiases(Callback):
    """A run of Weights & Biases with the name of the folder; a run that goes on goes on there too.

    Args:
        project: where it is listed.
        options: of ``wandb.init``, such as entity, tags or mode.
    """

    project: str = "ermoe"
    options: Mapping[str, Any] = field(default_factory=dict)
    _run: Any = field(default=None, init=False)

    def begin(self, folder: Path, config: Json, first_step: int) -> None:
        try:
            import wandb
        except ImportError:
            raise UserError("Weights & Biases is asked for and wandb is missing: pip install wandb") from None
        # The same for the same folder; of steps that are told again, wandb keeps the first, which are equal.
        known = {"id": hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:16], "resume": "allow"}
        self._run = wandb.init(
            project=self.project, name=folder.name, dir=os.fspath(folder), config=config, **{**known, **self.options}
        )

    def figures(self, step: int, kind: str, figures: Mapping[str, float]) -> None:
        self._run.log({f"{kind}/{name}": value for name, value in figures.items()}, step=step)

    def end(self) -> None:
        if self._run is not None:
            self._run.finish()


TRACKERS: Mapping[str, type[Callback]] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}
"""What ``--trackers`` offers."""
