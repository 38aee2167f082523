"""The folder of a run: what was asked (config.json), what came out (metrics.jsonl), and where it stands.

`Log` fills it while the run goes on: lines of figures, the same for callbacks, and a bar for whoever watches.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ermoe.errors import UserError
from ermoe.files import (
    Json,
    StrPath,
    UnwritableError,
    append,
    file_size,
    naming_what_cannot_be_read,
    printable,
    read_bytes,
    read_json,
    read_object,
    remove_drafts,
    replacing,
    to_json,
    write_json,
)  # fmt: skip
from ermoe.models.io import CONFIG, INDEX, WEIGHTS
from ermoe.train.callbacks import Callback
from ermoe.train.compute import Processes, sum_over_processes, wait_for_all
from ermoe.train.lock import locked
from ermoe.train.settings import Training
from ermoe.train.shared import check_shared

_RESUME = ("auto", "never", "must")
# How often a run speaks and saves, and where its data lie, change nothing that comes out of it.
_NOT_COMPARED = {"training.log_every", "training.save_every", "training.keep_every", "data", "data.path"}
# What runs did that an earlier version began, which did not know the setting yet.
_BEFORE_IT_WAS_A_SETTING: Json = {
    "own_ridges": "none",
    "validation": 0.0,
    "shuffle": "all",
    "epoch_steps": 0,
    "calibration": 0,
    "head_lr": 1.0,
    "image_lr": 1.0,
    "weights_of": "clip",
    "learns": "age",
    "ageing": "everywhere",
    "least_area": 0.08,
}
_TRAINING: Json = to_json(Training())
_COMPARED_BY_FILE_NAME = {"weights", "image_weights"}
_SHOWN = {
    "loss": ("loss", ".3f"),
    "top1": ("accuracy", ".1%"),
    "load_cv2": ("load CV²", ".3f"),
    "fallback_rate": ("fallback", ".1%"),
}


class RunFolder:
    """Paths in ``runs/NAME``, and the rules that keep two different runs out of one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = folder / "config.json"
        self.metrics = folder / "metrics.jsonl"
        self.timing = folder / "timing.jsonl"
        self.last = folder / "checkpoints" / "last.pt"
        self.best = folder / "checkpoints" / "best"
        self.final = folder / "model"

    def kept(self, epoch: int) -> Path:
        """Where the model of an epoch is kept for good."""
        return self.folder / "checkpoints" / f"epoch-{epoch:04d}"

    def model(self, prefer: str = "final") -> Path:
        """The folder of the model to use, "final" or "best" by validation; the other where that one is lacking."""
        folders = (self.final, self.best) if prefer == "final" else (self.best, self.final)
        found = next((folder for folder in folders if (folder / CONFIG).is_file()), None)  # written last
        if found is None:
            raise UserError(f"{self.folder} has no model yet: its first epoch is not over")
        return found

    @contextmanager
    def locked(self, group: Processes, *, wait: bool = False) -> Iterator[None]:
        """Within the block the folder belongs to this run: another is refused at once, or waits.

        Called on every process, of which the main one holds the lock.
        """
        with ExitStack() as lock:
            refusal: UserError | None = None
            if group.is_main:
                try:
                    lock.enter_context(locked(self.folder / ".lock", self.folder, wait=wait))
                    self._check_places()
                except UserError as problem:
                    refusal = problem
            refused = sum_over_processes(torch.tensor(float(refusal is not None), device=group.device))
            if bool(refused):
                raise refusal or UserError(f"{self.folder} is in use by another run: wait until it is over")
            yield

    def _check_places(self) -> None:
        """What a run writes can be written, and stays in its folder, which itself may be a link."""
        remedy = "remove it, or choose another place"
        folders = (self.last.parent, self.final, self.best, *self.folder.glob("fold-*"))
        files = (self.metrics, self.timing)
        for path in (*files, *folders, *self.last.parent.glob("epoch-*")):
            if path.is_symlink():
                raise UserError(f"{printable(path)} is a link, and a run writes into its own folder alone: {remedy}")
        for path in folders:
            if path.exists() and not path.is_dir():
                raise UserError(f"{printable(path)} is no folder: {remedy}")
        for path in files:
            if path.exists():
                file_size(path, remedy)  # a pipe or a folder is none

    def open(self, config: Json, resume: str, group: Processes, *, beside: Json | None = None) -> bool:
        """Claims the folder, which is `locked`, for ``config``; True if there is a checkpoint to go on from.

        Called on every process.

        ``beside`` holds files that belong to the run as config.json does, by name, such as the names of its classes.
        """
        if resume not in _RESUME:
            raise UserError(f"resume={resume!r}: use one of {', '.join(_RESUME)}")
        config = json.loads(json.dumps(config))  # tuples become lists, as they will when read back
        self._check_same(config)
        for name, content in (beside or {}).items():
            path = self.folder / name
            if path.is_file() and read_json(path, "choose another folder, or remove this one") != content:
                raise UserError(
                    f"{self.folder} holds a run with other {path.stem}: choose another folder, or look at the data"
                )
        if resume == "must" and not self.last.is_file():
            raise UserError(f"{self.folder} has no checkpoint to resume from: leave out --resume must to start there")
        if resume == "never" and self.last.is_file():
            raise UserError(
                f"{self.folder} holds a run already: choose another folder, or --resume auto to go on with it"
            )
        wait_for_all()
        if group.is_main:
            self._claim({CONFIG: config, **(beside or {})})
        wait_for_all()
        check_shared(self.folder, (self.config, self.last), group)
        self._check_same(config)  # of a host whose copy of the data is another one
        return self.last.is_file()

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Says what the disk refuses of the run's files in one sentence, and what becomes of the run."""
        try:
            yield
        except UnwritableError as problem:
            raise UserError(self._how_to_go_on(problem)) from problem
        except OSError as problem:
            if not str(problem.filename).startswith(str(self.folder)):
                raise
            raise UserError(self._how_to_go_on(UnwritableError(Path(problem.filename), problem))) from problem

    def _how_to_go_on(self, problem: UnwritableError) -> str:
        exists = self.last.is_file()
        then = "it goes on from its last checkpoint, which is intact" if exists else "it has no checkpoint yet"
        stopped = f"{problem.path} cannot be written: {problem.reason}"
        return f"{stopped}; {problem.remedy} and start the run again: {then}"

    def _check_same(self, config: Json) -> None:
        if not self.config.is_file():
            return
        earlier = _completed(read_object(self.config, "choose another folder, or remove this one"), config)
        if changed := differences(earlier, config):
            raise UserError(
                f"{self.folder} holds a run with another configuration: choose another folder, or undo the change\n  "
                + "\n  ".join(changed)
            )

    def _claim(self, contents: Json) -> None:
        for folder in (self.folder, self.last.parent, self.final, *self.last.parent.glob("*/")):
            remove_drafts(folder)
        for name, content in contents.items():
            if not (self.folder / name).is_file():
                write_json(self.folder / name, content)


def model_folder(model: StrPath, prefer: str = "final") -> StrPath:
    """The model of a run folder, see `RunFolder.model`; a model folder or a name on the hub is returned as it is."""
    run = RunFolder(Path(model))
    with naming_what_cannot_be_read():
        # Weights that are a pipe or a link to nowhere are a model's too, of which whoever reads it will tell.
        is_run = run.config.is_file() and not any(os.path.lexists(run.folder / name) for name in (WEIGHTS, INDEX))
    return run.model(prefer) if is_run else model


def _completed(earlier: Json, config: Json) -> Json:
    """What an earlier version wrote, with the settings that it did not know yet."""
    known = {name: value for name, value in _BEFORE_IT_WAS_A_SETTING.items() if name in config} | earlier
    if earlier.keys() == {"stage", "training"}:  # a fold of a brain-age run, whose own config.json has the rest
        known = config | earlier
    every = known.pop("evaluate_every", None) if "training" in known else None  # where brain-age recipes had it
    every = (config.get("training") or {}).get("evaluate_every", 1) if every is None and "stage" in known else every
    asked = _TRAINING | ({} if every is None else {"evaluate_every": every})
    return {
        name: _completed(asked | value if name == "training" else value, config.get(name) or {})
        if isinstance(value, dict) and isinstance(config.get(name), dict | None)
        else value
        for name, value in known.items()
    }


def differences(earlier: Json, now: Json, prefix: str = "") -> list[str]:
    """Every setting that differs and matters, one line each.

    >>> differences({"a": {"lr": 1, "b": 2}}, {"a": {"lr": 3, "b": 2}})
    ['a.lr: 1 there, 3 asked for']
    """
    lines = []
    for name in sorted(earlier.keys() | now.keys()):
        before, after = earlier.get(name), now.get(name)
        if isinstance(before, dict) and isinstance(after, dict):
            lines += differences(before, after, f"{prefix}{name}.")
        elif f"{prefix}{name}" not in _NOT_COMPARED and _identity(name, before) != _identity(name, after):
            lines.append(f"{prefix}{name}: {before} there, {after} asked for")
    return lines


def _identity(name: str, value: Any) -> Any:
    return Path(value).name if name in _COMPARED_BY_FILE_NAME and isinstance(value, str) else value


def append_line(path: Path, record: Json) -> None:
    """Adds one line of JSON; a kill leaves at most one incomplete line, the last."""
    append(path, as_lines([record]))


def as_lines(records: Iterable[Json]) -> bytes:
    """A line of JSON each."""
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()


def forget_lines_after(path: Path, step: int) -> None:
    """Drops what a killed run wrote after the checkpoint from which it goes on, and an incomplete last line."""
    if not path.is_file():
        return
    lines = read_lines(path)
    if odd := next((line for line in lines if not isinstance(line.get("step"), int)), None):
        raise UserError(f"{path} is damaged: a line has no step ({str(odd)[:60]}); remove that line")
    kept = as_lines(line for line in lines if line["step"] <= step)
    if kept != path.read_bytes():
        with replacing(path) as draft:
            draft.write_bytes(kept)


def read_lines(path: Path) -> list[Json]:
    """All complete lines of a file of JSON lines; the last one may be torn."""
    *lines, _ = read_bytes(path).split(b"\n")  # what follows the last newline is not complete
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(dict(json.loads(line)))
        except (ValueError, TypeError, RecursionError) as problem:
            if number == len(lines):
                break
            raise UserError(f"{path} is damaged in line {number}: remove that line") from problem
    return records


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
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self.run = run
        self.callbacks = callbacks
        self.is_main = is_main
        self.first_step = first_step
        self.total_steps = total_steps
        self.batch_size = batch_size
        self._shown: dict[str, float] = {}
        self._began = time.perf_counter()
        if not is_main:
            return
        self._console = console = Console(stderr=True) if console is None else console
        # A bar needs a terminal or a notebook; a log file gets a line an epoch instead.
        self._has_bar = console.is_terminal or console.is_jupyter
        columns = (BarColumn(10), MofNCompleteColumn(), TextColumn("{task.fields[figures]}"), TimeRemainingColumn())
        self._progress = Progress(*columns, console=console, disable=console.quiet or not self._has_bar)
        self._bar = self._progress.add_task("", total=total_steps, completed=first_step, figures="")

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """Within the block the bar is shown and callbacks listen; what an earlier life wrote after its checkpoint is
        dropped.
        """
        if not self.is_main:
            yield
            return
        forget_lines_after(self.run.metrics, self.first_step)
        forget_lines_after(self.run.timing, self.first_step)
        with ExitStack() as listening, self._progress:
            for callback in self.callbacks:
                callback.begin(self.run.folder, read_object(self.run.config, "restore it"), self.first_step)
                listening.callback(callback.end)
            yield

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
        for callback in self.callbacks:
            callback.figures(step, kind, {**figures, "images_per_second": speed})
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
