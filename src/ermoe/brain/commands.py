"""``ermoe brain``: brain age from T1 scans, from a data set to predictions and a report."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from ermoe.brain.data.scans import CohortOptions, Preprocessing
from ermoe.brain.recipes import ABOUT_METHODS, FAMILIES, PRESETS, BrainRecipe, VolumeAugmentation, recipe
from ermoe.console import Command, first_read, say
from ermoe.errors import UserError
from ermoe.train.settings import Machine, TrainingMachine, in_words

if TYPE_CHECKING:
    from rich.console import Console

    from ermoe.brain.data.cohort import Cohort
    from ermoe.brain.model import Prediction

_Word = tyro.conf.Positional


def _few_cores() -> Machine:
    return Machine(workers=0)


@dataclass(frozen=True, slots=True)
class _Grid:
    """What the other values of a recipe depend on besides its preset."""

    patch_size: int | None = None
    spacing_mm: float | None = None

    def of(self, chosen: BrainRecipe) -> BrainRecipe:
        """The recipe, on the same room in voxels and cubes of these sizes."""
        if self.patch_size is not None:
            chosen = replace(chosen, size={**chosen.size, "patch_size": self.patch_size})
        grid = chosen.preprocessing.with_spacing(self.spacing_mm, cube=chosen.patch_size)
        return replace(chosen, preprocessing=grid)


@dataclass(frozen=True, slots=True)
class Train:
    """Train an estimator of brain age, one network a fold; a run that stopped goes on where it was.

    Values shown are the preset's, if one is named; small-ermoe is meant for a few dozen people and two cores.
    """

    preset: Annotated[str, _Word, tyro.conf.arg(metavar="PRESET")]
    """A name such as small-ermoe or paper-sfcn: ermoe brain presets lists and describes them."""
    data: Annotated[str, _Word, tyro.conf.arg(metavar="DATA")]
    """A BIDS root, or a TSV or CSV with the columns participant_id, age, t1 and, if known, sex, site, session_id."""
    recipe: BrainRecipe
    cohort: CohortOptions = field(default_factory=CohortOptions)
    machine: TrainingMachine = field(default_factory=lambda: TrainingMachine(workers=0))
    out: Path | None = None
    """The run folder; runs/brain-PRESET-SEED by default."""
    init: str = "random"
    """random; phantom, to learn a synthetic cohort first (made once, kept in the cache); or another brain-age model."""
    split: Literal["auto", "k-fold", "holdout", "leave-site-out"] = "auto"
    """auto leaves sites out if there are two or more of at least 15 people; else it is k-fold below 200 people, and
    holdout (8:1:1) from there. Always by person."""
    folds: int = 5
    """Of k-fold."""
    fold_seed: int = 0
    """Another shuffle of the people over the folds."""
    patch_size: int | None = None
    """Edge of a cube, which is a token, in voxels; 16 by default."""
    augment: Literal["yes", "no"] | None = None
    """Move, turn, shade and re-expose volumes (MONAI), or not; by default paper does, and small only hides cubes and
    adds noise."""
    flip: bool = False
    """With augment: also mirror left and right."""
    calibration_fit: Literal["held-out", "train"] = "held-out"
    """Whose predictions calibrate: people held out, or the training people as in the paper."""
    check: bool = True
    """First look at every scan, and stop at errors."""
    cache: Path | None = None
    """Prepared volumes and phantoms; $ERMOE_CACHE/brain, or ermoe's folder among your caches."""

    @classmethod
    def suited(cls, argv: list[str], preset: str | None = None) -> Train:
        """With the values of the preset that is named, here or in a file, on the grid that is named."""
        usual = cls(preset or "small-ermoe", "", recipe(preset or "small-ermoe"))
        named = first_read(usual, argv).preset
        words = [word for word in argv if word not in ("-h", "--help")]
        grid, _ = tyro.cli(_Grid, args=words, return_unknown_args=True, prog="ermoe brain train", add_help=False)
        is_known = named in PRESETS or named in FAMILIES
        return cls(preset or tyro.MISSING, tyro.MISSING, grid.of(recipe(named) if is_known else usual.recipe))

    def __call__(self, console: Console) -> None:
        from ermoe.brain.run import train

        recipe(self.preset)  # says which there are
        chosen = self.chosen()
        folder = self.out or Path("runs") / f"brain-{self.preset}-{chosen.training.seed}"
        with self.machine.started(console) as compute:
            train(
                self.data,
                folder,
                preset=chosen,
                init=self.init,
                split=self.split,
                folds=self.folds,
                fold_seed=self.fold_seed,
                calibration_fit=self.calibration_fit,
                cohort_options=self.cohort,
                cache=self.cache,
                check=self.check,
                compute=compute,
                resume=self.machine.resume,
            )
            compute.say(f"written: {folder}\nnext: ermoe brain report {folder}")

    def chosen(self) -> BrainRecipe:
        """The recipe, augmented or not as was asked."""
        own = self.recipe
        if self.patch_size not in (None, own.patch_size):
            raise UserError(
                f"--patch-size {self.patch_size}: the file of --config has cubes of {own.patch_size}; print it anew"
            )
        augment = own.augmentation is not None if self.augment is None else self.augment == "yes"
        if self.flip and not augment:
            raise UserError(f"--flip: {self.preset} does not augment volumes; add --augment yes")
        if not augment:
            return replace(own, augmentation=None)
        if not self.flip and own.augmentation is not None:
            return own
        # Kept inputs are made once: a single one would be the same change in every epoch, 8 are still quickly made.
        variants = own.variants and max(own.variants, 8)
        return replace(own, augmentation=VolumeAugmentation(flip=self.flip), variants=variants)


@dataclass(frozen=True, slots=True)
class Evaluate:
    """How far predictions are from known ages.

    People whom the model knows from training are judged by the networks that have not learnt from them.
    """

    model: Annotated[Path, _Word, tyro.conf.arg(metavar="MODEL")]
    """A run folder, or the model folder in it."""
    data: Annotated[str, _Word, tyro.conf.arg(metavar="DATA")]
    """A BIDS root, or a table with ages, as for training."""
    cohort: CohortOptions = field(default_factory=CohortOptions)
    machine: Machine = field(default_factory=_few_cores)
    cache: Path | None = None
    """Prepared scans; $ERMOE_CACHE/brain, or ermoe's folder among your caches."""

    def __call__(self, console: Console) -> None:
        from ermoe.brain import evaluate
        from ermoe.brain.metrics import LABELS

        with self.machine.started(console) as compute:
            found = evaluate(self.model, self.data, cohort_options=self.cohort, cache=self.cache, compute=compute)
        for name, value in found.items():
            say(console, f"{LABELS.get(name, name)}: {value:.4g}")


@dataclass(frozen=True, slots=True)
class Predict:
    """Brain ages of new scans, as a BIDS derivative; no ages are needed, and a failure is a row that says why."""

    model: Annotated[Path, _Word, tyro.conf.arg(metavar="MODEL")]
    """A run folder, or the model folder in it."""
    scans: Annotated[tuple[str, ...], _Word, tyro.conf.arg(metavar="DATA…")]
    """Scans: NIfTI files, folders, BIDS roots or tables."""
    out: Path | None = None
    """Folder for the derivative; without it predictions are only printed."""
    pages: bool = True
    """With --out: also write report.html, and a page of every scan."""
    own_ridges: bool = True
    """People of a scanner that was in training, by its name, also get the ridge of its own."""
    other_people: bool = False
    """These are other people than those of the training set, though some may share their ids."""
    cohort: CohortOptions = field(default_factory=CohortOptions)
    machine: Machine = field(default_factory=_few_cores)
    cache: Path | None = None
    """Masks and prepared scans; $ERMOE_CACHE/brain, or ermoe's folder among your caches."""

    def __call__(self, console: Console) -> None:
        from ermoe.brain.data.cache import Archive
        from ermoe.brain.data.cohort import open_scans
        from ermoe.brain.likeness import kept_signs
        from ermoe.brain.model import BrainAgeModel, predict

        if not self.scans:
            raise UserError("no scan given: ermoe brain predict MODEL DATA…")
        with self.machine.started(console) as compute:
            model = BrainAgeModel.load(self.model, compute.device)
            model = model if self.own_ridges else replace(model, own_ridges={})
            model = replace(model, parts={}) if self.other_people else model
            if self.out is not None:
                from ermoe.brain.reporting.derivative import refuse_foreign

                refuse_foreign(self.out, model.name)  # before anybody waits
            if model.recalibration is not None:
                say(console, f"{self.model} was {model.recalibration.in_words()} (column brain_age_recalibrated)")
            cohort = open_scans(self.scans, self.cohort)
            for note in (*cohort.notes, *cohort.problems):
                say(console, note)
            self.cohort.refuse_missing(scan.participant_id for scan in cohort.scans)
            rows = []
            volumes = Archive.at(self.cache).volumes(model.preprocessing)
            # Tissue maps are of no use to a prediction, and must not be able to spoil it.
            plain = [replace(scan, tissue=None) for scan in cohort.scans]
            signs = partial(kept_signs, volumes)
            for row in predict(model, plain, read=volumes.volume, signs=signs, workers=compute.workers):
                say(console, _line(row))
                rows.append(row)
            failed = sum(bool(row.problem) for row in rows)
            say(console, f"{len(rows) - failed} of {len(rows)} scans predicted{_all_alike(rows)}")
            if self.out is not None:
                from ermoe.brain.predicting import Predictor

                predictor = Predictor(model, self.model, volumes)
                command = f"ermoe brain predict {self.model} {' '.join(self.scans)}{self.cohort.as_typed()}"
                page = predictor.write(self.out, plain, rows, command, with_pages=self.pages)
                say(console, f"written: {page if self.pages else self.out}")
        if rows and failed == len(rows):
            raise UserError("no scan could be used: see the reasons above")


@dataclass(frozen=True, slots=True)
class App:
    """The same as a BIDS-App: participant judges people one by one, group gathers them in one table and report.

    The exit code is 1 if a scan could not be used, and 2 for a mistake in the call.
    """

    bids_dir: Annotated[Path, _Word, tyro.conf.arg(metavar="BIDS_DIR")]
    """Root of the data set."""
    out_dir: Annotated[Path, _Word, tyro.conf.arg(metavar="OUT_DIR")]
    """Folder of the derivative."""
    level: Annotated[Literal["participant", "group"], _Word, tyro.conf.arg(metavar="participant|group")]
    """participant: a folder and a page a person. group: one table, report.html, and logs/CITATION.md to paste."""
    model: Path
    """A run folder of `ermoe brain train`, or the model folder in it."""
    other_people: bool = False
    """These are other people than those of the training set, though some may share their ids."""
    cohort: CohortOptions = field(default_factory=CohortOptions)
    machine: Machine = field(default_factory=_few_cores)
    work_dir: Annotated[Path | None, tyro.conf.arg(aliases=["-w"])] = None
    """Masks and prepared scans; $ERMOE_CACHE/brain, or ermoe's folder among your caches."""

    def __call__(self, console: Console) -> None:
        from ermoe.brain.data.bids import is_bids_root
        from ermoe.brain.data.cohort import open_scans
        from ermoe.brain.predicting import Predictor

        if not (self.bids_dir.is_dir() and is_bids_root(self.bids_dir)):
            raise UserError(f"{self.bids_dir} is no BIDS root: it needs dataset_description.json and sub-… folders")
        command = f"ermoe brain app {self.bids_dir} {self.out_dir} {self.level} --model {self.model}"
        command += self.cohort.as_typed()
        failed = 0
        with self.machine.started(console) as compute:
            predictor = Predictor.at(self.model, self.work_dir, compute)
            if self.other_people:
                predictor = replace(predictor, model=replace(predictor.model, parts={}))
            cohort = open_scans([str(self.bids_dir)], self.cohort)
            for note in (*cohort.notes, *cohort.problems):
                say(console, note)
            scans = cohort.scans
            self.cohort.refuse_missing(scan.participant_id for scan in scans)
            if self.level == "group":
                say(console, f"written: {predictor.gather(self.out_dir, scans, command, data=self.bids_dir)}")
                return
            for row in predictor.one_by_one(self.out_dir, scans, data=self.bids_dir):
                say(console, _line(row))
                failed += bool(row.problem)
        say(console, f"written: {self.out_dir}\nnext: {command.replace(' participant ', ' group ')}")
        if failed:
            say(console, f"{failed} of {len(scans)} scans could not be used: see the reasons above")
            raise SystemExit(1)


@dataclass(frozen=True, slots=True)
class Recalibrate:
    """A model for another site: intercept and slope from people of known age scanned there, as a model of its own."""

    model: Annotated[Path, _Word, tyro.conf.arg(metavar="MODEL")]
    """A run folder, or the model folder in it."""
    data: Annotated[str, _Word, tyro.conf.arg(metavar="DATA")]
    """People of the site whom the model has not learnt from: a BIDS root, or a table with their ages."""
    out: Path = Path("runs/brain-recalibrated")
    """Folder of the new model; the old one stays as it is."""
    other_people: bool = False
    """These are other people than those of the training set, though some may share their ids."""
    cohort: CohortOptions = field(default_factory=CohortOptions)
    machine: Machine = field(default_factory=_few_cores)

    def __call__(self, console: Console) -> None:
        from ermoe.brain.data.cohort import open_cohort
        from ermoe.brain.model import BrainAgeModel, recalibrated

        if self.out.exists():
            raise UserError(f"--out {self.out} is there already: name a new folder")
        with self.machine.started(console) as compute:
            cohort = open_cohort(self.data, self.cohort)
            for note in cohort.notes:
                say(console, note)
            old = BrainAgeModel.load(self.model, compute.device)
            new = recalibrated(
                old,
                cohort.with_age,
                where=" ".join(self.cohort.where),
                other_people=self.other_people,
                workers=compute.workers,
            )
        assert new.recalibration is not None
        new.save(self.out)
        say(console, new.recalibration.in_words())
        say(console, f"written: {self.out}\nnext: ermoe brain predict {self.out} DATA")


@dataclass(frozen=True, slots=True)
class Report:
    """Write the HTML report, tables, figures and model card of a finished run, as a BIDS derivative."""

    run: Annotated[Path, _Word, tyro.conf.arg(metavar="RUN")]
    """A folder that `ermoe brain train` wrote."""
    out: Path | None = None
    """RUN/derivatives/ermoe-ba by default."""
    calibration_fit: Literal["held-out", "train"] | None = None
    """Whose predictions calibrate; by default as in training."""
    occlusion_scans: int = 4
    """Scans over which the occlusion map is averaged; 0 leaves it out."""
    cache: Path | None = None
    """Prepared volumes; $ERMOE_CACHE/brain, or ermoe's folder among your caches."""
    machine: Machine = field(default_factory=_few_cores)

    def __call__(self, console: Console) -> None:
        from ermoe.brain.reporting.page import report

        with self.machine.started(console) as compute:
            path = report(
                self.run,
                self.out,
                cache=self.cache,
                calibration_fit=self.calibration_fit,
                occlusion_scans=self.occlusion_scans,
                compute=compute,
            )
        say(console, f"written: {path}")


@dataclass(frozen=True, slots=True)
class Check:
    """Check every scan, and whether something else than the brain predicts age, before training.

    The exit code is 2 if there is an error that would stop a training run.
    """

    scans: Annotated[tuple[str, ...], _Word, tyro.conf.arg(metavar="DATA…")]
    """A BIDS root, a table (TSV or CSV), folders, or NIfTI files."""
    cohort: CohortOptions = field(default_factory=CohortOptions)
    spacing_mm: float | None = None
    """Edge of the voxels of the grid that brains must fit in; 2 by default."""
    shape: tuple[int, int, int] | None = None
    """Its voxels towards right, front and top; 96 112 96 by default, or the same room in other voxels."""
    mask: bool = False
    """Make brain masks with deepbet where there are none, seconds a scan, and look at these brains too."""

    def __call__(self, console: Console) -> None:
        from rich.table import Table

        from ermoe.brain.data.preprocess import has_deepbet
        from ermoe.brain.data.quality import examine, in_words

        if self.mask and not has_deepbet():
            raise UserError("--mask makes masks with deepbet: pip install 'ermoe[brain-mask]'")
        cohort = self._cohort()
        usual = Preprocessing().with_spacing(self.spacing_mm)
        usual = usual if self.shape is None else replace(usual, shape=self.shape)
        with _progress(console, "looking at scans") as on_scan:
            examination = examine(cohort, usual, make_masks=self.mask, on_scan=on_scan)
        for part in in_words(cohort, examination):
            if isinstance(part, Table):
                console.print(part)
            else:
                say(console, part)
        if number := len(examination.errors):
            raise UserError(f"{number} error{'s' * (number > 1)} (see above): mend the data before training")

    def _cohort(self) -> Cohort:
        from ermoe.brain.data.bids import is_bids_root
        from ermoe.brain.data.cohort import TABLES, open_cohort, open_scans

        if not self.scans:
            raise UserError("no scans given: ermoe brain check DATA…, a BIDS root, a table or NIfTI files")
        first = Path(self.scans[0])
        is_root = first.is_dir() and is_bids_root(first)
        if len(self.scans) == 1 and (is_root or first.suffix.casefold() in TABLES):
            return open_cohort(first, self.cohort)
        if self.cohort.exclude or self.cohort.sex_coding or self.cohort.age_is_baseline:
            raise UserError("--exclude, --sex-coding and --age-is-baseline need one BIDS root or one table")
        return open_scans(self.scans, self.cohort)


@dataclass(frozen=True, slots=True)
class Synthesize:
    """Write a phantom cohort: ageing brains made from the MNI152 tissue maps, as a BIDS set marked synthetic.

    A cohort that was interrupted is completed; a larger number of subjects adds people and changes nobody.
    """

    out: Path = Path("runs/brain-phantoms")
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
    ageing: Literal["everywhere", "frontal"] = "everywhere"
    """Where age shows; frontal: in the front of the brain alone, at shares of tissue that do not follow age."""

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
                ageing=self.ageing,
                on_subject=on_subject,
            )
        say(console, f"written: {root}, {self.subjects:,} synthetic subject{'s' * (self.subjects > 1)}")


@dataclass(frozen=True, slots=True)
class Demo:
    """See it work within minutes: a small synthetic cohort, a tiny model, its report. The figures mean nothing."""

    out: Path = Path("runs/brain-demo")
    """For the cohort, the run and its report."""
    subjects: int = 40
    """Synthetic people."""
    machine: Machine = field(default_factory=_few_cores)

    def __call__(self, console: Console) -> None:
        from ermoe.brain.data.phantom import synthesize
        from ermoe.brain.reporting.page import report
        from ermoe.brain.run import train

        data, run, cache = self.out / "bids", self.out / "run", self.out / "cache"
        with self.machine.started(console) as compute:
            synthesize(data, self.subjects, spacing_mm=4.0, ages=(20.0, 90.0))
            train(data, run, preset="tiny", folds=3, cache=cache, compute=compute, epochs=10, base_lr=0.05)
            path = report(run, cache=cache, compute=compute)
        say(console, f"written: {path} (synthetic brains: never quote these figures)")


@dataclass(frozen=True, slots=True)
class Presets:
    """What can be trained by name: sizes, methods and their training."""

    def __call__(self, console: Console) -> None:
        say(console, in_words(PRESETS, ABOUT_METHODS, "ermoe brain train"))


COMMANDS: dict[str, type[Command]] = {
    "check": Check,
    "presets": Presets,
    "train": Train,
    "report": Report,
    "evaluate": Evaluate,
    "predict": Predict,
    "app": App,
    "recalibrate": Recalibrate,
    "synthesize": Synthesize,
    "demo": Demo,
}


def _line(row: Prediction) -> str:
    name = "_".join(part for part in (row.participant_id, row.session_id) if part)
    if row.problem:
        return f"{name}: no prediction ({row.problem})"
    interval = "" if math.isnan(row.brain_age_low) else f" [{row.brain_age_low:.1f}, {row.brain_age_high:.1f}]"
    said = "; ".join(row.flags)
    recalibrated = (
        "" if math.isnan(row.brain_age_recalibrated) else f", recalibrated {row.brain_age_recalibrated:.1f} years"
    )
    return f"{name}: {row.brain_age:.1f} years{interval}{recalibrated}" + (f" ({said})" if said else "")


def _all_alike(rows: list[Prediction]) -> str:
    """A clause that says within how many years all answers lie, if there are some, and how many are flagged."""
    ages = [row.brain_age for row in rows if not row.problem]
    if len(ages) < 2:
        return ""
    odd = sum(bool(row.unlike_training) for row in rows)
    flagged = f"; {odd} unlike the training scans, flagged" if odd else ""
    return f"; all {len(ages)} predictions lie within {max(ages) - min(ages):.1f} years{flagged}"


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
