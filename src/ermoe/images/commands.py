"""``ermoe image``: train, evaluate, probe and use image classifiers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from ermoe.errors import UserError
from ermoe.train.changes import training_changes

if TYPE_CHECKING:
    from rich.console import Console

    from ermoe.data.images import Images
    from ermoe.train.distributed import Processes

_Word = tyro.conf.Positional
_Device = Literal["cpu", "cuda"] | None


@dataclass(frozen=True, slots=True)
class Train:
    """Train a preset on a data set; a run that stopped goes on where it was.

    Several processes: torchrun --nproc-per-node=N -m ermoe image train …, or srun. Options left out are the preset's.
    """

    preset: Annotated[str, _Word, tyro.conf.arg(metavar="PRESET")]
    """paper-ermoe, or b16-METHOD, cifar-METHOD, cifar17-METHOD, digits-METHOD with METHOD one of ermoe, ermoe-mean,
    ermoe-none, v-moe, gate, gate-loss-free, soft, expert-choice, base, cosine, dense; resnet18-STYLE, cifar-STYLE or
    digits-STYLE with STYLE single-gated or deep-moe."""
    data: Annotated[str, _Word, tyro.conf.arg(metavar="DATA")]
    """A folder in any of the layouts of docs/data.md, or a name: digits, fashion-mnist."""
    out: Path | None = None
    """The run folder; runs/PRESET-SEED by default."""
    weights: str | None = None
    """What the model starts from: a file with weights of a ViT, or "timm" for timm's pretrained ones."""
    check: bool = False
    """First read every image once; stop if some are unreadable or in both splits."""
    epochs: int | None = None
    batch_size: int | None = None
    """Images of one optimiser step, over all processes."""
    base_lr: float | None = None
    """Learning rate for 256 images."""
    basis_lr: float | None = None
    """Factor on the learning rate of bases."""
    weight_decay: float | None = None
    warmup_epochs: float | None = None
    layer_decay: float | None = None
    clip: float | None = None
    accumulate: int | None = None
    """Parts into which a process cuts its share of a batch."""
    precision: Literal["fp32", "bf16", "fp16", "fp64"] | None = None
    ema: float | None = None
    orthogonality: float | None = None
    """λ of the orthogonality loss."""
    orthogonality_every: int | None = None
    retract_every: int | None = None
    """Steps between retractions within an epoch; there is always one after it."""
    deterministic: bool = False
    """Only algorithms that repeat their results, also on GPUs."""
    seed: int | None = None
    log_every: int | None = None
    save_every: int | None = None
    """Steps between checkpoints within an epoch; there is always one after it."""
    keep_every: int | None = None
    """Epochs between models that are kept for good."""
    workers: int = 2
    """Processes that read image files ahead; sets that fit into memory need none."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    compile: bool = False
    """Run training steps through torch.compile."""
    resume: Literal["auto", "must", "never"] = "auto"
    device: _Device = None
    threads: int = 0
    """CPU threads of each process; 0 leaves that to torch."""

    def __call__(self, console: Console) -> None:
        import torch

        from ermoe.images.presets import recipe
        from ermoe.images.run import train
        from ermoe.train.distributed import processes

        if self.threads:
            torch.set_num_threads(self.threads)
        seed = recipe(self.preset).training.seed if self.seed is None else self.seed
        folder = self.out or Path("runs") / f"{self.preset}-{seed}"
        with processes(self.device) as group:
            if self.check:
                _check_first(self.data, console, group)
            figures = train(
                self.preset,
                self.data,
                folder,
                weights=self.weights,
                workers=self.workers,
                group=group,
                parallel=self.parallel,
                compile=self.compile,
                resume=self.resume,
                console=console,
                **training_changes(self),
            )
        if group.is_main:
            _show(console, figures)
            console.print(f"written: {folder}", highlight=False)


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Accuracy, loss and routing of a model on the test split of a data set."""

    model: Annotated[str, _Word, tyro.conf.arg(metavar="MODEL")]
    """A run folder, a model folder, or a repository of the Hugging Face hub."""
    data: Annotated[str, _Word, tyro.conf.arg(metavar="DATA")]
    """A folder in any of the layouts of docs/data.md, or a name: digits, fashion-mnist."""
    batch_size: int = 100
    workers: int = 2
    device: _Device = None
    report: Path | None = None
    """Also write an HTML report of the routing to this file."""

    def __call__(self, console: Console) -> None:
        from ermoe.analysis.recorder import record_routing
        from ermoe.analysis.summary import over_layers
        from ermoe.data.catalogue import open_images
        from ermoe.data.loader import Loader
        from ermoe.images.classification import evaluate, transform_for
        from ermoe.nn import moe_layers

        model, images = _load(self.model, self.device), open_images(self.data, "test")
        console.print(images.found, highlight=False, soft_wrap=True)
        _check_classes(self.model, model.num_classes, self.data, images.classes)
        device = next(model.parameters()).device
        loader = Loader(images, transform_for(model), batch_size=self.batch_size, workers=self.workers, device=device)
        if not moe_layers(model):
            _show(console, evaluate(model, loader))
            if self.report is not None:
                console.print(f"{self.model} is dense: there is no routing to report", highlight=False, soft_wrap=True)
            return
        with record_routing(model, classes=images.classes) as recorder:
            figures = evaluate(model, loader, recorder)
        _show(console, figures | over_layers(recorder.summary()))
        console.print(recorder.table(), highlight=False, soft_wrap=True)
        if self.report is not None:
            console.print(f"written: {recorder.report(self.report)}", highlight=False)


@dataclass(frozen=True, slots=True)
class Probe:
    """Few-shot linear probes of frozen features, in both readings of "n-shot", with 95 % intervals over draws."""

    model: Annotated[str, _Word, tyro.conf.arg(metavar="MODEL")]
    """A run folder, a model folder, or a repository of the Hugging Face hub."""
    data: Annotated[str, _Word, tyro.conf.arg(metavar="DATA")]
    """A folder in any of the layouts of docs/data.md, or a name: digits, fashion-mnist."""
    shots: tuple[int, ...] = (5, 10)
    """Images of each class, and epochs of the linear head."""
    readings: tuple[Literal["images", "epochs"], ...] = ("images", "epochs")
    draws: int = 5
    """Draws of images, or seeds of the head; at least 5."""
    seed: int = 0
    workers: int = 2
    device: _Device = None
    out: Path | None = None
    """Folder for probe-DATA.json, with every figure and every image drawn; by default the run or model folder, or
    beside it where it cannot be written."""

    def __call__(self, console: Console) -> None:
        import json

        from rich.table import Table

        from ermoe.data.catalogue import open_images
        from ermoe.files import replacing
        from ermoe.images.probe import check_request, features, probe, record_path

        if not self.shots or not self.readings:
            raise UserError("--shots and --readings need at least one value each")
        for shots in self.shots:
            check_request(self.readings[0], shots, self.draws)
        train, test = open_images(self.data, "train"), open_images(self.data, "test")
        console.print(f"{train.found}\n{test.found}", highlight=False, soft_wrap=True)
        model = _load(self.model, self.device)
        path = record_path(self.model, self.data, self.out)
        given = features(model, train, test, workers=self.workers)
        table = Table("reading", "shots", "accuracy", "95 % interval", "draws")
        found = []
        for reading in self.readings:
            for shots in self.shots:
                result = probe(given, train, reading=reading, shots=shots, draws=self.draws, seed=self.seed)
                interval = f"± {100 * result.half_width:.2f}"
                table.add_row(reading, str(shots), f"{100 * result.mean:.2f}", interval, str(self.draws))
                found.append(
                    {
                        "reading": reading,
                        "shots": shots,
                        "mean": result.mean,
                        "half_width_95": result.half_width,
                        "accuracies": result.accuracies,
                        "drawn": result.drawn,
                    }
                )
        console.print(table)
        with replacing(path) as draft:
            record = {"model": self.model, "data": self.data, "seed": self.seed, "probes": found}
            draft.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        console.print(f"written: {path}", highlight=False, soft_wrap=True)


@dataclass(frozen=True, slots=True)
class Predict:
    """The most probable classes of image files; those that cannot be read are named at the end, with exit code 2."""

    model: Annotated[str, _Word, tyro.conf.arg(metavar="MODEL")]
    """A run folder, a model folder, or a repository of the Hugging Face hub."""
    images: Annotated[tuple[str, ...], _Word]
    """Image files."""
    top: int = 5
    """Classes shown of each image."""
    device: _Device = None

    def __call__(self, console: Console) -> None:
        from ermoe.images.predict import predict
        from ermoe.images.run import class_names

        if not self.images:
            raise UserError("no image given: ermoe image predict MODEL IMAGE…")
        model = _load(self.model, self.device)
        names = class_names(self.model, model.num_classes)
        predictions = predict(model, self.images, names, top=self.top)
        for prediction in predictions:
            if prediction.problem is None:
                ranked = zip(prediction.classes, prediction.probabilities, strict=True)
                shown = ", ".join(f"{name} {chance:.1%}" for name, chance in ranked)
                console.print(f"{prediction.image}: {shown}", markup=False, highlight=False, soft_wrap=True)
        if problems := [prediction.problem for prediction in predictions if prediction.problem is not None]:
            raise UserError(f"{len(problems)} of {len(predictions)} images are left out: " + "; ".join(problems))


@dataclass(frozen=True, slots=True)
class Check:
    """Read every image of a data set once: unreadable files, images a class, images in both splits.

    The exit code is 1 if images are unreadable or in both splits.
    """

    data: Annotated[str, _Word, tyro.conf.arg(metavar="DATA")]
    """A folder in any of the layouts of docs/data.md, or a name: digits, fashion-mnist."""
    counts: bool = False
    """Also print how many images every class has."""

    def __call__(self, console: Console) -> None:
        from ermoe.images.check import check

        findings = check(_splits(self.data))
        console.print(findings.report(), highlight=False, soft_wrap=True)
        if self.counts:
            for split, counts in findings.class_counts.items():
                for name, number in counts.items():
                    console.print(f"{split} {name}: {number}", markup=False, highlight=False, soft_wrap=True)
        if not findings.is_clean:
            raise SystemExit(1)


COMMANDS: dict[str, Callable[..., Any]] = {
    "train": Train,
    "eval": Evaluate,
    "probe": Probe,
    "predict": Predict,
    "check": Check,
}


def _load(place: str, device: _Device) -> Any:
    from ermoe.images.run import model_folder
    from ermoe.models.io import load
    from ermoe.train.distributed import processes

    with processes(device) as alone:
        return load(model_folder(place), device=alone.device)


def _check_classes(place: str, num_classes: int, data: str, classes: list[str]) -> None:
    """Refuses a data set whose classes are not the model's: by name where they are known, else by number."""
    from ermoe.images.run import known_classes

    advice = "evaluate it on the data set it was trained on"
    if len(classes) != num_classes:
        raise UserError(f"{place} knows {num_classes} classes and {data} has {len(classes)}: {advice}")
    known = known_classes(place)
    if known is not None and len(known) == num_classes and known != classes:
        mine, other = next((mine, other) for mine, other in zip(known, classes, strict=True) if mine != other)
        raise UserError(f"{place} knows the class {mine!r} where {data} has {other!r}: {advice}")


def _splits(data: str) -> list[Images]:
    from ermoe.data.catalogue import open_images

    return [open_images(data, "train"), open_images(data, "test")]


def _check_first(data: str, console: Console, group: Processes) -> None:
    """The main process reads every image; the others wait for its verdict, for hours if need be."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from ermoe.images.check import check

    splits = _splits(data)
    is_dirty = torch.tensor(0)
    patient: Any = dist.new_group(backend="gloo", timeout=timedelta(days=7)) if group.num > 1 else None
    if group.is_main:
        findings = check(splits)
        console.print(findings.report(), highlight=False, soft_wrap=True)
        is_dirty += not findings.is_clean
    if group.num > 1:
        dist.broadcast(is_dirty, 0, group=patient)
    if is_dirty:
        raise UserError(
            f"{data}: some images are unreadable or in both splits (see above); mend that, or leave out --check"
        )


def _show(console: Console, figures: dict[str, float]) -> None:
    shown = {name: value for name, value in figures.items() if "/" not in name}
    console.print("  ".join(f"{name} {value:.4g}" for name, value in shown.items()), highlight=False)
