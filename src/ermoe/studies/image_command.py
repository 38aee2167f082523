"""``ermoe image study``: several presets with several seeds, compared."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from ermoe.console import Command, say
from ermoe.errors import UserError
from ermoe.images import commands

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, slots=True)
class Comparison:
    """Train several presets with several seeds, a line each in records.jsonl; what is there already is not run again.

    Then a few dozen training steps of all presets are timed in turns, if a dense one is among them.
    """

    presets_and_data: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="PRESET… DATA")]
    """Presets of ermoe image presets, and last the data set of all of them: cifar-ermoe cifar-dense
    cifar-10-batches-bin."""
    seeds: tuple[int, ...] = (1, 2, 3)
    """Every preset is trained with each of them."""
    out: Path = Path("runs/study")
    """Folder for the records, the table (table.md) and the run folders."""
    epochs: int | None = None
    """Passes over the data; by default as many as each preset has."""
    threads: int = 0
    """CPU threads; 0 leaves that to torch."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """auto is the accelerator if there is one."""

    def __post_init__(self) -> None:
        if len(self.presets_and_data) < 2 or not self.seeds:
            raise UserError("a study needs a preset, the data and a seed: ermoe image study PRESET… DATA --seeds 1 2 3")

    @property
    def presets(self) -> tuple[str, ...]:
        """What is compared."""
        return self.presets_and_data[:-1]

    @property
    def data(self) -> Path:
        """The data set of all of them."""
        return Path(self.presets_and_data[-1])

    def __call__(self, console: Console) -> None:
        from ermoe.files import replacing
        from ermoe.studies.comparison import run_comparison, step_times, table

        shown = table(run_comparison(self, console=console), step_times(self)).markdown()
        say(console, shown)
        with replacing(self.out / "table.md") as draft:
            draft.write_text(shown + "\n", encoding="utf-8")
        say(console, f"written: {self.out}")

    @property
    def changes(self) -> dict[str, Any]:
        """What differs from the presets."""
        return {} if self.epochs is None else {"epochs": self.epochs}


COMMANDS: dict[str, type[Command]] = {**commands.COMMANDS, "study": Comparison}
