"""``ermoe retrieve``: train and evaluate CLIPs with sparse image towers, search with them, classify without labels."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from ermoe.console import Command, first_read, say
from ermoe.errors import UserError
from ermoe.retrieval.presets import ABOUT_METHODS, PRESETS, RetrievalRecipe, recipe
from ermoe.train.settings import Machine, TrainingMachine, in_words

if TYPE_CHECKING:
    from rich.console import Console

    from ermoe.train.compute import Compute

_Word = tyro.conf.Positional
_Model = Annotated[
    str,
    _Word,
    tyro.conf.arg(metavar="MODEL", help="A run folder, a model folder, or a repository of the Hugging Face hub."),
]
_Data = Annotated[
    Path,
    _Word,
    tyro.conf.arg(metavar="DATA", help="A data set's folder, a caption file, or a folder of webdataset's shards."),
]
_Protocol = Annotated[
    Literal[
        "coco-karpathy-5k", "coco-val2017-5k", "flickr30k-karpathy-1k", "flickr30k-full-31k", "flickr8k-1k", "custom"
    ],
    tyro.conf.arg(help="Which images and captions; sizes are checked."),
]
_ImageFolder = Annotated[
    Path | None, tyro.conf.arg(help="Where the images are, if not in one of the usual folders beside the captions.")
]


@dataclass(frozen=True, slots=True)
class Train:
    """Train a preset on the train split of a protocol; dev chooses the epoch, test is not opened.

    Values shown are the preset's, if one is named. Several processes: torchrun --nproc-per-node=N -m ermoe retrieve
    train, or srun.
    """

    preset: Annotated[str, _Word, tyro.conf.arg(metavar="PRESET")]
    """A name such as small-ermoe or openai-b16-dense-frozen: ermoe retrieve presets lists and describes them."""
    data: _Data
    recipe: RetrievalRecipe
    machine: TrainingMachine = field(default_factory=TrainingMachine)
    protocol: _Protocol = "custom"
    images: _ImageFolder = None
    cache: bool = False
    """Decode all images once and keep them in memory; no workers are needed then."""
    out: Path | None = None
    """The run folder; runs/retrieve-PRESET-SEED by default."""

    @classmethod
    def suited(cls, argv: list[str], preset: str | None = None) -> Train:
        """With the values of the preset that is named, here or in a file, or of small-ermoe."""
        usual = cls(preset or "small-ermoe", Path(), recipe(preset or "small-ermoe"))
        named = first_read(usual, argv).preset
        return cls(preset or tyro.MISSING, tyro.MISSING, recipe(named) if named in PRESETS else usual.recipe)

    def __call__(self, console: Console) -> None:
        if self.preset != self.recipe.preset:
            recipe(self.preset)  # says which there are
            raise UserError(f"{self.preset} would be trained with the values of {self.recipe.preset}: name it first")
        from ermoe.retrieval.run import train

        folder = self.out or Path("runs") / f"retrieve-{self.preset}-{self.recipe.training.seed}"
        where: dict[str, Any] = {"protocol": self.protocol, "images": self.images, "cache": self.cache}
        with self.machine.started(console) as compute:
            figures = train(self.recipe, self.data, folder, compute=compute, resume=self.machine.resume, **where)
            compute.say("dev: " + "  ".join(f"{name} {value:.4g}" for name, value in figures.items()))
            compute.say(f"written: {folder}")


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Recall in both directions under a named protocol. A pool with training images is refused; test is read once."""

    model: _Model
    data: _Data
    machine: Machine = field(default_factory=Machine)
    protocol: _Protocol = "custom"
    split: Literal["test", "dev", "all"] = "test"
    """"all" takes every image of a custom set."""
    images: _ImageFolder = None
    again: bool = False
    """Read the split another time; the record counts it."""
    report: Path | None = None
    """Also write an HTML page with rank curves, similarities, best and worst queries to this file."""
    batch_size: int = 100
    """Images at a time."""
    draws: int = 1000
    """Draws of images for the intervals."""

    def __call__(self, console: Console) -> None:
        if self.report is not None and self.report.is_dir():
            raise UserError(f"--report {self.report} is a folder: name a file, such as {self.report / 'report.html'}")
        from ermoe.retrieval.evaluation import evaluate
        from ermoe.retrieval.report import write_report

        with self.machine.started(console) as compute:
            evaluation = evaluate(
                self.model, self.data, self.protocol, split=self.split, images=self.images, again=self.again,
                batch_size=self.batch_size, draws=self.draws, compute=compute,
            )  # fmt: skip
        if not compute.group.is_main:
            return
        _show(evaluation.record, console)
        if evaluation.answers is None:
            date = evaluation.record["date"]
            say(console, f"(read on {date}, from {evaluation.path}; --again reads the split another time)")
        if self.report is not None:
            say(console, f"written: {write_report(evaluation, self.report)}")


@dataclass(frozen=True, slots=True)
class BuildIndex:
    """Encode every image below a folder once, to search among them."""

    model: _Model
    images: Annotated[Path, _Word, tyro.conf.arg(metavar="DATA")]
    """A folder of image files."""
    machine: Machine = field(default_factory=Machine)
    out: Path = Path("runs/index")
    """The folder of the index."""
    batch_size: int = 100
    """Images at a time."""

    def __call__(self, console: Console) -> None:
        from ermoe.retrieval.index import build_index

        with self.machine.started(console) as compute:
            index = build_index(self.model, self.images, self.out, batch_size=self.batch_size, compute=compute)
            compute.say(f"written: {self.out}, {len(index.files):,} images")


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
    """Images shown."""
    report: Path | None = None
    """Also write a small HTML page with what was found to this file."""
    model: str | None = None
    """Where the model lies now, if it moved."""
    images: Path | None = None
    """Where the images lie now, if they moved."""
    machine: Machine = field(default_factory=lambda: Machine(workers=0))

    def __call__(self, console: Console) -> None:
        if bool(self.query) == (self.image is not None):
            raise UserError('say what to look for: ermoe retrieve search INDEX "a dog on a beach", or --image FILE')
        from rich.table import Table

        from ermoe.retrieval.index import open_index, write_hits

        with self.machine.started(console) as compute:
            index = open_index(self.index, model=self.model, images=self.images, device=compute.device)
            hits = index.search_like(self.image, top=self.top) if self.image else index.search(self.query, top=self.top)
        table = Table("")
        table.add_column("file", overflow="fold")
        table.add_column("cosine")
        for place, hit in enumerate(hits, 1):
            table.add_row(str(place), hit.file, f"{hit.cosine:.3f}")
        console.print(table, markup=False, emoji=False)
        if self.report is not None:
            query = self.query or f"like {self.image}"
            say(console, f"written: {write_hits(index, query, hits, self.report)}")


@dataclass(frozen=True, slots=True)
class Predict:
    """Name what images show by comparing them with class names; no training.

    Give image files, or --data with a labelled set for the accuracy on it.
    """

    model: _Model
    images: Annotated[tuple[str, ...], _Word, tyro.conf.arg(metavar="[IMAGE…]")] = ()
    """Image files."""
    machine: Machine = field(default_factory=Machine)
    classes: tuple[str, ...] = ()
    """Names of the classes, or one text file with a name a line; a data set brings its own."""
    data: str | None = None
    """A labelled set as for ermoe image: accuracy on its test split."""
    templates: tuple[str, ...] = ("a photo of a {}.",)
    """Sentences around a name."""
    top: int = 5
    """Classes shown of each image."""

    def __call__(self, console: Console) -> None:
        if self.top < 1:
            raise UserError(f"--top {self.top}: need at least 1")
        if bool(self.images) == (self.data is not None):
            raise UserError("give image files, or --data with a labelled set")
        from ermoe.retrieval.predicting import predict

        names = _names(self.classes)
        with self.machine.started(console) as compute:
            if self.data is not None:
                self._accuracy(self.data, names, compute)
                return
            found = predict(self.model, self.images, names, templates=self.templates, top=self.top, compute=compute)
            for seen in found:
                ranked = zip(seen.classes, seen.probabilities, strict=True)
                compute.say(f"{seen.image}: " + ", ".join(f"{name} {chance:.1%}" for name, chance in ranked))

    def _accuracy(self, data: str, names: list[str], compute: Compute) -> None:
        from timm.utils import accuracy

        from ermoe.data.images import open_images
        from ermoe.retrieval.build import load_clip
        from ermoe.retrieval.encode import classify

        images = open_images(data, "test")
        names = names or images.classes
        if len(names) != len(images.classes):
            raise UserError(f"{len(names)} names for the {len(images.classes)} classes of {data}: give as many")
        model = load_clip(self.model, device=compute.device)
        chance_NC = classify(model, images, names, templates=self.templates, compute=compute)
        top1, top5 = accuracy(chance_NC, images.label_N, topk=(1, 5))
        compute.say(f"{images.summary}\nzero-shot top-1 {top1:.1f}%, top-5 {top5:.1f}%")


@dataclass(frozen=True, slots=True)
class Convert:
    """Make a model folder of a CLIP file from elsewhere, dense or sparse with the same outputs."""

    preset: Annotated[str, _Word, tyro.conf.arg(metavar="PRESET")]
    """As for training; openai-b16-dense or laion-b16-dense for the plain model."""
    weights: Annotated[str, _Word, tyro.conf.arg(metavar="WEIGHTS")]
    """open_clip's, OpenAI's or Hugging Face's file."""
    out: Path = Path("runs/clip")
    """The model folder."""

    def __call__(self, console: Console) -> None:
        chosen = recipe(self.preset)
        if chosen.weights_of != "clip":
            raise UserError(f"{self.preset} brings no text tower from a file: train it with ermoe retrieve train")
        from ermoe.models.io import save

        save(chosen.build(weights=self.weights), self.out)
        say(console, f"written: {self.out}")


@dataclass(frozen=True, slots=True)
class Presets:
    """What can be trained by name: towers, methods and their training."""

    def __call__(self, console: Console) -> None:
        say(console, in_words(PRESETS, ABOUT_METHODS, "ermoe retrieve train"))


COMMANDS: dict[str, type[Command]] = {
    "presets": Presets,
    "train": Train,
    "evaluate": Evaluate,
    "index": BuildIndex,
    "search": Search,
    "predict": Predict,
    "convert": Convert,
}


def _names(classes: tuple[str, ...]) -> list[str]:
    """Names as they are, or the lines of the one file that was named."""
    if len(classes) == 1 and Path(classes[0]).is_file():
        from ermoe.files import read_text

        return [line.strip() for line in read_text(classes[0]).splitlines() if line.strip()]
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
    say(console, record["found"])
    if record["cut_captions"]:
        say(console, f"{record['cut_captions']:,} captions are longer than the text tower: cut")
    medians = f"{record['figures']['i2t_median_rank']:g} / {record['figures']['t2i_median_rank']:g}"
    ties = f"{record['tied_queries']} tied queries"
    say(console, f"median ranks {medians}; {ties}; training images: {record['training_images']}")
