"""``ermoe image``: train, evaluate, probe and use image classifiers."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from ermoe.console import Command, first_read, say
from ermoe.errors import UserError
from ermoe.images.presets import ABOUT_METHODS, PRESETS, ImageRecipe, recipe
from ermoe.train.settings import Machine, TrainingMachine, in_words

if TYPE_CHECKING:
    from rich.console import Console

    from ermoe.data.images import Images
    from ermoe.train.compute import Compute

_Word = tyro.conf.Positional


@dataclass(frozen=True, slots=True)
class Train:
    """Train a preset on a data set; a run that stopped goes on where it was.

    Values shown are the preset's, if one is named. Several processes: torchrun --nproc-per-node=N -m ermoe image train,
    or srun.
    """

    preset: Annotated[str, _Word, tyro.conf.arg(metavar="PRESET")]
    """A name such as cifar-ermoe or deit-tiny-v-moe: ermoe image presets lists and describes them."""
    data: Annotated[str, _Word, tyro.conf.arg(metavar="DATA")]
    """A folder in any of the layouts of docs/how-to/own-images.md, or a name: digits, fashion-mnist."""
    recipe: ImageRecipe
    machine: TrainingMachine = field(default_factory=TrainingMachine)
    out: Path | None = None
    """The run folder; runs/PRESET-SEED by default."""
    check: bool = False
    """First read every image once; stop if some are unreadable or in both splits."""

    @classmethod
    def suited(cls, argv: list[str], preset: str | None = None) -> Train:
        """With the values of the preset that is named, here or in a file, or of cifar-ermoe."""
        usual = cls(preset or "cifar-ermoe", "", recipe(preset or "cifar-ermoe"))
        named = first_read(usual, argv).preset
        return cls(preset or tyro.MISSING, tyro.MISSING, recipe(named) if named in PRESETS else usual.recipe)

    def __call__(self, console: Console) -> None:
        from ermoe.images.run import train

        if self.preset != self.recipe.preset:
            recipe(self.preset)  # says which there are
            raise UserError(f"{self.preset} would be trained with the values of {self.recipe.preset}: name it first")
        folder = self.out or Path("runs") / f"{self.preset}-{self.recipe.training.seed}"
        with self.machine.started(console) as compute:
            if self.check:
                _check_first(self.data, compute)
            figures = train(self.recipe, self.data, folder, compute=compute, resume=self.machine.resume)
            if compute.group.is_main:
                _show(console, figures)
            compute.say(f"written: {folder}")


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Accuracy, loss and routing of a model on the test split of a data set."""

    model: Annotated[str, _Word, tyro.conf.arg(metavar="MODEL")]
    """A run folder, a model folder, or a repository of the Hugging Face hub."""
    data: Annotated[str, _Word, tyro.conf.arg(metavar="DATA")]
    """A folder in any of the layouts of docs/how-to/own-images.md, or a name: digits, fashion-mnist."""
    machine: Machine = field(default_factory=Machine)
    batch_size: int = 100
    """Images at a time."""
    report: Path | None = None
    """Also write an HTML report of the routing to this file."""

    def __call__(self, console: Console) -> None:
        from ermoe.analysis.recorder import record_routing
        from ermoe.analysis.summary import over_layers
        from ermoe.data.images import open_images
        from ermoe.images.predicting import check_classes
        from ermoe.images.run import evaluate, opened, transform_for
        from ermoe.nn import moe_layers
        from ermoe.train.loader import Loader

        images = open_images(self.data, "test")
        say(console, images.summary)
        with self.machine.started(console) as compute:
            model = opened(self.model, compute)
            check_classes(self.model, model.num_classes, self.data, images.classes)
            loader = Loader(transform_for(model).of(images), batch_size=self.batch_size, compute=compute)
            if not moe_layers(model):
                _show(console, evaluate(model, loader))
                if self.report is not None:
                    say(console, f"{self.model} is dense: there is no routing to report")
                return
            with record_routing(model, classes=images.classes) as recorder:
                figures = evaluate(model, loader, recorder)
            _show(console, figures | over_layers(recorder.summary()))
            say(console, recorder.table())
            if self.report is not None:
                say(console, f"written: {recorder.report(self.report)}")


@dataclass(frozen=True, slots=True)
class Probe:
    """Few-shot linear probes of frozen features, in both readings of "n-shot", with 95 % intervals over draws."""

    model: Annotated[str, _Word, tyro.conf.arg(metavar="MODEL")]
    """A run folder, a model folder, or a repository of the Hugging Face hub."""
    data: Annotated[str, _Word, tyro.conf.arg(metavar="DATA")]
    """A folder in any of the layouts of docs/how-to/own-images.md, or a name: digits, fashion-mnist."""
    shots: tuple[int, ...] = (5, 10)
    """Images of each class, and epochs of the linear head."""
    readings: tuple[Literal["images", "epochs"], ...] = ("images", "epochs")
    """Which meanings of n-shot: n images a class, n epochs of a linear head."""
    draws: int = 5
    """Draws of images, or seeds of the head; at least 5."""
    seed: int = 0
    """Of the draws."""
    machine: Machine = field(default_factory=Machine)
    out: Path | None = None
    """Folder for probe-DATA.json, with every figure and every image drawn; by default the run or model folder, or
    beside it where it cannot be written."""

    def __call__(self, console: Console) -> None:
        from dataclasses import asdict

        from rich.table import Table

        from ermoe.data.images import open_images
        from ermoe.files import write_json
        from ermoe.images.probe import check_request, features, probe, record_path
        from ermoe.images.run import opened

        if not self.shots or not self.readings:
            raise UserError("--shots and --readings need at least one value each")
        for shots in self.shots:
            check_request(self.readings[0], shots, self.draws)
        train, test = open_images(self.data, "train"), open_images(self.data, "test")
        say(console, f"{train.summary}\n{test.summary}")
        with self.machine.started(console) as compute:
            model = opened(self.model, compute)
            path = record_path(self.model, self.data, self.out)
            given = features(model, train, test, workers=self.machine.workers)
        results = [
            probe(given, train, reading=reading, shots=shots, draws=self.draws, seed=self.seed)
            for reading in self.readings
            for shots in self.shots
        ]
        table = Table("reading", "shots", "accuracy", "95 % interval", "draws")
        for result in results:
            interval = f"± {100 * result.half_width:.2f}"
            table.add_row(result.reading, str(result.shots), f"{100 * result.mean:.2f}", interval, str(self.draws))
        console.print(table)
        probes = [{**asdict(result), "mean": result.mean, "half_width_95": result.half_width} for result in results]
        write_json(path, {"model": self.model, "data": self.data, "seed": self.seed, "probes": probes})
        say(console, f"written: {path}")


@dataclass(frozen=True, slots=True)
class Predict:
    """The most probable classes of image files; those that cannot be read are named at the end, with exit code 2."""

    model: Annotated[str, _Word, tyro.conf.arg(metavar="MODEL")]
    """A run folder, a model folder, or a repository of the Hugging Face hub."""
    images: Annotated[tuple[str, ...], _Word, tyro.conf.arg(metavar="IMAGE…")]
    """Image files."""
    top: int = 5
    """Classes shown of each image."""
    machine: Machine = field(default_factory=lambda: Machine(workers=0))

    def __call__(self, console: Console) -> None:
        from ermoe.images.predicting import class_names, predict
        from ermoe.images.run import opened

        if not self.images:
            raise UserError("no image given: ermoe image predict MODEL IMAGE…")
        with self.machine.started(console) as compute:
            model = opened(self.model, compute)
            names = class_names(self.model, model.num_classes)
            predictions = predict(model, self.images, names, top=self.top, compute=compute)
        for prediction in predictions:
            if prediction.problem is None:
                ranked = zip(prediction.classes, prediction.probabilities, strict=True)
                shown = ", ".join(f"{name} {chance:.1%}" for name, chance in ranked)
                say(console, f"{prediction.image}: {shown}")
        if problems := [prediction.problem for prediction in predictions if prediction.problem is not None]:
            raise UserError(f"{len(problems)} of {len(predictions)} images are left out: " + "; ".join(problems))


@dataclass(frozen=True, slots=True)
class Check:
    """Read every image of a data set once: unreadable files, images a class, images in both splits.

    The exit code is 1 if images are unreadable or in both splits.
    """

    data: Annotated[str, _Word, tyro.conf.arg(metavar="DATA")]
    """A folder in any of the layouts of docs/how-to/own-images.md, or a name: digits, fashion-mnist."""
    counts: bool = False
    """Also print how many images every class has."""

    def __call__(self, console: Console) -> None:
        from ermoe.images.check import check

        findings = check(_splits(self.data))
        say(console, findings.report())
        if self.counts:
            for split, counts in findings.class_counts.items():
                for name, number in counts.items():
                    say(console, f"{split} {name}: {number}")
        if not findings.is_clean:
            raise SystemExit(1)


@dataclass(frozen=True, slots=True)
class Presets:
    """What can be trained by name: models, methods and their training."""

    def __call__(self, console: Console) -> None:
        say(console, in_words(PRESETS, ABOUT_METHODS, "ermoe image train"))


COMMANDS: dict[str, type[Command]] = {
    "presets": Presets,
    "train": Train,
    "evaluate": Evaluate,
    "probe": Probe,
    "predict": Predict,
    "check": Check,
}


def _splits(data: str) -> list[Images]:
    from ermoe.data.images import open_images

    return [open_images(data, "train"), open_images(data, "test")]


def _check_first(data: str, compute: Compute) -> None:
    """The main process reads every image; the others wait for its verdict, for hours if need be."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from ermoe.images.check import check

    splits, group = _splits(data), compute.group
    is_dirty = torch.tensor(0)
    patient: Any = dist.new_group(backend="gloo", timeout=timedelta(days=7)) if group.num > 1 else None
    if group.is_main:
        findings = check(splits)
        compute.say(findings.report())
        is_dirty += not findings.is_clean
    if group.num > 1:
        dist.broadcast(is_dirty, 0, group=patient)
    if is_dirty:
        raise UserError(
            f"{data}: some images are unreadable or in both splits (see above); mend that, or leave out --check"
        )


def _show(console: Console, figures: dict[str, float]) -> None:
    shown = {name: value for name, value in figures.items() if "/" not in name}
    say(console, "  ".join(f"{name} {value:.4g}" for name, value in shown.items()))
