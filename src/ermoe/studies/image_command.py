"""``ermoe image study``: several presets with several seeds, compared."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from ermoe.console import say

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, slots=True)
class Comparison:
    """Train several presets with several seeds, a line each in records.jsonl; what is there already is not run again.

    Then a few dozen training steps of all presets are timed in turns, if a dense one is among them.
    """

    presets: Annotated[tuple[str, ...], tyro.conf.Positional]
    """Presets, for example cifar-ermoe cifar-v-moe cifar-dense."""
    data: Path = Path("cifar-10-batches-bin")
    """The data set of all of them."""
    seeds: tuple[int, ...] = (1, 2, 3)
    """Every preset is trained with each of them."""
    out: Path = Path("runs/study")
    """Folder for the records, the table (table.md) and the run folders."""
    epochs: int | None = None
    """Other than the presets'."""
    threads: int = 2
    """CPU threads."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """auto is the accelerator if there is one."""

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
