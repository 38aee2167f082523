"""``ermoe inspect``: see how the experts of one or more models are used, in one HTML file."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from ermoe.console import Terminal, parse_command, say
from ermoe.errors import UserError
from ermoe.train.settings import Machine


@dataclass(frozen=True, slots=True)
class Settings:
    """How closely to look."""

    pictures: int = 12
    """Images shown with coloured patches."""
    k_images: int = 128
    """Images on which accuracy is measured with 1, 2, 3, 4 and 6 experts a token; 0 for none."""
    batch_size: int = 100
    """Images at a time."""
    workers: Annotated[int, tyro.conf.Suppress] = 0
    """Processes that read images ahead."""

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.pictures < 1 or self.k_images < 0 or self.workers < 0:
            raise UserError("batch_size and pictures must be at least 1, k_images and workers at least 0")


@dataclass(frozen=True, slots=True)
class Inspect:
    """Look into the routing of image classifiers and write one self-contained report.html.

    Shown are load, images with patches coloured by expert and a slider through the layers, class–expert maps, scores,
    fallback against T, tail mass and accuracy against k, the experts' subspaces, orthonormality, and how routing
    changed over a run's epochs. Several models are put side by side. Plots also go to OUT/figures as PNG, SVG and CSV.
    """

    models: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="MODEL…")]
    """Run folders, model folders, or repositories of the Hugging Face hub."""
    data: str
    """Images to route (their test split): a folder in any of the layouts of docs/data.md, or a name: digits,
    fashion-mnist."""
    out: Path = Path("runs/inspect")
    """Folder for report.html and figures; an older report in it is replaced."""
    settings: Settings = field(default_factory=Settings)
    machine: Machine = field(default_factory=Machine)

    def __call__(self, console: Console) -> None:
        from ermoe.explorer.inspect import inspect

        settings = replace(self.settings, workers=self.machine.workers)
        with self.machine.started(console) as compute:
            path = inspect(self.models, self.data, self.out, settings=settings, device=compute.device, console=console)
        say(console, f"written: {path}")


def run(argv: list[str]) -> None:
    """Entry point of the command."""
    parse_command(Inspect, argv, prog="ermoe inspect")(Terminal())
