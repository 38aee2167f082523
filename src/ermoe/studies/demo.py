"""``ermoe demo``: one small ViT on handwritten digits, dense and sparse, and a report to look at.

All four start from the same weights and see the same batches; see the presets ``digits-…``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ermoe.console import say
from ermoe.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from ermoe.studies.bench.measure import Measurement
    from ermoe.studies.record import Record

MODELS = {
    "dense": "digits-dense",
    "learned gate": "digits-gate",
    "V-MoE": "digits-v-moe",
    "ERMoE": "digits-ermoe",
}
"""Name → preset."""
HEADER = ("model", "accuracy", "load CV²", "fallback", "parameters", "active", "step time")


@dataclass(frozen=True, slots=True)
class Demo:
    """Train dense and sparse versions of one small ViT on handwritten digits, and see how they route.

    The digits come with scikit-learn, so nothing is downloaded. Prints a table of what they reached on held-out digits
    and writes a report to look at. What was trained already is not trained again.
    """

    epochs: int = 20
    """Passes over the 1,198 training digits."""
    seed: int = 0
    """Of initial weights and the order of the digits."""
    out: Path = Path("runs/demo")
    """Folder for report.html; an older report in it is replaced."""
    picture: Path | None = None
    """Also write the picture of the README to this PNG file."""
    threads: int = 1
    """CPU threads; products this small do not repay a second one."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "cpu"
    """auto is the accelerator if there is one; models this small are quickest on a CPU."""

    def __post_init__(self) -> None:
        if self.epochs < 1:
            raise UserError(f"--epochs {self.epochs}: train for at least one epoch")

    def __call__(self, console: Console) -> None:
        from ermoe.explore.inspect import inspect
        from ermoe.studies.comparison import run_comparison, step_times
        from ermoe.studies.image_command import Comparison
        from ermoe.studies.tables import Table
        from ermoe.train.compute import device_named

        say(console, f"Training {', '.join(MODELS)} on the digits of scikit-learn, {self.epochs} epochs.")
        trained = self.out / f"{self.epochs}-epochs"
        asked = Comparison(
            tuple(MODELS.values()),
            Path("digits"),
            (self.seed,),
            trained,
            epochs=self.epochs,
            threads=self.threads,
            device=self.device,
        )
        records = run_comparison(asked, console=console)
        made = rows(records, step_times(asked), trained / "runs", self.seed)
        console.print(Table(HEADER, made).terminal(bold="ERMoE"))
        say(console, _noise_note(records[0]["figures"]["top1"]))
        runs = {name: trained / "runs" / f"{preset}-{self.seed}" for name, preset in MODELS.items()}
        sparse = [str(folder) for name, folder in runs.items() if name != "dense"]
        page = inspect(sparse, "digits", self.out, device=device_named(self.device), console=console)
        say(console, f"report: {page}")
        if self.picture is not None:
            from ermoe.studies.demo_picture import write_picture

            say(console, f"picture: {write_picture(runs, self.picture)}")


def rows(records: list[Record], steps: dict[str, Measurement], runs: Path, seed: int) -> list[list[str]]:
    """The table: held-out accuracy, routing over both layers, size, and a training step beside the dense one."""
    from ermoe.analysis.summary import MEASURES
    from ermoe.models.count import count
    from ermoe.models.io import weightless

    made = []
    for (name, preset), record in zip(MODELS.items(), records, strict=True):
        figures, size = record["figures"], count(weightless(runs / f"{preset}-{seed}" / "model"))
        routing = [MEASURES[measure].text(figures.get(measure, math.nan)) for measure in ("load_cv2", "fallback_rate")]
        sizes = [f"{number / 1e3:,.0f} k" for number in (size.total_parameters, size.active_parameters)]
        made.append([name, f"{figures['top1']:.1%}", *routing, *sizes, f"{steps[preset].ratio:.2f} ×"])
    return made


def _noise_note(accuracy: float) -> str:
    """How large a difference in accuracy has to be before it means something."""
    from ermoe.data.images import digits

    num_test = len(digits()[1])
    error = math.sqrt(accuracy * (1 - accuracy) / num_test)
    return (
        f"With {num_test} held-out digits and one seed, accuracies less than about {300 * error:.1f} points apart are "
        "equal."
    )
