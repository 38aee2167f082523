"""``ermoe brain doctor`` and ``ermoe brain synthesize``: the data side of the brain commands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from ermoe.brain.data.scans import CohortOptions, Preprocessing
from ermoe.console import say
from ermoe.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from ermoe.brain.data.cohort import Cohort
    from ermoe.brain.data.quality import Examination

_Word = tyro.conf.Positional


@dataclass(frozen=True, slots=True)
class Doctor:
    """Check every scan, and whether something else than the brain predicts age, before training.

    The exit code is 2 if there is an error that would stop a training run.
    """

    scans: Annotated[tuple[str, ...], _Word, tyro.conf.arg(metavar="SCANS")]
    """A BIDS root, a table (TSV or CSV), folders, or NIfTI files."""
    cohort: CohortOptions = field(default_factory=CohortOptions)
    spacing_mm: float | None = None
    """Edge of the voxels of the grid that brains must fit in; 2 by default."""
    shape: tuple[int, int, int] | None = None
    """Its voxels towards right, front and top; 96 112 96 by default, or the same room in other voxels."""

    def __call__(self, console: Console) -> None:
        from ermoe.brain.data.quality import examine

        cohort = self._cohort()
        usual = Preprocessing().with_spacing(self.spacing_mm)
        usual = usual if self.shape is None else replace(usual, shape=self.shape)
        with _progress(console, "looking at scans") as on_scan:
            examination = examine(cohort, usual, on_scan=on_scan)
        _show(console, cohort, examination)
        if examination.errors:
            raise UserError(f"{_count(len(examination.errors), 'error')} (see above): mend the data before training")

    def _cohort(self) -> Cohort:
        from ermoe.brain.data.cohort import TABLES, open_cohort, open_scans

        if not self.scans:
            raise UserError("no scans given: ermoe brain doctor SCANS…, a BIDS root, a table or NIfTI files")
        first = Path(self.scans[0])
        if len(self.scans) == 1 and (_is_bids(first) or first.suffix.casefold() in TABLES):
            return open_cohort(first, self.cohort)
        if self.cohort.exclude or self.cohort.sex_coding or self.cohort.age_is_baseline:
            raise UserError("--exclude, --sex-coding and --age-is-baseline need one BIDS root or one table")
        return open_scans(self.scans, self.cohort)


@dataclass(frozen=True, slots=True)
class Synthesize:
    """Write a phantom cohort: ageing brains made from the MNI152 tissue maps, as a BIDS set marked synthetic.

    A cohort that was interrupted is completed; a larger number of subjects adds people and changes nobody.
    """

    out: Annotated[Path, _Word, tyro.conf.arg(metavar="OUT")]
    """Folder of the new data set."""
    subjects: int = 200
    """Number of people."""
    seed: int = 0
    """Another seed makes other people."""
    confounded: bool = False
    """Old people are scanned at other sites than young ones."""
    sessions: tuple[int, ...] = (1,)
    """Visits of a person: one number for everybody, or the numbers to draw from."""
    ages: tuple[float, float] = (45.0, 90.0)
    """Youngest and oldest at the first visit."""
    spacing_mm: float = 2.0
    """Edge of the voxels."""

    def __call__(self, console: Console) -> None:
        from ermoe.brain.data.phantom import synthesize

        with _progress(console, "making phantoms") as on_subject:
            root = synthesize(
                self.out,
                self.subjects,
                self.seed,
                confounded=self.confounded,
                sessions=self.sessions,
                ages=self.ages,
                spacing_mm=self.spacing_mm,
                on_subject=on_subject,
            )
        written = f"written: {root}, {_count(self.subjects, 'synthetic subject')}"
        say(console, written)


def _show(console: Console, cohort: Cohort, examination: Examination) -> None:
    """What `doctor` says: the cohort in a few lines, problems one a line, and the confound table."""
    for line in [*_summary(cohort, examination), *cohort.notes]:
        say(console, line)
    for title, problems in (("error", examination.errors), ("warning", examination.warnings)):
        for problem in problems:
            say(console, f"{title}: {problem}")
    _show_confounds(console, examination)
    found = (
        _count(len(examination.errors), "error"),
        _count(len(examination.warnings), "warning"),
        _count(len(examination.confounded_by), "confound"),
    )
    say(console, ", ".join(found))


def _summary(cohort: Cohort, examination: Examination) -> list[str]:
    """Who is there, and where the masks come from."""
    from collections import Counter

    people = {scan.participant_id for scan in cohort.scans}
    lines = [f"{_count(len(cohort.scans), 'scan')} of {_count(len(people), 'person', 'people')}"]
    ages = [scan.age for scan in cohort.scans if scan.age is not None]
    if ages:
        lines[0] += f", {min(ages):.1f} to {max(ages):.1f} years"
    groups: dict[str, Counter[str]] = {
        "sex": Counter(scan.sex or "n/a" for scan in cohort.scans),
        "site": Counter(scan.site or "n/a" for scan in cohort.scans),
        "brain mask": Counter(checkup.mask_source or "none" for checkup in examination.checkups),
        "tissue maps": Counter("yes" if scan.tissue else "no" for scan in cohort.scans),
    }
    lines += [
        f"{name}: " + ", ".join(f"{key} {n}" for key, n in sorted(found.items())) for name, found in groups.items()
    ]
    return lines


def _show_confounds(console: Console, examination: Examination) -> None:
    from rich.table import Table

    if not examination.confounds:
        return
    mean = examination.confounds[0].mae_of_mean
    table = Table("this alone", "MAE of age", "gain", "p", title="What predicts age without a look at the brain")
    table.add_row("nothing (the mean age)", f"{mean:.2f}", "", "")
    for confound in examination.confounds:
        if confound.mae is None:
            table.add_row(confound.name, "the same for all", "", "")
        else:
            gain = f"{1 - confound.mae / mean:+.0%}"
            table.add_row(confound.name, f"{confound.mae:.2f}", gain, f"{confound.p_value:.3f}")
    console.print(table)
    for confound in examination.confounds:
        if confound.predicts_age:
            say(
                console,
                f"warning: {confound.name} alone predicts age ({confound.mae:.1f} years instead of {mean:.1f}): a "
                "model can learn it instead of the brain; judge among people who share it and quote this row with it",
            )


def _is_bids(path: Path) -> bool:
    from ermoe.brain.data.bids import is_bids_root

    return path.is_dir() and is_bids_root(path)


def _count(number: int, thing: str, things: str | None = None) -> str:
    return f"{number:,} {thing if number == 1 else things or thing + 's'}"


@contextmanager
def _progress(console: Console, title: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal; elsewhere nothing."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(title)

        def advance(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        yield advance
