"""The record of a run, a line of JSON in the file of its study, and the queue of runs that have no line yet.

A queue can be stopped at any time and started again. A file says once what many runs have in common.

A file has two kinds of lines. One says where runs come from, the other is a run and names the first::

    {"environment": "6f1c09aa", "command": …, "threads": …, "commit": …, "machine": …, "versions": …}
    {"study": …, "name": …, "seed": …, "settings": …, "figures": …, "seconds": …, "environment": "6f1c09aa"}

A line is added when its run is over; nothing is ever rewritten but a last line that a kill has torn.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ermoe.console import Terminal, say
from ermoe.cpu import described
from ermoe.errors import UserError
from ermoe.files import append, replacing, to_json
from ermoe.train.lock import locked
from ermoe.train.run_folder import as_lines, differences, read_lines

Record = dict[str, Any]
RECORDS = "records.jsonl"
"""The name of the file in the folder of a study."""
_PACKAGES = ("ermoe", "torch", "timm", "transformers", "open_clip_torch", "st-moe-pytorch", "soft-moe-pytorch")
_AROUND = ("command", "threads", "commit", "machine", "versions", "ran_on")


@dataclass(frozen=True, slots=True)
class Job:
    """One run: ``work`` returns its figures, plain values and lists of them; ``settings`` are what it is asked to do.

    A figure called "seconds" takes the place of the time that the queue measures: None for a run that went on where it
    had been interrupted, and so has no time of its own.
    """

    name: str
    seed: int
    work: Callable[[], dict[str, Any]]
    settings: Mapping[str, Any] = field(default_factory=dict)


def run_queue(
    study: str,
    jobs: Sequence[Job],
    path: Path,
    *,
    only: Collection[str] | None = None,
    console: Console | None = None,
    earlier: Iterable[Path] = (),
    defaults: Mapping[str, Mapping[str, Any]] | None = None,
    **environment: Any,
) -> list[Record]:
    """The records of the jobs, in order; those without a line in ``path`` are run first, one after the other.

    Put seeds outermost, so that an unfinished study still compares all there is. A line of a run with other settings
    or other data is refused before the first run, which may take long, and so is a second queue for the same file.

    Args:
        study: what records say they belong to.
        jobs: told apart by name and seed.
        path: the file of the study.
        only: names of the jobs to run, if not all; of the others there are records if they were run before.
        console: where it is said which run it is.
        earlier: files of earlier versions, one a run, which are taken over if there is no ``path`` yet.
        defaults: what settings had before they existed, for records that are older than a setting.
        environment: what all runs have in common, beside command, commit, machine and versions.
    """
    with locked(path.with_name(f".{path.name}.lock"), path):
        return _run_queue(study, jobs, path, only, console or Terminal(), earlier, defaults or {}, environment)


def _run_queue(
    study: str,
    jobs: Sequence[Job],
    path: Path,
    only: Collection[str] | None,
    console: Console,
    earlier: Iterable[Path],
    defaults: Mapping[str, Mapping[str, Any]],
    environment: Mapping[str, Any],
) -> list[Record]:
    _adopt(path, study, earlier)
    done = {(record["name"], record["seed"]): record for record in read_records(path)}
    for job in jobs:
        if (record := done.get((job.name, job.seed))) is not None:
            _refuse_another(record, job, path, defaults)
    wanted = [job for job in jobs if only is None or job.name in only]
    for number, job in enumerate(wanted, 1):
        if (job.name, job.seed) not in done:
            say(console, f"run {number} of {len(wanted)}: {job.name}, seed {job.seed}")
            start = time.perf_counter()
            figures = dict(job.work())
            seconds = figures.pop("seconds", time.perf_counter() - start)
            own = {"seed": job.seed, "settings": dict(job.settings), "figures": figures, "seconds": seconds}
            (done[job.name, job.seed],) = add_records(path, new_record(study, job.name, **own, **environment))
    return [done[job.name, job.seed] for job in jobs if (job.name, job.seed) in done]


def _refuse_another(record: Record, job: Job, path: Path, defaults: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuses a record whose settings are not those asked for, as far as both name them."""
    there, asked = dict(record["settings"]), to_json(dict(job.settings))
    for name in defaults.keys() & there.keys():
        there[name] = to_json({**defaults[name], **there[name]})
    common = there.keys() & asked.keys()
    changed = differences({name: there[name] for name in common}, {name: asked[name] for name in common})
    if _is_other_data(there.get("data"), asked.get("data")):
        changed.append(f"data: {there['data']} there, {asked['data']} asked for")
    if changed:
        raise UserError(
            f"{path} holds {job.name}, seed {job.seed}, with other settings ({'; '.join(changed)}): choose another "
            "--out, or remove that line"
        )


def _is_other_data(there: str | None, asked: str | None) -> bool:
    """Whether two paths are of different data: a data set may be moved, but two may have the same name.

    >>> (
    ...     _is_other_data("old/cifar-10", "new/cifar-10/"),
    ...     _is_other_data("cifar-10", "cifar-100"),
    ...     _is_other_data(None, "x"),
    ... )
    (False, True, False)
    """
    if not there or not asked:
        return False
    if os.path.exists(there) and os.path.exists(asked):
        return not os.path.samefile(there, asked)
    return Path(there).resolve().name != Path(asked).resolve().name


def new_record(
    study: str,
    name: str,
    *,
    seed: int = 0,
    settings: dict[str, Any],
    figures: dict[str, Any],
    seconds: float | None = None,
    **environment: Any,
) -> Record:
    """A run that is just over, here and now; ``environment`` is what else it shares with others."""
    return {
        "study": study,
        "name": name,
        "seed": seed,
        "settings": settings,
        "figures": figures,
        "seconds": None if seconds is None else round(seconds, 1),
        "environment": {
            "command": command_line(),
            "threads": torch.get_num_threads(),
            "commit": commit(),
            "machine": machine(),
            "versions": versions(),
            **environment,
        },
    }


def read_records(path: Path) -> list[Record]:
    """All runs in a file, each with its whole environment; none where there is no file."""
    environments: dict[str, Any] = {}
    records = []
    for number, line in enumerate(_lines(path), 1):
        try:
            if "name" not in line:
                environments[line.pop("environment")] = line
            else:
                records.append({**line, "seed": line["seed"], "environment": environments[line["environment"]]})
        except (KeyError, TypeError) as problem:
            raise UserError(f"{path}, line {number}, is no run whose environment the file has: remove it") from problem
    return records


def add_records(path: Path, *records: Record) -> list[Record]:
    """Adds runs, and those of their environments that the file has not; returns them as they will be read.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     own = {"name": "a", "seed": 1, "figures": {"x": float("nan")}, "environment": {"commit": "0e424b7"}}
    ...     added = add_records(Path(folder, "study.jsonl"), own, {**own, "seed": 2})
    ...     (
    ...         added == read_records(Path(folder, "study.jsonl")),
    ...         added[0]["figures"],
    ...         len(_lines(Path(folder, "study.jsonl"))),
    ...     )
    (True, {'x': None}, 3)
    """
    earlier = _lines(path)
    known = {line["environment"] for line in earlier if "name" not in line}
    lines, added = [], [to_json(record) for record in records]
    for record in added:
        around = record["environment"]
        number = hashlib.sha256(json.dumps(around, sort_keys=True).encode()).hexdigest()[:8]
        if number not in known:
            known.add(number)
            lines.append({"environment": number, **around})
        lines.append({**record, "environment": number})
    if not path.is_file() or path.read_bytes() != as_lines(earlier):  # a torn last line would damage what is added
        with replacing(path) as draft:
            draft.write_bytes(as_lines(earlier))
    append(path, as_lines(lines))
    return added


def _adopt(path: Path, study: str, files: Iterable[Path]) -> None:
    """Takes over what earlier versions left, one JSON a run, if ``path`` is not there yet; the files stay."""
    if not path.is_file() and (runs := [_earlier_run(study, file) for file in sorted(files)]):
        with replacing(path) as draft:
            add_records(draft, *runs)


def _earlier_run(study: str, file: Path) -> Record:
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        around = {key: record.pop(key) for key in _AROUND if key in record}
        name = record.pop("name", None) or record.pop("preset", file.stem)
        figures = record.pop("figures") if "figures" in record else record.pop(file.stem)
        seconds = record.pop("seconds", record.pop("wall_seconds", None))
        settings = {**record.pop("config", {}), **record.pop("settings", {})}
        seed, _ = record.pop("seed", 0), record.pop("study", study)
    except (ValueError, KeyError, AttributeError, TypeError) as problem:
        raise UserError(f"{file} is damaged: remove it, and its run is repeated") from problem
    own = {"study": study, "name": name, "seed": seed, "settings": {**settings, **record}}
    return {**own, "figures": figures, "seconds": seconds, "environment": around}


def _lines(path: Path) -> list[dict[str, Any]]:
    return read_lines(path) if path.is_file() else []


def command_line() -> str:
    """What was typed to come here."""
    script = Path(sys.argv[0]).resolve()
    is_script = script.suffix == ".py" and script.name != "__main__.py"
    program = ["python", f"{script.parent.name}/{script.name}"] if is_script else ["ermoe"]
    return shlex.join([*program, *sys.argv[1:]])


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    cpu = described()["model name"] or platform.processor() or platform.machine()
    return {
        "cpu": cpu,
        "instructions": torch.backends.cpu.get_cpu_capability(),  # the widest that torch uses, by choice or by request
        "cores": os.cpu_count(),
        "system": platform.system(),
        "python": platform.python_version(),
    }


def versions() -> dict[str, str]:
    """Versions of everything that takes part."""
    installed = {}
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            installed[package] = version(package)
    return installed


def commit() -> str:
    """The commit of the checkout this code runs from, with "+" for uncommitted changes; "" outside a checkout."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "--", ":/src") else "")
    except (OSError, subprocess.CalledProcessError):
        return ""
