"""``ermoe demo``: a ViT learns digits, becomes sparse, goes on learning beside its rivals, and is made faster."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ermoe.console import say
from ermoe.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from ermoe.studies.demo_table import Row

CONTEST = {
    "dense": "digits-dense",
    "learned gate": "digits-gate",
    "V-MoE": "digits-v-moe",
    "ERMoE": "digits-ermoe",
}
"""Name → preset of those that start from nothing."""


@dataclass(frozen=True, slots=True)
class Demo:
    """A small ViT learns handwritten digits, becomes sparse without a change, and ends faster than it was.

    The digits come with scikit-learn, so nothing is downloaded. Prints a table of what the models reached on held-out
    digits and writes a report to look at. What was computed already is not computed again.
    """

    epochs: int = 15
    """Passes over the 1,198 training digits in which the dense model learns; those that go on from it take a third."""
    from_scratch: bool = False
    """Instead, dense, a learned gate, V-MoE and ERMoE all start from random weights and learn this long."""
    seed: int = 0
    """Of initial weights and the order of the digits."""
    out: Path = Path("runs/demo")
    """Folder for report.html; an older report in it is replaced. From scratch, its subfolder from-scratch."""
    picture: Path | None = None
    """Also write the picture of the README to this PNG file."""
    threads: int = 1
    """CPU threads; products this small hardly repay a second one."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "cpu"
    """auto is the accelerator if there is one; models this small are quickest on a CPU."""

    def __post_init__(self) -> None:
        if self.epochs < 1:
            raise UserError(f"--epochs {self.epochs}: train for at least one epoch")

    def __call__(self, console: Console) -> None:
        from ermoe.explorer.inspect import inspect
        from ermoe.studies.demo_table import noise_note, table
        from ermoe.train.compute import device_named

        out = self.out / "from-scratch" if self.from_scratch else self.out
        rows = self._contest(out, console) if self.from_scratch else self._story(out, console)
        console.print(table(rows).terminal(bold="ERMoE"))
        say(console, noise_note(rows[0].accuracy))
        sparse = [str(row.place) for row in rows if row.name != "dense"]
        page = inspect(sparse, "digits", out, device=device_named(self.device), console=console)
        say(console, f"report: {page}")
        if self.picture is not None:
            from ermoe.studies.demo_picture import write_picture

            say(console, f"picture: {write_picture(rows, self.picture)}")

    def _story(self, out: Path, console: Console) -> list[Row]:
        from ermoe.studies.demo_runs import AT_ONCE, METHODS, DemoRuns

        folder = out / f"{self.epochs}-epochs" / f"seed-{self.seed}"
        runs = DemoRuns.begun(folder, self.epochs, self.seed, self.threads, self.device, console)
        num_test = len(runs.data.test)

        say(console, f"1. A dense ViT learns handwritten digits: {self.epochs} passes over {len(runs.data.train):,}.")
        say(console, f"   It names {runs.learned()['top1']:.1%} of {num_test} others.")

        say(
            console,
            "2. It becomes sparse: two of its four networks get eight small experts; a token meets one.",
        )
        parity = runs.parity()
        say(
            console,
            f"   It answers as before: scores differ by {parity.largest:.0e} at most and have a deviation of "
            f"{parity.deviation:.1f}; predictions changed: {parity.changed} of {num_test}.",
        )

        say(console, "3. Dense, V-MoE and ERMoE go on from these weights: the same steps, the same digits in each.")
        rows = [runs.went_on(name) for name in METHODS]

        say(console, "4. The dense one is slimmed: narrow experts, one a token, that learn its answers without labels.")
        rows.append(runs.slimmed())
        rows = runs.timed(rows)
        dense, slim = rows[0], rows[-1]
        assert slim.answer is not None
        say(
            console,
            f"   It takes {slim.operations / dense.operations:.2f} of the dense one's operations and "
            f"{slim.answer.ratio:.2f} of its time ({slim.answer.ratio_low:.2f} to {slim.answer.ratio_high:.2f}, "
            f"{AT_ONCE} digits at once, in turns), and says the same of {slim.agreement:.1%} of held-out digits.",
        )
        say(console, "5. Who goes where: the table, and a report with every digit's patches.")
        return rows

    def _contest(self, out: Path, console: Console) -> list[Row]:
        from ermoe.studies.comparison import run_comparison, step_times
        from ermoe.studies.demo_table import Row
        from ermoe.studies.image_command import Comparison

        say(console, f"{', '.join(CONTEST)} learn digits from nothing, {self.epochs} epochs.")
        trained = out / f"{self.epochs}-epochs"
        asked = Comparison(
            (*CONTEST.values(), "digits"),
            (self.seed,),
            trained,
            epochs=self.epochs,
            threads=self.threads,
            device=self.device,
        )
        records, steps = run_comparison(asked, console=console), step_times(asked)
        return [
            Row.of(name, trained / "runs" / f"{preset}-{self.seed}", record["figures"], step=steps[preset])
            for (name, preset), record in zip(CONTEST.items(), records, strict=True)
        ]
