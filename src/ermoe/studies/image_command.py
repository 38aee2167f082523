"""``ermoe image study``: several presets with several seeds, compared."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, slots=True)
class Study:
    """Train several presets with several seeds, one JSON a run; what is there already is not run again.

    Then a few dozen training steps of all presets are timed in turns (steps.json), if a dense one is among them.
    """

    presets: Annotated[tuple[str, ...], tyro.conf.Positional]
    """Presets, for example cifar-ermoe cifar-v-moe cifar-dense."""
    data: Path = Path("cifar-10-batches-bin")
    """The data set of all of them."""
    seeds: tuple[int, ...] = (1, 2, 3)
    out: Path = Path("runs/study")
    """Folder for the JSON files, the table (table.md) and the run folders."""
    epochs: int | None = None
    """Other than the presets'."""
    threads: int = 2

    def __call__(self, console: Console) -> None:
        from ermoe.files import replacing
        from ermoe.studies.bench import study
        from ermoe.studies.bench.study_steps import steps_of

        asked = study.Study(self.presets, self.data, self.seeds, self.out, threads=self.threads, epochs=self.epochs)
        records = study.run_queue(asked, console=console)
        shown = study.table(records, steps_of(asked))
        console.print(shown, highlight=False, soft_wrap=True)
        with replacing(self.out / "table.md") as draft:
            draft.write_text(shown + "\n", encoding="utf-8")
        console.print(f"written: {self.out}", highlight=False, soft_wrap=True)
