"""The folder of a run: what was asked (config.json), what came out (metrics.jsonl), and where it stands."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ermoe.errors import UserError
from ermoe.files import UnwritableError, append, read_json, remove_drafts, replacing, write_json
from ermoe.models.io import CONFIG, WEIGHTS
from ermoe.plain import Json, to_json
from ermoe.train.compute import Processes, wait_for_all
from ermoe.train.settings import Training

RESUME = ("auto", "never", "must")
# How often a run speaks and saves, and where its data lie, change nothing that comes out of it.
_NOT_COMPARED = {"training.log_every", "training.save_every", "training.keep_every", "data", "data.path"}
# What runs did that an earlier version began, which did not know the setting yet.
_BEFORE_IT_WAS_A_SETTING: Json = {"validation": 0.0}
_TRAINING: Json = to_json(Training())
_COMPARED_BY_FILE_NAME = {"weights", "image_weights"}


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
        found = next((folder for folder in folders if folder.is_dir()), None)
        if found is None:
            raise UserError(f"{self.folder} has no model yet: its first epoch is not over")
        return found

    def open(self, config: Json, resume: str, group: Processes, *, beside: Mapping[str, Any] | None = None) -> bool:
        """Claims the folder for ``config``; True if there is a checkpoint to go on from. Called on every process.

        ``beside`` holds files that belong to the run as config.json does, by name, such as the names of its classes.
        """
        if resume not in RESUME:
            raise UserError(f"resume={resume!r}: use one of {', '.join(RESUME)}")
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

    def _check_same(self, config: dict[str, Any]) -> None:
        if not self.config.is_file():
            return
        earlier = read_json(self.config, "choose another folder, or remove this one")
        earlier = _completed(earlier, config)
        if changed := differences(earlier, config):
            raise UserError(
                f"{self.folder} holds a run with another configuration: choose another folder, or undo the change\n  "
                + "\n  ".join(changed)
            )

    def _claim(self, contents: Mapping[str, Any]) -> None:
        for folder in (self.folder, self.last.parent, self.final, *self.last.parent.glob("*/")):
            remove_drafts(folder)
        for name, content in contents.items():
            if not (self.folder / name).is_file():
                write_json(self.folder / name, content)


def model_folder(place: str | os.PathLike[str], prefer: str = "final") -> str | os.PathLike[str]:
    """The model of a run folder, see `RunFolder.model`; a model folder or a name on the hub is returned as it is."""
    run = RunFolder(Path(place))
    is_run = run.config.is_file() and not (run.folder / WEIGHTS).is_file()
    return run.model(prefer) if is_run else place


def _completed(earlier: Json, config: Json) -> Json:
    """What an earlier version wrote, with the settings that it did not know yet."""
    known = {name: value for name, value in _BEFORE_IT_WAS_A_SETTING.items() if name in config} | earlier
    if known.keys() == {"stage", "training"}:  # a fold of a brain-age run, whose own config.json has the rest
        known = config | known
    every = known.pop("evaluate_every", None) if "training" in known else None  # where brain-age recipes had it
    every = (config.get("training") or {}).get("evaluate_every", 1) if every is None and "stage" in known else every
    asked = _TRAINING | ({} if every is None else {"evaluate_every": every})
    return {
        name: _completed(asked | value if name == "training" else value, config.get(name) or {})
        if isinstance(value, dict)
        else value
        for name, value in known.items()
    }


def differences(earlier: dict[str, Any], now: dict[str, Any], prefix: str = "") -> list[str]:
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
    return Path(value).name if name in _COMPARED_BY_FILE_NAME and value is not None else value


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Adds one line of JSON; a kill leaves at most one incomplete line, the last."""
    append(path, (json.dumps(record, ensure_ascii=False) + "\n").encode())


def forget_lines_after(path: Path, step: int) -> None:
    """Drops what a killed run wrote after the checkpoint from which it goes on, and an incomplete last line."""
    if not path.is_file():
        return
    kept = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in read_lines(path) if line["step"] <= step)
    if kept.encode() != path.read_bytes():
        with replacing(path) as draft:
            draft.write_text(kept, encoding="utf-8")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All complete lines of a file of JSON lines; the last one may be torn."""
    *lines, _ = path.read_bytes().split(b"\n")  # what follows the last newline is not complete
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(json.loads(line))
        except ValueError as problem:
            if number == len(lines):
                break
            raise UserError(f"{path} is damaged in line {number}: remove that line") from problem
    return records
