"""``ermoe inspect``: see how the experts of one or more models are used, in one HTML file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro


@dataclass(frozen=True, slots=True)
class Options:
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
    pictures: int = 12
    """Images shown with coloured patches."""
    k_images: int = 128
    """Images on which accuracy is measured with 1, 2, 3, 4 and 6 experts a token; 0 for none."""
    batch_size: int = 100
    workers: int = 2
    """Processes that read image files ahead; sets that fit into memory need none."""
    threads: int = 0
    """CPU threads; 0 leaves that to torch."""


def run(argv: list[str]) -> None:
    """Entry point of the command."""
    options = tyro.cli(Options, prog="ermoe inspect", args=argv)
    import torch
    from rich.console import Console

    from ermoe.explore.inspect import Settings, inspect

    if options.threads:
        torch.set_num_threads(options.threads)
    console = Console()
    settings = Settings(
        batch_size=options.batch_size, workers=options.workers, pictures=options.pictures, k_images=options.k_images
    )
    report = inspect(options.models, options.data, options.out, settings=settings, console=console)
    console.print(f"written: {report}", highlight=False, soft_wrap=True)
