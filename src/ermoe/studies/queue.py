"""A queue of runs that can be stopped at any time and started again: what has its line in the file is not repeated."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from ermoe.errors import UserError
from ermoe.studies.record import Record, add_records, adopt, as_json, new_record, read_records
from ermoe.train.run_folder import differences


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
    console: Console | None = None,
    earlier: Iterable[Path] = (),
    defaults: Mapping[str, Mapping[str, Any]] | None = None,
    **environment: Any,
) -> list[Record]:
    """The records of all jobs, in order; those without a line in ``path`` are run first, one after the other.

    Put seeds outermost, so that an unfinished study still compares all there is. A line of a run with other settings
    or other data is refused before the first run, which may take long.

    Args:
        study: what records say they belong to.
        jobs: told apart by name and seed.
        path: the file of the study.
        console: where it is said which run it is.
        earlier: files of earlier versions, one a run, which are taken over if there is no ``path`` yet.
        defaults: what settings had before they existed, for records that are older than a setting.
        environment: what all runs have in common, beside command, commit, machine and versions.
    """
    console = console or Console()
    adopt(path, study, earlier)
    done = {(record["name"], record["seed"]): record for record in read_records(path)}
    for job in jobs:
        if (record := done.get((job.name, job.seed))) is not None:
            _refuse_another(record, job, path, defaults or {})
    for number, job in enumerate(jobs, 1):
        if (job.name, job.seed) not in done:
            console.print(f"run {number} of {len(jobs)}: {job.name}, seed {job.seed}", highlight=False)
            start = time.perf_counter()
            figures = dict(job.work())
            seconds = figures.pop("seconds", time.perf_counter() - start)
            own = {"seed": job.seed, "settings": dict(job.settings), "figures": figures, "seconds": seconds}
            (done[job.name, job.seed],) = add_records(path, new_record(study, job.name, **own, **environment))
    return [done[job.name, job.seed] for job in jobs]


def _refuse_another(record: Record, job: Job, path: Path, defaults: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuses a record whose settings are not those asked for, as far as both name them."""
    there, asked = dict(record["settings"]), as_json(dict(job.settings))
    for name in defaults.keys() & there.keys():
        there[name] = as_json({**defaults[name], **there[name]})
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
