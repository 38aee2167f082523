"""What a person asks of a study: plain settings, which a command line reads without waiting for torch."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, get_args

import tyro
from rich.console import Console

from ermoe.errors import UserError

if TYPE_CHECKING:
    from ermoe.train.compute import Compute

Scale = Literal["mini", "tiny", "full"]


@dataclass(frozen=True, slots=True)
class Setup:
    """On which data, at which scale, with how many seeds, and where to."""

    data: str | None = None
    """Folder of a data set of the kind that the list names; by default what comes with the library."""
    scale: Scale = "mini"
    """mini: minutes on two cores. tiny: DeiT-Tiny from real weights, hours on two cores. full: the paper's sizes, for
    GPUs. The last two on the data you name."""
    seeds: tuple[int, ...] = (1, 2, 3)
    """Every model is trained with each of them."""
    only: Annotated[tuple[str, ...] | None, tyro.conf.arg(metavar="ROW …")] = None
    """Rows to run, by the names that records have, such as dense v-moe; by default all. The table is made once every
    row is on record."""
    pretrain: str | None = None
    """few-shot, ablation: the images that features are learned from; by default half of the classes of --data. At
    scale tiny, few-shot: unlabelled images to which experts are fitted; by default those of --data."""
    weights: str | None = None
    """tiny, full: what models start from, a file with weights of a ViT (tiny: of DeiT-Tiny), or "timm"."""
    epochs: int | None = None
    """Other than what the scale has (tiny: 4 epochs of 100 steps), for a quick try; results go to a folder of their
    own."""
    out: Path = Path("runs/paper")
    """Folder for the records, a line a run, the table and the plot."""
    work: Path = Path("runs/paper/trained")
    """Folder for trained models, which studies share."""
    threads: int = 0
    """CPU threads; 0 leaves that to torch."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """auto is the accelerator if there is one."""
    console: Annotated[Console, tyro.conf.Fixed, tyro.conf.Suppress] = field(default_factory=Console)

    def __post_init__(self) -> None:
        if self.scale not in get_args(Scale):
            raise UserError(f"--scale {self.scale}: use one of {', '.join(get_args(Scale))}")
        if not self.seeds or min(self.seeds) < 1 or len(set(self.seeds)) < len(self.seeds):
            raise UserError("--seeds: need at least one, each once and above 0, such as --seeds 1 2 3")
        if self.only == ():
            raise UserError("--only: name at least one row, such as --only dense, or leave it out for all")
        if self.epochs is not None and self.epochs < 1:
            raise UserError(f"--epochs {self.epochs}: need at least one")
        if self.is_tiny and (self.weights is None or self.data is None):
            raise UserError(
                "--scale tiny starts from real weights and learns from real images: name DeiT-Tiny's file with "
                "--weights and a folder of images with --data"
            )

    @property
    def is_full(self) -> bool:
        """Whether the paper's own sizes are asked for."""
        return self.scale == "full"

    @property
    def is_tiny(self) -> bool:
        """Whether models start from DeiT-Tiny's weights."""
        return self.scale == "tiny"

    def compute(self, *, workers: int = 0) -> Compute:
        """Where runs compute, and to whom they speak."""
        from ermoe.train.compute import Compute, Processes, device_named

        return Compute(Processes(device=device_named(self.device)), workers=workers, console=self.console)

    @property
    def in_seeds(self) -> str:
        """How many, in words."""
        return "1 seed" if len(self.seeds) == 1 else f"{len(self.seeds)} seeds"

    def trained(self, data: str) -> Path:
        """The folder of models trained at this scale on ``data``, which all studies share."""
        return self.work / f"{self.scale}-{data}{self._brief}"

    def place(self, study: str) -> Path:
        """The folder of a study: its name tells scale, data, what was learned before, and the budget."""
        after = "" if self.pretrain is None else f"-after-{slug(self.pretrain)}"
        start = "" if self.weights is None else f"-from-{slug(self.weights)}"
        return self.out / study / f"{self.scale}-{slug(self.data or 'bundled')}{after}{start}{self._brief}"

    @property
    def _brief(self) -> str:
        return "" if self.epochs is None else f"-{self.epochs}-epochs"


def slug(name: str) -> str:
    """A name as part of a file name.

    >>> slug("data/cifar-10-batches-bin/"), slug("λ = 1e-05")
    ('cifar-10-batches-bin', 'λ-1e-05')
    """
    last = name.rstrip("/").rsplit("/", 1)[-1]
    return re.sub(r"[^\w.-]+", "-", last).strip("-")
