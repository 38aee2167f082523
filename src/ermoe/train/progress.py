"""What a person sees while a run goes on, and what TensorBoard and ``metrics.jsonl`` keep of it."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ermoe.train.board import Board
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
        is_main: bool,
        first_step: int,
        total_steps: int,
        *,
        batch_size: int,
        console: Console | None = None,
    ) -> None:
        self.run = run
        self.is_main = is_main
        self.first_step = first_step
        self.total_steps = total_steps
        self.batch_size = batch_size
        self._shown: dict[str, float] = {}
        self._began = time.perf_counter()
        if not is_main:
            return
        self._board = Board(run.folder, first_step)
        self._console = console = Console(stderr=True) if console is None else console
        # A bar needs a terminal or a notebook; a log file gets a line an epoch instead.
        self._has_bar = console.is_terminal or console.is_jupyter
        columns = (BarColumn(10), MofNCompleteColumn(), TextColumn("{task.fields[figures]}"), TimeRemainingColumn())
        self._progress = Progress(*columns, console=console, disable=console.quiet or not self._has_bar)
        self._bar = self._progress.add_task("", total=total_steps, completed=first_step, figures="")

    def __enter__(self) -> Log:
        if self.is_main:
            forget_lines_after(self.run.metrics, self.first_step)
            forget_lines_after(self.run.timing, self.first_step)
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.is_main:
            self._progress.stop()

    def step(self, step: int) -> None:
        """Moves the bar."""
        if self.is_main:
            self._progress.update(self._bar, completed=step, figures=self._figures(step))

    def write(self, step: int, kind: str, figures: dict[str, float], settled_on: str | None = None) -> None:
        """One line: ``kind`` is "train" or "test", figures are by name; ``settled_on`` is where offsets come from."""
        if not self.is_main:
            return
        settled = {} if settled_on is None else {"offsets_settled_on": settled_on}
        append_line(self.run.metrics, {"step": step, "kind": kind, **figures, **settled})
        elapsed, speed = self._pace(step)
        append_line(
            self.run.timing, {"step": step, "kind": kind, "images_per_second": round(speed, 2), "seconds": elapsed}
        )
        written = {**figures, "images_per_second": speed}
        self._board.write(step, {f"{kind}/{name}": value for name, value in written.items()})
        self._shown |= {name: value for name, value in figures.items() if name in _SHOWN}
        if kind == "test" and not self._has_bar:
            line = f"step {step} of {self.total_steps}: {self._figures(step)}"
            self._console.print(line, highlight=False, soft_wrap=True)

    def _figures(self, step: int) -> str:
        shown = [
            f"{label} {self._shown[name]:{style}}" for name, (label, style) in _SHOWN.items() if name in self._shown
        ]
        return "  ".join([*shown, f"{self._pace(step)[1]:.0f} images/s"])

    def _pace(self, step: int) -> tuple[float, float]:
        """Seconds since the start of this process's part of the run, and images a second in it."""
        elapsed = time.perf_counter() - self._began
        return elapsed, (step - self.first_step) * self.batch_size / elapsed
