"""``ermoe brain``: brain age from T1 scans, from a data set to predictions and a report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from ermoe.brain.data_commands import Doctor, Synthesize
from ermoe.errors import UserError
from ermoe.train.changes import training_changes

if TYPE_CHECKING:
    from rich.console import Console

    from ermoe.brain.predict import Prediction

_Word = tyro.conf.Positional


@dataclass(frozen=True, slots=True)
class Train:
    """Train an estimator of brain age, one network a fold; a run that stopped goes on where it was."""

    data: Annotated[str, _Word, tyro.conf.arg(metavar="DATA")]
    """A BIDS root, or a TSV or CSV with the columns participant_id, age, t1 and, if known, sex, site, session_id."""
    out: Path | None = None
    """The run folder; runs/brain-METHOD-SEED by default."""
    preset: Literal["small", "paper", "tiny"] = "small"
    """small: minutes on two cores. paper: the paper's sizes, for GPUs. tiny: to see it work."""
    method: Literal["ermoe", "ermoe-context", "vit3d", "swin3d", "sfcn"] = "ermoe"
    """ermoe: prototype score (Alg. 2); ermoe-context: the context score of Eq. 5; the others are baselines."""
    init: str = "random"
    """random; phantom, to learn a synthetic cohort first (made once, kept in the cache); or another brain-age model."""
    split: Literal["auto", "k-fold", "holdout", "leave-site-out"] = "auto"
    """auto is k-fold below 200 people, else holdout (8:1:1). Always by person."""
    folds: int = 5
    fold_seed: int = 0
    """Another shuffle of the people over the folds."""
    head: Literal["bins", "bins-l1", "regression"] | None = None
    """bins: soft labels; bins-l1: cross-entropy plus absolute error; regression: absolute error."""
    input: Literal["t1", "contrast", "blocks"] | None = None
    """What a network sees: normalised T1, tissue shares of voxels, or of blocks of voxels and the whole brain."""
    warm_start_epochs: int | None = None
    """Epochs over isolated tissues with forced routing; 0 for none."""
    rate_after_warm_start: float | None = None
    """Of the learning rate, for the whole scans that follow; 0.1 keeps region experts to their tissues."""
    probe_epochs: tuple[int, ...] | None = None
    """After these epochs, and the last, isolated tissues show which experts they choose; 1 5 by default."""
    spacing_mm: float | None = None
    """Edge of the grid's voxels; 2 by default."""
    shape: tuple[int, int, int] | None = None
    """Voxels of the grid towards right, front and top; 96 112 96 by default, or the same room in other voxels."""
    patch_size: int | None = None
    """Edge of a cube, which is a token, in voxels; 16 by default."""
    normalisation: Literal["zscore", "mean", "percentile"] | None = None
    """Of intensities inside the brain; zscore by default, mean as SFCN's authors."""
    epochs: int | None = None
    batch_size: int | None = None
    base_lr: float | None = None
    """Learning rate for 256 scans."""
    weight_decay: float | None = None
    ema: float | None = None
    precision: Literal["fp32", "bf16", "fp16", "fp64"] | None = None
    seed: int | None = None
    augment: bool | None = None
    """Move, turn, shade and re-expose volumes (MONAI); paper does, small only hides cubes and adds noise."""
    flip: bool = False
    """With augment: also mirror left and right."""
    register: Literal["none", "affine"] = "none"
    """Bring every scan to MNI space first; needs the extra "register"."""
    calibration_fit: Literal["held-out", "train"] = "held-out"
    """Whose predictions calibrate: people held out, or the training people as in the paper."""
    participant_label: tuple[str, ...] = ()
    """Only these people."""
    exclude: tuple[str, ...] = ()
    """Not these people."""
    sex_coding: tuple[str, ...] = ()
    """What numbers in the column sex mean, for example 1=M 2=F."""
    age_is_baseline: bool = False
    """The age in participants.tsv is that of the first of several sessions."""
    tissue_from: Literal["probseg", "dseg", "aseg", "none"] | None = None
    t1_rule: str = "first"
    """Which of several T1w scans of a session: first, last, or a pattern for file names."""
    check: bool = True
    """First look at every scan, and stop at errors."""
    cache: Path | None = None
    """Prepared volumes and phantoms; $ERMOE_CACHE/brain, or ermoe's folder among your caches."""
    workers: int = 0
    """Processes that read and augment ahead; on a machine with few cores none is best."""
    threads: int = 0
    """CPU threads; 0 leaves that to torch."""

    def __call__(self, console: Console) -> None:
        import torch

        from ermoe.brain.recipes import recipe
        from ermoe.brain.run import train
        from ermoe.train.compute import processes

        if self.threads:
            torch.set_num_threads(self.threads)
        chosen = self._adapted(recipe(self.preset, self.method, **self._changes()))
        folder = self.out or Path("runs") / f"brain-{self.method}-{chosen.training.seed}"
        with processes(None) as group:
            model = train(
                self.data,
                folder,
                preset=chosen,
                init=self.init,
                split=self.split,
                folds=self.folds,
                fold_seed=self.fold_seed,
                calibration_fit=self.calibration_fit,
                cohort_options=self._cohort_options(),
                cache=self.cache,
                check=self.check,
                group=group,
                workers=self.workers,
                console=console,
            )
        if group.is_main:
            raw = model.facts["raw"]
            console.print(
                f"held-out people, raw: MAE {raw['mae']:.2f} years, r {raw['r']:.2f}\nwritten: {folder}\n"
                f"next: ermoe brain report {folder}",
                highlight=False,
                soft_wrap=True,
            )

    def _adapted(self, chosen: Any) -> Any:
        from dataclasses import replace

        augment = chosen.augmentation is not None if self.augment is None else self.augment
        if self.flip and not augment:
            raise UserError(f"--flip: the preset {self.preset} does not augment volumes; add --augment")
        if not augment:
            chosen = replace(chosen, augmentation=None)
        elif self.flip or chosen.augmentation is None:
            from ermoe.brain.data.augment import VolumeAugmentation

            variants = chosen.variants and max(chosen.variants, 8)
            chosen = replace(chosen, augmentation=VolumeAugmentation(flip=self.flip), variants=variants)
        if self.patch_size is not None:
            chosen = replace(chosen, size={**chosen.size, "patch_size": self.patch_size})
        prepared = chosen.preprocessing.on_grid(self.spacing_mm, self.shape, cube=chosen.patch_size)
        prepared = replace(prepared, register=self.register, normalisation=self.normalisation or prepared.normalisation)
        return replace(chosen, preprocessing=prepared)

    def _changes(self) -> dict[str, Any]:
        names = ("head", "input", "warm_start_epochs", "rate_after_warm_start", "probe_epochs")
        own = {name: value for name in names if (value := getattr(self, name)) is not None}
        return own | training_changes(self)

    def _cohort_options(self) -> dict[str, Any]:
        from ermoe.brain.data.demographics import sex_coding_from

        given = {
            "sex_coding": sex_coding_from(self.sex_coding),
            "age_is_baseline": self.age_is_baseline,
            "tissue_from": self.tissue_from,
            "participants": list(self.participant_label) or None,
            "exclude": list(self.exclude),
            "t1_rule": self.t1_rule,
        }
        usual = {"sex_coding": {}, "age_is_baseline": False, "tissue_from": None, "participants": None, "exclude": []}
        return {name: value for name, value in given.items() if value != {**usual, "t1_rule": "first"}[name]}


@dataclass(frozen=True, slots=True)
class Predict:
    """Brain ages of new scans, as a BIDS derivative; no ages are needed, and a failure is a row that says why."""

    model: Annotated[Path, _Word, tyro.conf.arg(metavar="MODEL")]
    """A run folder, or the model folder in it."""
    scans: Annotated[tuple[str, ...], _Word, tyro.conf.arg(metavar="SCANS")]
    """NIfTI files, folders, BIDS roots or tables."""
    out: Path | None = None
    """Folder for the derivative; without it predictions are only printed."""
    participant_label: tuple[str, ...] = ()
    """Only these people."""
    t1_rule: str = "first"
    """Which of several T1w scans of a session: first, last, or a pattern for file names."""
    threads: int = 0

    def __call__(self, console: Console) -> None:
        import torch

        from ermoe.brain.data.cohort import open_scans
        from ermoe.brain.model import BrainAgeModel
        from ermoe.brain.predict import predict

        if self.threads:
            torch.set_num_threads(self.threads)
        if not self.scans:
            raise UserError("no scan given: ermoe brain predict MODEL SCANS…")
        model = BrainAgeModel.load(self.model)
        found = open_scans(self.scans, participants=list(self.participant_label) or None, t1_rule=self.t1_rule)
        for note in (*found.notes, *map(str, found.problems)):
            console.print(note, highlight=False, soft_wrap=True, markup=False)
        rows = []
        for row in predict(model, found.scans):
            console.print(_line(row), highlight=False, soft_wrap=True, markup=False)
            rows.append(row)
        failed = sum(bool(row.problem) for row in rows)
        console.print(f"{len(rows) - failed} of {len(rows)} scans predicted", highlight=False)
        if self.out is not None:
            _write(rows, self.out, self.model)
            console.print(f"written: {self.out}", highlight=False)
        if rows and failed == len(rows):
            raise UserError("no scan could be used: see the reasons above")


@dataclass(frozen=True, slots=True)
class Report:
    """Write the HTML report, tables, figures and model card of a finished run, as a BIDS derivative."""

    run: Annotated[Path, _Word, tyro.conf.arg(metavar="RUN")]
    """A folder that `ermoe brain train` wrote."""
    out: Path | None = None
    """RUN/derivatives/ermoe-ba by default."""
    calibration_fit: Literal["held-out", "train"] | None = None
    occlusion_scans: int = 4
    """Scans over which the occlusion map is averaged; 0 leaves it out."""
    cache: Path | None = None

    def __call__(self, console: Console) -> None:
        from ermoe.brain.reporting.page import report

        path = report(
            self.run,
            self.out,
            cache=self.cache,
            calibration_fit=self.calibration_fit,
            occlusion_scans=self.occlusion_scans,
            console=console,
        )
        console.print(f"written: {path}", highlight=False, soft_wrap=True)


@dataclass(frozen=True, slots=True)
class Demo:
    """See it work within minutes: a small synthetic cohort, a tiny model, its report. The figures mean nothing."""

    out: Path = Path("runs/brain-demo")
    subjects: int = 40
    threads: int = 0

    def __call__(self, console: Console) -> None:
        import torch

        from ermoe.brain.data.phantom import synthesize
        from ermoe.brain.reporting.page import report
        from ermoe.brain.run import train

        if self.threads:
            torch.set_num_threads(self.threads)
        data, cache = self.out / "bids", self.out / "cache"
        synthesize(data, self.subjects, spacing_mm=6.0, ages=(20.0, 90.0))
        train(data, self.out / "run", preset="tiny", folds=3, cache=cache, console=console, epochs=10, base_lr=0.05)
        path = report(self.out / "run", cache=cache, console=console)
        console.print(f"written: {path} (synthetic brains: never quote these figures)", highlight=False, soft_wrap=True)


COMMANDS: dict[str, Callable[..., Any]] = {
    "train": Train,
    "predict": Predict,
    "report": Report,
    "doctor": Doctor,
    "synthesize": Synthesize,
    "demo": Demo,
}


def run(argv: list[str]) -> None:
    """Entry point of the command."""
    command = tyro.extras.subcommand_cli_from_dict(
        COMMANDS, prog="ermoe brain", description="Brain age from T1 scans. Research use only.", args=argv
    )
    from rich.console import Console

    try:
        command(Console())
    except ModuleNotFoundError as missing:
        if missing.name not in ("nibabel", "nilearn", "monai", "einops", "pandas"):
            raise
        raise UserError(f'{missing.name} is missing: pip install "ermoe[brain]"') from missing


def _line(row: Prediction) -> str:
    name = "_".join(part for part in (row.participant_id, row.session_id) if part)
    if row.problem:
        return f"{name}: no prediction ({row.problem})"
    interval = "" if row.brain_age_low != row.brain_age_low else f" [{row.brain_age_low:.1f}, {row.brain_age_high:.1f}]"
    flags = [
        text
        for text, is_set in (
            ("seen in training", row.seen_in_training),
            ("outside the training ages", row.outside_age_range),
            (f"mask from {row.mask_source}, unlike training", row.unusual_mask),
            ("not like a T1: hardly brighter inside the brain than at its surface", row.unlike_t1),
        )
        if is_set
    ]
    return f"{name}: {row.brain_age:.1f} years{interval}" + (f" ({'; '.join(flags)})" if flags else "")


def _write(rows: list[Prediction], out: Path, model: Path) -> None:
    from dataclasses import asdict

    from ermoe.brain.predict import COLUMNS
    from ermoe.brain.reporting.derivative import describe, write_table

    readme = f"Predictions of {len(rows)} scans by the model {model.name}, in desc-predictions_brainage.tsv."
    describe(out, name="Brain age predictions", readme=readme)
    write_table(out / "desc-predictions_brainage.tsv", COLUMNS, [asdict(row) for row in rows])
