"""What all studies share: a queue of runs with one JSON each, the paper's figures beside ours, a table and a plot.

A study is a module with a `Study`: it says which runs there are, and what to make of their records. The queue can be
stopped at any time: runs that have their JSON are not repeated, and training goes on from its last epoch.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Table
from scipy.special import stdtrit

from ermoe.errors import UserError
from ermoe.explore.gallery import save_drawing
from ermoe.files import replacing
from ermoe.studies.bench.record import commit, machine, versions

SCALES = ("mini", "full")
Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Setup:
    """What a person asked for.

    ``data`` None means what comes with the library. JSON files, table and plot go to ``out``, trained models to
    ``work``; ``pretrain`` is what features are learned from before they are probed on ``data``.
    """

    data: str | None = None
    scale: str = "mini"
    seeds: int = 3
    out: Path = Path("runs/paper")
    work: Path = Path("runs/paper/trained")
    threads: int = 0
    weights: str | None = None
    pretrain: str | None = None
    epochs: int | None = None
    console: Console = field(default_factory=Console)

    def __post_init__(self) -> None:
        if self.scale not in SCALES:
            raise UserError(f"--scale {self.scale}: use one of {', '.join(SCALES)}")
        if self.seeds < 1:
            raise UserError(f"--seeds {self.seeds}: need at least one")
        if self.epochs is not None and self.epochs < 1:
            raise UserError(f"--epochs {self.epochs}: need at least one")

    @property
    def is_full(self) -> bool:
        """Whether the paper's own sizes are asked for."""
        return self.scale == "full"

    def each_seed(self) -> range:
        """1, 2, …"""
        return range(1, self.seeds + 1)

    @property
    def in_seeds(self) -> str:
        """How many, in words."""
        return "1 seed" if self.seeds == 1 else f"{self.seeds} seeds"

    def trained(self, data: str) -> Path:
        """The folder of models trained at this scale on ``data``, which all studies share."""
        return self.work / f"{self.scale}-{data}{self._brief}"

    def place(self, study: str) -> Path:
        """The folder of a study: its name tells scale, data, what was learned before, and the budget."""
        after = "" if self.pretrain is None else f"-after-{slug(self.pretrain)}"
        start = "" if self.weights is None else f"-from-{slug(self.weights)}"
        return self.out / study / f"{self.scale}-{slug(self.data or 'bundled')}{after}{start}{self._brief}"

    @property
    def _brief(self) -> str:
        return "" if self.epochs is None else f"-{self.epochs}-epochs"


@dataclass(frozen=True, slots=True)
class Job:
    """One run: ``work`` returns its figures, plain values and lists of them."""

    name: str
    seed: int
    work: Callable[[], dict[str, Any]]

    @property
    def label(self) -> str:
        """The name of its JSON."""
        return f"{slug(self.name)}-{self.seed}"


@dataclass(frozen=True, slots=True)
class Findings:
    """A table with the paper's figures beside ours, sentences on what follows from it, and a picture."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    sentences: Sequence[str] = ()
    drawing: Figure | None = None


@dataclass(frozen=True, slots=True)
class Study:
    """One table or figure of the paper.

    Args:
        name: of the command.
        title: what is compared.
        paper: the paper's setting, in a sentence.
        ours: our setting, in a sentence, and so how it differs.
        jobs: the runs.
        findings: what the records say; a record has ``name``, ``seed`` and ``figures``.
    """

    name: str
    title: str
    paper: str
    ours: Callable[[Setup], str]
    jobs: Callable[[Setup], Sequence[Job]]
    findings: Callable[[Setup, Sequence[Record]], Findings]


def run(study: Study, setup: Setup) -> Findings:
    """Runs what has not been run, prints and writes the result."""
    console = setup.console
    if setup.threads:
        torch.set_num_threads(setup.threads)
    ours = study.ours(setup)
    console.print(f"[bold]{study.name}[/bold]: {study.title}", highlight=False)
    console.print(f"The paper: {study.paper}\nHere ({setup.scale}): {ours}", highlight=False, soft_wrap=True)
    records = run_queue(study, setup)
    found = study.findings(setup, records)
    console.print(as_table(found))
    for sentence in found.sentences:
        console.print(f"• {sentence}", highlight=False, soft_wrap=True)
    place = setup.place(study.name)
    with replacing(place / "result.md") as draft:
        draft.write_text(_markdown_page(study, setup, ours, found), encoding="utf-8")
    if found.drawing is not None:
        save_drawing(found.drawing, place / "plot", description=study.title)
    console.print(f"written: {place}", highlight=False, soft_wrap=True)
    return found


def run_queue(study: Study, setup: Setup) -> list[Record]:
    """The records of all runs, in order; those without a JSON are run first."""
    jobs = list(study.jobs(setup))
    place = setup.place(study.name)
    records = []
    for number, job in enumerate(jobs, 1):
        path = place / f"{job.label}.json"
        if not path.is_file():
            setup.console.print(f"run {number} of {len(jobs)}: {job.name}, seed {job.seed}", highlight=False)
            start = time.perf_counter()
            figures = job.work()
            _write(path, _record(study, setup, job, figures, time.perf_counter() - start))
        records.append(_read(path))
        _check_data(records[-1], setup, path)
    return records


def _check_data(record: Record, setup: Setup, path: Path) -> None:
    """Two folders of data may have the same name; a record of the one says nothing about the other."""
    both = [place for place in (record.get("data"), setup.data) if place and os.path.exists(place)]
    if len(both) == 2 and not os.path.samefile(*both):
        raise UserError(f"{path} is about {both[0]}, not {both[1]}: give this study another --out")


def _record(study: Study, setup: Setup, job: Job, figures: dict[str, Any], seconds: float) -> Record:
    return {
        "study": study.name,
        "name": job.name,
        "seed": job.seed,
        "scale": setup.scale,
        "data": setup.data,
        "ran_on": study.ours(setup),
        "figures": figures,
        "seconds": round(seconds, 1),
        "threads": torch.get_num_threads(),
        "command": _command(),
        "commit": commit(),
        "machine": machine(),
        "versions": versions(),
    }


def _write(path: Path, record: Record) -> None:
    with replacing(path) as draft:
        draft.write_text(json.dumps(_plain(record), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _plain(value: Any) -> Any:
    """NaN as null: JSON knows no NaN."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def _read(path: Path) -> Record:
    try:
        record: Record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as problem:
        raise UserError(f"{path} is damaged: remove it, and its run is repeated") from problem
    return record


def of(records: Sequence[Record], name: str, *path: str) -> list[float]:
    """One figure of all runs called ``name``, a value a seed; what is not known is left out.

    >>> of([{"name": "a", "figures": {"x": {"y": 1.0}}}, {"name": "b", "figures": {}}], "a", "x", "y")
    [1.0]
    """
    values = []
    for record in records:
        if record["name"] == name:
            value: Any = record["figures"]
            for key in path:
                value = value.get(key) if isinstance(value, dict) else None
            if value is not None:
                values.append(value)
    return values


def mean(values: Sequence[float]) -> float:
    """The mean; NaN of nothing."""
    return statistics.fmean(values) if values else math.nan


def deviation(values: Sequence[float]) -> float:
    """The standard deviation; 0 of fewer than two values."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def cell(values: Sequence[float], style: str = ".2%") -> str:
    """Mean ± standard deviation over seeds.

    >>> cell([0.5, 0.6]), cell([]), cell([3.25], ".1f")
    ('55.00% ± 7.07%', '–', '3.2')
    """
    if not values:
        return "–"
    spread = f" ± {deviation(values):{style}}" if len(values) > 1 else ""
    return f"{mean(values):{style}}{spread}"


def verdict(
    ours: Sequence[float], theirs: Sequence[float], *, larger: str, smaller: str, what: str, form: str = ".3g"
) -> str:
    """A sentence on a difference: which way it goes, and whether its 95 % interval over seeds excludes zero.

    >>> verdict([0.90, 0.91, 0.90], [0.50, 0.52, 0.51], larger="A", smaller="B", what="accuracy")
    'accuracy: A is above B by 0.393, more than the noise of 3 seeds (95 % interval ± 0.0205).'
    """
    if not ours or not theirs:
        return f"{what}: nothing to compare."
    gap = mean(ours) - mean(theirs)
    if float(format(abs(gap), form).rstrip("%")) == 0:
        return f"{what}: {larger} and {smaller} are equal."
    first, second = (larger, smaller) if gap >= 0 else (smaller, larger)
    count = min(len(ours), len(theirs))
    if count < 2:
        return f"{what}: {first} is above {second} by {abs(gap):{form}}; one seed says nothing about noise."
    margin = welch_margin(ours, theirs)
    size = "more than" if abs(gap) > margin else "inside"
    noise = f"{size} the noise of {count} seeds (95 % interval ± {margin:{form}})"
    return f"{what}: {first} is above {second} by {abs(gap):{form}}, {noise}."


def welch_margin(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Half of the 95 % interval of the difference of two means, by Welch's t: three seeds know little of their spread.

    >>> round(welch_margin([1.0, 2.0, 3.0], [1.0, 2.0, 3.0]), 2)
    2.27
    """
    squares = [deviation(values) ** 2 / len(values) for values in (ours, theirs)]
    if sum(squares) == 0:
        return 0.0
    freedom = sum(squares) ** 2 / sum(
        square**2 / (len(values) - 1) for square, values in zip(squares, (ours, theirs), strict=True)
    )
    return float(stdtrit(freedom, 0.975)) * math.sqrt(sum(squares))


def as_table(found: Findings) -> Table:
    """For the terminal."""
    table = Table(box=box.SIMPLE, header_style="bold")
    for index, name in enumerate(found.header):
        table.add_column(name, justify="left" if index == 0 else "right")
    for row in found.rows:
        table.add_row(*row)
    return table


def as_markdown(found: Findings) -> str:
    """For documents."""
    lines = ["| " + " | ".join(found.header) + " |", "| :-- |" + " --: |" * (len(found.header) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in found.rows)])


def _command() -> str:
    return shlex.join(["ermoe", *sys.argv[1:]])


def _markdown_page(study: Study, setup: Setup, ours: str, found: Findings) -> str:
    parts = [f"# {study.name}: {study.title}", f"The paper: {study.paper}", f"Here ({setup.scale}): {ours}"]
    parts += [as_markdown(found), "\n".join(f"- {sentence}" for sentence in found.sentences), f"`{_command()}`"]
    return "\n\n".join(part for part in parts if part) + "\n"


def slug(name: str) -> str:
    """A name as part of a file name.

    >>> slug("data/cifar-10-batches-bin/"), slug("λ = 1e-05")
    ('cifar-10-batches-bin', 'λ-1e-05')
    """
    last = name.rstrip("/").rsplit("/", 1)[-1]
    return re.sub(r"[^\w.-]+", "-", last).strip("-")
