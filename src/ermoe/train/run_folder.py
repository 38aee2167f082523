"""The folder of a run: what was asked (config.json), what came out (metrics.jsonl), and where it stands."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ermoe.errors import UserError
from ermoe.files import replacing
from ermoe.train.distributed import Processes, wait_for_all

RESUME = ("auto", "never", "must")


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

    def open(self, config: dict[str, Any], resume: str, group: Processes) -> bool:
        """Claims the folder for ``config``; True if there is a checkpoint to go on from. Called on every process."""
        if resume not in RESUME:
            raise UserError(f"resume={resume!r}: use one of {', '.join(RESUME)}")
        config = json.loads(json.dumps(config))  # tuples become lists, as they will when read back
        self._check_same(config)
        if resume == "must" and not self.last.is_file():
            raise UserError(f"{self.folder} has no checkpoint to resume from: leave out --resume must to start there")
        if resume == "never" and self.last.is_file():
            raise UserError(
                f"{self.folder} holds a run already: choose another folder, or --resume auto to go on with it"
            )
        wait_for_all()
        if group.is_main and not self.config.is_file():
            self._write_config(config)
        wait_for_all()
        return self.last.is_file()

    def _check_same(self, config: dict[str, Any]) -> None:
        if not self.config.is_file():
            return
        try:
            earlier = json.loads(self.config.read_text())
        except ValueError as problem:
            raise UserError(f"{self.config} is damaged: choose another folder, or remove this one") from problem
        if changed := differences(earlier, config):
            raise UserError(
                f"{self.folder} holds a run with another configuration: choose another folder, or undo the change\n  "
                + "\n  ".join(changed)
            )

    def _write_config(self, config: dict[str, Any]) -> None:
        try:
            with replacing(self.config) as draft:
                draft.write_text(json.dumps(config, indent=1, ensure_ascii=False) + "\n")
        except UserError:
            raise
        except OSError as problem:
            raise UserError(f"{self.folder} cannot be written: {problem.strerror}; choose another folder") from problem


def differences(earlier: dict[str, Any], now: dict[str, Any], prefix: str = "") -> list[str]:
    """Every setting that differs, one line each.

    >>> differences({"a": {"lr": 1, "b": 2}}, {"a": {"lr": 3, "b": 2}})
    ['a.lr: 1 there, 3 asked for']
    """
    lines = []
    for name in sorted(earlier.keys() | now.keys()):
        before, after = earlier.get(name), now.get(name)
        if isinstance(before, dict) and isinstance(after, dict):
            lines += differences(before, after, f"{prefix}{name}.")
        elif before != after:
            lines.append(f"{prefix}{name}: {before} there, {after} asked for")
    return lines


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Adds one line of JSON in one write, so that a kill leaves at most one incomplete line, the last."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, (json.dumps(record, ensure_ascii=False) + "\n").encode())
        finally:
            os.close(descriptor)
    except OSError as problem:
        raise UserError(
            f"{path} cannot be written: {problem.strerror}; free some space or choose another folder, then start the "
            "run again: it goes on from its last checkpoint"
        ) from problem


def forget_lines_after(path: Path, step: int) -> None:
    """Drops what a killed run wrote after the checkpoint from which it goes on, and an incomplete last line."""
    if path.is_file():
        kept = [line for line in read_lines(path) if line["step"] <= step]
        with replacing(path) as draft:
            draft.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in kept))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All complete lines of a file of JSON lines."""
    lines = path.read_text().split("\n")
    return [json.loads(line) for line in lines[:-1]]  # what follows the last newline is not complete
