"""What all studies of the paper share: runs in a queue, the paper's figures beside ours, a table and a plot.

A study is a function under the decorator `study`, which says the runs; the function says what to make of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from matplotlib.figure import Figure

from ermoe.analysis.report import save_drawing
from ermoe.console import say
from ermoe.errors import unknown_name
from ermoe.files import replacing
from ermoe.studies.figures import Runs
from ermoe.studies.paper.setup import Setup
from ermoe.studies.record import RECORDS, Job, Record, command_line, run_queue
from ermoe.studies.tables import Table


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
        findings: what the runs say.
    """

    name: str
    title: str
    paper: str
    ours: Callable[[Setup], str]
    jobs: Callable[[Setup], Sequence[Job]]
    findings: Callable[[Runs], Findings]


def study(
    title: str, paper: str, ours: Callable[[Setup], str], jobs: Callable[[Setup], Sequence[Job]]
) -> Callable[[Callable[[Runs], Findings]], Study]:
    """Declares a study: the function below it, which says what the runs show, becomes the `Study` of its name."""
    return lambda findings: Study(findings.__name__.strip("_").replace("_", "-"), title, paper, ours, jobs, findings)


def every(
    names: Collection[str], work: Callable[[Setup, str, int], dict[str, Any]]
) -> Callable[[Setup], Sequence[Job]]:
    """A run of ``work`` for every name with every seed; models that studies have in common are trained once."""
    return lambda setup: [Job(name, seed, partial(work, setup, name, seed)) for seed in setup.seeds for name in names]


def in_pairs(quoted: Sequence[str], ours: Sequence[str]) -> list[str]:
    """Cells of a row: the paper's figures, each with ours after it.

    >>> in_pairs(["1", "2"], ["a", "b"])
    ['1', 'a', '2', 'b']
    """
    return [value for pair in zip(quoted, ours, strict=True) for value in pair]


def run(study: Study, setup: Setup) -> Findings | None:
    """Runs what has not been run, prints and writes the result; None while rows are missing that nobody asked for."""
    console = setup.console
    if setup.threads:
        torch.set_num_threads(setup.threads)
    ours = study.ours(setup)
    console.print(study.name, style="bold", end="", highlight=False)
    say(console, f": {study.title}\nThe paper: {study.paper}\nHere ({setup.scale}): {ours}")
    records = run_study(study, setup)
    recorded = {record["name"] for record in records}
    if missing := [name for name in dict.fromkeys(job.name for job in study.jobs(setup)) if name not in recorded]:
        say(console, f"on record in {setup.place(study.name)}; the table waits for {', '.join(missing)}")
        return None
    found = study.findings(Runs(records))
    console.print(found.table.terminal())
    for sentence in found.sentences:
        say(console, f"• {sentence}")
    place = setup.place(study.name)
    with replacing(place / "result.md") as draft:
        draft.write_text(_markdown_page(study, setup, ours, found), encoding="utf-8")
    if found.drawing is not None:
        save_drawing(found.drawing, place / "plot", description=study.title)
    say(console, f"written: {place}")
    return found


def run_study(study: Study, setup: Setup) -> list[Record]:
    """The records there are, in order; runs without a line are run first, all of them or those asked for."""
    asked = {"scale": setup.scale, "data": setup.data}
    place = setup.place(study.name)
    jobs = [replace(job, settings={**asked, **job.settings}) for job in study.jobs(setup)]
    names = dict.fromkeys(job.name for job in jobs)
    if unknown := [name for name in setup.only or () if name not in names]:
        raise unknown_name("row", unknown[0], names)
    return run_queue(
        study.name,
        jobs,
        place / RECORDS,
        only=setup.only,
        console=setup.console,
        earlier=place.glob("*.json"),
        ran_on=study.ours(setup),
    )


def _markdown_page(study: Study, setup: Setup, ours: str, found: Findings) -> str:
    parts = [f"# {study.name}: {study.title}", f"The paper: {study.paper}", f"Here ({setup.scale}): {ours}"]
    parts += [found.table.markdown(), "\n".join(f"- {sentence}" for sentence in found.sentences), f"`{command_line()}`"]
    return "\n\n".join(part for part in parts if part) + "\n"
