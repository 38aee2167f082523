"""``ermoe inspect`` and ``ermoe explore``: see what the experts of models do, in one HTML file or hands on."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console

from ermoe.console import say
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
    """Look into the routing of models and write one self-contained report.html.

    Shown are load, images with patches coloured by expert and a slider through the layers, class–expert maps, scores,
    fallback against T, tail mass and accuracy against k, the experts' subspaces, orthonormality, and how routing
    changed over a run's epochs, and a card for every expert. Several models are put side by side. Plots also go to
    OUT/figures as PNG, SVG and CSV.
    """

    models: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="MODEL…")]
    """Run folders, model folders, or repositories of the Hugging Face hub; one index of ermoe retrieve; or one run of
    ermoe brain train."""
    data: str | None = None
    """Images to route (their test split): a folder in a layout of docs/how-to/own-images.md, or a name: digits,
    fashion-mnist. For a brain model, scans: a BIDS root, a folder or a NIfTI file. An index has its own images."""
    captions: Path | None = None
    """Captioned images, as for ermoe retrieve: their captions describe the experts of an index."""
    out: Path = Path("runs/inspect")
    """Folder for report.html and figures; an older report in it is replaced."""
    settings: Settings = field(default_factory=Settings)
    machine: Machine = field(default_factory=Machine)

    def __call__(self, console: Console) -> None:
        from ermoe.explorer.inspect import inspect

        settings = replace(self.settings, workers=self.machine.workers)
        with self.machine.started(console) as compute:
            path = inspect(
                self.models,
                self.data,
                self.out,
                captions=self.captions,
                settings=settings,
                device=compute.device,
                console=console,
            )
        say(console, f"written: {path}")


@dataclass(frozen=True, slots=True)
class Explore:
    """Play with a model in the browser: drop in photographs, see which experts take which patch and why.

    A small server on this machine and one page: patches coloured by expert, score, margin or fallback, a slider through
    the layers, scores of all experts below the pointer, other thresholds, numbers of experts and offsets at once, two
    models side by side, an expert's card. Nothing is sent to any other host. Ctrl-C ends it.
    """

    models: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="MODEL…")]
    """Run folders, model folders, or repositories of the Hugging Face hub; one index of ermoe retrieve, to search; or
    one run of ermoe brain train, to look at scans."""
    data: str | None = None
    """Images for the gallery and the cards (their test split), as for ermoe inspect, or a folder of photographs; two
    photographs by default. For a brain model, scans: a BIDS root, a folder or a NIfTI file."""
    captions: Path | None = None
    """Captioned images, as for ermoe retrieve: their captions describe the experts of an index."""
    host: str = "127.0.0.1"
    """Who can reach it: this machine alone, unless another address of it is given."""
    port: int = 8765
    """Another one is taken if it is in use."""
    browser: bool = True
    """Open the page."""
    view: str = ""
    """What to show first: the part of a link after its #."""
    card_images: int = 300
    """Images from which the experts' cards are made, while nothing else is asked for."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """auto is the accelerator if there is one."""
    threads: int = 0
    """CPU threads; 0 leaves that to torch."""

    def __post_init__(self) -> None:
        if not 0 <= self.port < 2**16 or self.card_images < 0 or self.threads < 0:
            raise UserError("port must be 0 to 65535, card_images and threads at least 0")

    def __call__(self, console: Console) -> None:
        import shlex
        import threading
        import webbrowser

        import torch

        from ermoe.explorer.explore import open_explorer
        from ermoe.explorer.serve import Served
        from ermoe.train.compute import device_named

        if self.threads:
            torch.set_num_threads(self.threads)
        words = ["ermoe", "explore", *self.models, *(["--data", self.data] if self.data else [])]
        words += ["--captions", str(self.captions)] if self.captions else []
        explorer = open_explorer(
            self.models,
            self.data,
            captions=self.captions,
            device=device_named(self.device),
            card_images=self.card_images,
            command=shlex.join(words),
        )
        served = Served(explorer, host=self.host, port=self.port)
        address = served.url + (f"#{self.view.lstrip('#')}" if self.view else "")
        say(console, f"{explorer.summary}\n\n  {address}\n\nCtrl-C ends it.")
        if self.browser:  # in a thread of its own, as browsers of the terminal stay until they are closed
            threading.Thread(target=webbrowser.open, args=[address], daemon=True).start()
        served.run()
