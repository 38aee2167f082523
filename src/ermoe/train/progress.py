"""What a person sees while a run goes on, and what TensorBoard and ``metrics.jsonl`` keep of it."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ermoe.train.run_folder import RunFolder, append_line, forget_lines_after

_SHOWN = {
    "loss": ("loss", ".3f"),
    "top1": ("accuracy", ".1%"),
    "load_cv2": ("load CV²", ".3f"),
    "fallback_rate": ("fallback", ".1%"),
}


class Log:
    """The log of one run, written by its main process; on the others it does nothing.

    ``metrics.jsonl`` holds only what a repetition of the run would give again; times go to ``timing.jsonl``.
    """

    def __init__(
        self,
        run: RunFolder,
        *,
        is_main: bool,
        total_steps: int,
        first_step: int,
        batch_size: int,
        console: Console | None,
    ) -> None:
        self.run = run
        self.is_main = is_main
        self.batch_size = batch_size
        self._shown: dict[str, float] = {}
        self._start = (time.perf_counter(), first_step)
        if not is_main:
            return
        forget_lines_after(run.metrics, first_step)
        forget_lines_after(run.timing, first_step)
        columns = (BarColumn(10), MofNCompleteColumn(), TextColumn("{task.fields[figures]}"), TimeRemainingColumn())
        self._progress = Progress(
            *columns, console=console or Console(stderr=True), disable=console is not None and console.quiet
        )
        self._bar = self._progress.add_task("", total=total_steps, completed=first_step, figures="")
        self._board = _board(run, first_step)

    def __enter__(self) -> Log:
        if self.is_main:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.is_main:
            self._progress.stop()
            self._board.close()

    def step(self, step: int) -> None:
        """Moves the bar."""
        if self.is_main:
            self._progress.update(self._bar, completed=step, figures=self._figures(step))

    def write(self, step: int, kind: str, figures: dict[str, float]) -> None:
        """One line: ``kind`` is "train" or "test", figures are by name."""
        if not self.is_main:
            return
        append_line(self.run.metrics, {"step": step, "kind": kind, **figures})
        elapsed = time.perf_counter() - self._start[0]
        speed = (step - self._start[1]) * self.batch_size / elapsed
        append_line(
            self.run.timing, {"step": step, "kind": kind, "images_per_second": round(speed, 2), "seconds": elapsed}
        )
        for name, value in {**figures, "images_per_second": speed}.items():
            self._board.add_scalar(f"{kind}/{name}", value, step)
        self._shown |= {name: value for name, value in figures.items() if name in _SHOWN}

    def _figures(self, step: int) -> str:
        elapsed = time.perf_counter() - self._start[0]
        shown = [
            f"{label} {self._shown[name]:{style}}" for name, (label, style) in _SHOWN.items() if name in self._shown
        ]
        return "  ".join([*shown, f"{(step - self._start[1]) * self.batch_size / elapsed:.0f} images/s"])


def _board(run: RunFolder, first_step: int) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(run.folder), purge_step=first_step)
