"""``ermoe retrieve``: train and evaluate CLIPs with sparse image towers, search with them, classify without labels."""

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

_Word = tyro.conf.Positional
_Protocol = Literal[
    "coco-karpathy-5k", "coco-val2017-5k", "flickr30k-karpathy-1k", "flickr30k-full-31k", "flickr8k-1k", "custom"
]


@dataclass(frozen=True, slots=True)
class Train:
    """Train a preset on the train split of a protocol; dev chooses the epoch, test is not opened.

    Several processes: torchrun --nproc-per-node=N -m ermoe retrieve train …. Options left out are the preset's.
    """

    preset: Annotated[str, _Word, tyro.conf.arg(metavar="PRESET")]
    """FAMILY-METHOD or FAMILY-METHOD-frozen, with FAMILY one of small, tiny, openai-b16, laion-b16, imagenet-b16 and
    METHOD one of ermoe, ermoe-none, v-moe, dense; or FAMILY-clip-moe, FAMILY-long-clip, FAMILY-fix-clip-style."""
    data: Annotated[Path, _Word, tyro.conf.arg(metavar="DATA")]
    """The folder of a data set, a caption file, or a folder of webdataset's shards."""
    protocol: _Protocol = "custom"
    """Which images and captions; sizes are checked."""
    images: Path | None = None
    """The folder of the image files, where it is not one of the usual ones beside the captions."""
    out: Path | None = None
    """The run folder; runs/retrieve-PRESET-SEED by default."""
    weights: str | None = None
    """A CLIP file for both towers, or for the text tower if --image-weights is given."""
    image_weights: str | None = None
    """A file with weights of a ViT for the image tower."""
    text_from: str | None = None
    """A run or model folder of ours whose text tower is taken over."""
    cache: bool = False
    """Decode all images once and keep them in memory."""
    epochs: int | None = None
    batch_size: int | None = None
    """Pairs of one optimiser step, over all processes; each is the others' negative."""
    base_lr: float | None = None
    """Learning rate for 256 pairs."""
    weight_decay: float | None = None
    warmup_epochs: float | None = None
    clip: float | None = None
    precision: Literal["fp32", "bf16", "fp16", "fp64"] | None = None
    ema: float | None = None
    orthogonality: float | None = None
    seed: int | None = None
    log_every: int | None = None
    save_every: int | None = None
    """Steps between checkpoints within an epoch; there is always one after it."""
    workers: int = 2
    """Processes that read image files ahead; with --cache none is needed."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    resume: Literal["auto", "must", "never"] = "auto"
    device: Literal["cpu", "cuda"] | None = None
    threads: int = 0
    """CPU threads of each process; 0 leaves that to torch."""

    def __call__(self, console: Console) -> None:
        import torch

        from ermoe.retrieval.presets import recipe
        from ermoe.retrieval.run import train
        from ermoe.train.compute import processes

        if self.threads:
            torch.set_num_threads(self.threads)
        seed = recipe(self.preset).training.seed if self.seed is None else self.seed
        folder = self.out or Path("runs") / f"retrieve-{self.preset}-{seed}"
        same = ("protocol", "images", "weights", "image_weights", "text_from", "cache", "workers", "parallel", "resume")
        with processes(self.device) as group:
            figures = train(
                self.preset,
                self.data,
                folder,
                group=group,
                console=console,
                **{name: getattr(self, name) for name in same},
                **training_changes(self),
            )
        if group.is_main:
            shown = "  ".join(f"{name} {value:.4g}" for name, value in figures.items())
            console.print(f"dev: {shown}\nwritten: {folder}", highlight=False, soft_wrap=True)


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Recall in both directions under a named protocol. A pool with training images is refused; test is read once."""

    model: Annotated[str, _Word, tyro.conf.arg(metavar="MODEL")]
    """A run folder, a model folder, or a repository of the Hugging Face hub."""
    data: Annotated[Path, _Word, tyro.conf.arg(metavar="DATA")]
    """The folder of a data set, a caption file, or a folder of webdataset's shards."""
    protocol: _Protocol = "custom"
    split: Literal["test", "dev", "all"] = "test"
    """"all" takes every image of a custom set."""
    images: Path | None = None
    """The folder of the image files, where it is not one of the usual ones beside the captions."""
    again: bool = False
    """Read the split another time; the record counts it."""
    report: Path | None = None
    """Also write a page with rank curves, similarities, best and worst queries."""
    batch_size: int = 100
    workers: int = 2
    draws: int = 1000
    """Draws of images for the intervals."""

    def __call__(self, console: Console) -> None:
        from ermoe.retrieval.evaluation import evaluate
        from ermoe.retrieval.report import write_report

        if self.report is not None and self.report.is_dir():
            raise UserError(f"--report {self.report} is a folder: name a file, such as {self.report / 'report.html'}")

        evaluation = evaluate(
            self.model, self.data, self.protocol, split=self.split, images=self.images, again=self.again,
            batch_size=self.batch_size, workers=self.workers, draws=self.draws,
        )  # fmt: skip
        _show(evaluation.record, console)
        if evaluation.retrieval is None:
            console.print(
                f"(read on {evaluation.record['date']}, from {evaluation.path}; --again reads the split another time)",
                highlight=False,
                soft_wrap=True,
            )
        if self.report is not None:
            console.print(f"written: {write_report(evaluation, self.report)}", highlight=False)


@dataclass(frozen=True, slots=True)
class Index:
    """Encode every image below a folder once, to search among them."""

    model: Annotated[str, _Word, tyro.conf.arg(metavar="MODEL")]
    """A run folder, a model folder, or a repository of the Hugging Face hub."""
    images: Annotated[Path, _Word, tyro.conf.arg(metavar="IMAGES")]
    """A folder of image files."""
    out: Path = Path("runs/index")
    """The folder of the index."""
    batch_size: int = 100
    workers: int = 2

    def __call__(self, console: Console) -> None:
        from ermoe.retrieval.index import build_index

        index = build_index(self.model, self.images, self.out, batch_size=self.batch_size, workers=self.workers)
        console.print(f"written: {self.out}, {len(index.files):,} images", highlight=False)


@dataclass(frozen=True, slots=True)
class Search:
    """Find images of an index by words, or by an image."""

    index: Annotated[Path, _Word, tyro.conf.arg(metavar="INDEX")]
    """What ermoe retrieve index wrote."""
    query: Annotated[str, _Word, tyro.conf.arg(metavar="QUERY")] = ""
    """What to look for; leave it out with --image."""
    image: Path | None = None
    """Look for images like this one."""
    top: int = 5
    html: Path | None = None
    """Also show what was found on a small page."""
    model: str | None = None
    """Where the model lies now, if it moved."""
    images: Path | None = None
    """Where the images lie now, if they moved."""

    def __call__(self, console: Console) -> None:
        from rich.table import Table

        from ermoe.retrieval.index import open_index, write_hits

        if bool(self.query) == (self.image is not None):
            raise UserError('say what to look for: ermoe retrieve search INDEX "a dog on a beach", or --image FILE')
        index = open_index(self.index, model=self.model, images=self.images)
        hits = (
            index.search(self.query, top=self.top)
            if self.image is None
            else index.search_like(self.image, top=self.top)
        )
        table = Table("")
        table.add_column("file", overflow="fold")
        table.add_column("cosine")
        for place, hit in enumerate(hits, 1):
            table.add_row(str(place), hit.file, f"{hit.cosine:.3f}")
        console.print(table)
        if self.html is not None:
            query = self.query or f"like {self.image}"
            console.print(f"written: {write_hits(index, query, hits, self.html)}", highlight=False, soft_wrap=True)


@dataclass(frozen=True, slots=True)
class Classify:
    """Name what images show by comparing them with class names; no training."""

    model: Annotated[str, _Word, tyro.conf.arg(metavar="MODEL")]
    """A run folder, a model folder, or a repository of the Hugging Face hub."""
    images: Annotated[tuple[str, ...], _Word, tyro.conf.arg(metavar="[IMAGE…]")] = ()
    """Image files."""
    classes: tuple[str, ...] = ()
    """Names of the classes, or one text file with a name a line; a data set brings its own."""
    data: str | None = None
    """A labelled set as for ermoe image: accuracy on its test split."""
    templates: tuple[str, ...] = ("a photo of a {}.",)
    """Sentences around a name."""
    top: int = 5
    workers: int = 2

    def __call__(self, console: Console) -> None:
        from ermoe.data.catalogue import open_images
        from ermoe.retrieval.classify import accuracy, classify
        from ermoe.retrieval.index import pictures
        from ermoe.retrieval.run import load_clip

        if self.top < 1:
            raise UserError(f"--top {self.top}: need at least 1")
        if bool(self.images) == (self.data is not None):
            raise UserError("give image files, or --data with a labelled set")
        model, names = load_clip(self.model), _names(self.classes)
        if self.data is not None:
            labelled = open_images(self.data, "test")
            chance_NC = classify(
                model, labelled, names or labelled.classes, templates=self.templates, workers=self.workers
            )
            if chance_NC.shape[1] != len(labelled.classes):
                raise UserError(
                    f"{len(names)} names for the {len(labelled.classes)} classes of {self.data}: give as many"
                )
            top1, top5 = (accuracy(chance_NC, labelled.label_N, top=top) for top in (1, 5))
            console.print(f"{labelled.found}\nzero-shot top-1 {top1:.1%}, top-5 {top5:.1%}", highlight=False)
            return
        chance_NC = classify(model, pictures(Path(), list(self.images)), names, templates=self.templates)
        for image, chance_C in zip(self.images, chance_NC, strict=True):
            value, order = chance_C.sort(descending=True, stable=True)
            ranked = zip(order[: self.top].tolist(), value[: self.top].tolist(), strict=True)
            console.print(
                f"{image}: " + ", ".join(f"{names[c]} {p:.1%}" for c, p in ranked), highlight=False, soft_wrap=True
            )


@dataclass(frozen=True, slots=True)
class Convert:
    """Make a model folder of a CLIP file from elsewhere, dense or sparse with the same outputs."""

    preset: Annotated[str, _Word, tyro.conf.arg(metavar="PRESET")]
    """As for training; openai-b16-dense or laion-b16-dense for the plain model."""
    weights: Annotated[str, _Word, tyro.conf.arg(metavar="WEIGHTS")]
    """open_clip's, OpenAI's or Hugging Face's file."""
    out: Annotated[Path, _Word, tyro.conf.arg(metavar="FOLDER")]

    def __call__(self, console: Console) -> None:
        from ermoe.models.io import save
        from ermoe.retrieval.presets import recipe

        save(recipe(self.preset).build(weights=self.weights), self.out)
        console.print(f"written: {self.out}", highlight=False)


COMMANDS: dict[str, Callable[..., Any]] = {
    "train": Train,
    "eval": Evaluate,
    "index": Index,
    "search": Search,
    "classify": Classify,
    "convert": Convert,
}


def run(argv: list[str]) -> None:
    """Entry point of the command."""
    command = tyro.extras.subcommand_cli_from_dict(
        COMMANDS,
        prog="ermoe retrieve",
        description="Train and evaluate image–text models, search images by words, classify without labels.",
        args=argv,
    )
    from rich.console import Console

    command(Console(markup=False, emoji=False))  # names of files and classes are not instructions


def _names(classes: tuple[str, ...]) -> list[str]:
    """Names as they are, or the lines of the one file that was named."""
    if len(classes) == 1 and Path(classes[0]).is_file():
        from ermoe.retrieval.captions.text_files import read_text

        return [line.strip() for line in read_text(Path(classes[0])).splitlines() if line.strip()]
    if len(classes) == 1 and classes[0].endswith(".txt"):
        raise UserError(f"{classes[0]} does not exist: name a file with a class a line, or two classes or more")
    return list(classes)


def _show(record: dict[str, Any], console: Console) -> None:
    from rich.table import Table

    from ermoe.retrieval.evaluation import table_rows

    size = f"{record['num_images']:,} images, {record['num_captions']:,} captions"
    header, rows = table_rows(record)
    table = Table(title=f"{record['protocol']}, {record['split']}: {size}")
    for place, name in enumerate(header):
        table.add_column(name, justify="right" if place else "left", no_wrap=True, min_width=0 if place else 8)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    console.print(record["found"], highlight=False, soft_wrap=True)
    if record["cut_captions"]:
        console.print(f"{record['cut_captions']:,} captions are longer than the text tower: cut", highlight=False)
    medians = f"{record['figures']['i2t_median_rank']:g} / {record['figures']['t2i_median_rank']:g}"
    console.print(
        f"median ranks {medians}; {record['tied_queries']} tied queries; training images: {record['training_images']}",
        highlight=False,
        soft_wrap=True,
    )
