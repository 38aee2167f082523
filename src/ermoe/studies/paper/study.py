"""What all studies of the paper share: runs in a queue, the paper's figures beside ours, a table and a plot.

A study is a module with a `Study`: it says which runs there are, and what to make of their records.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.console import Console

from ermoe.errors import UserError
from ermoe.explore.gallery import save_drawing
from ermoe.files import replacing
from ermoe.studies.queue import Job, run_queue
from ermoe.studies.record import RECORDS, Record, command_line
from ermoe.studies.tables import Table
from ermoe.train.compute import Compute, Processes, device_named

SCALES = ("mini", "full")


@dataclass(frozen=True, slots=True)
class Setup:
    """What a person asked for.

    ``data`` None means what comes with the library. Records, table and plot go to ``out``, trained models to
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
    device: str = "auto"
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

    def compute(self, *, workers: int = 0) -> Compute:
        """Where runs compute, and to whom they speak."""
        return Compute(Processes(device=device_named(self.device)), workers=workers, console=self.console)

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
class Findings:
    """A table with the paper's figures beside ours, sentences on what follows from it, and a picture."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    sentences: Sequence[str] = ()
    drawing: Figure | None = None

    @property
    def table(self) -> Table:
        """Header and rows."""
        return Table(self.header, self.rows)


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


def every(names: Iterable[str], work: Callable[[Setup, str, int], dict[str, Any]]) -> Callable[[Setup], Sequence[Job]]:
    """A run of ``work`` for every name with every seed; models that studies have in common are trained once."""
    names = tuple(names)
    return lambda setup: [
        Job(name, seed, partial(work, setup, name, seed)) for seed in setup.each_seed() for name in names
    ]


def run(study: Study, setup: Setup) -> Findings:
    """Runs what has not been run, prints and writes the result."""
    console = setup.console
    if setup.threads:
        torch.set_num_threads(setup.threads)
    ours = study.ours(setup)
    console.print(f"[bold]{study.name}[/bold]: {study.title}", highlight=False)
    console.print(f"The paper: {study.paper}\nHere ({setup.scale}): {ours}", highlight=False, soft_wrap=True)
    records = run_study(study, setup)
    found = study.findings(setup, records)
    console.print(found.table.terminal())
    for sentence in found.sentences:
        console.print(f"• {sentence}", highlight=False, soft_wrap=True)
    place = setup.place(study.name)
    with replacing(place / "result.md") as draft:
        draft.write_text(_markdown_page(study, setup, ours, found), encoding="utf-8")
    if found.drawing is not None:
        save_drawing(found.drawing, place / "plot", description=study.title)
    console.print(f"written: {place}", highlight=False, soft_wrap=True)
    return found


def run_study(study: Study, setup: Setup) -> list[Record]:
    """The records of all runs, in order; those without a line are run first."""
    asked = {"scale": setup.scale, "data": setup.data}
    place = setup.place(study.name)
    jobs = [replace(job, settings={**asked, **job.settings}) for job in study.jobs(setup)]
    earlier = place.glob("*.json")
    return run_queue(
        study.name, jobs, place / RECORDS, console=setup.console, earlier=earlier, ran_on=study.ours(setup)
    )


def _markdown_page(study: Study, setup: Setup, ours: str, found: Findings) -> str:
    parts = [f"# {study.name}: {study.title}", f"The paper: {study.paper}", f"Here ({setup.scale}): {ours}"]
    parts += [found.table.markdown(), "\n".join(f"- {sentence}" for sentence in found.sentences), f"`{command_line()}`"]
    return "\n\n".join(part for part in parts if part) + "\n"


def slug(name: str) -> str:
    """A name as part of a file name.

    >>> slug("data/cifar-10-batches-bin/"), slug("λ = 1e-05")
    ('cifar-10-batches-bin', 'λ-1e-05')
    """
    last = name.rstrip("/").rsplit("/", 1)[-1]
    return re.sub(r"[^\w.-]+", "-", last).strip("-")
