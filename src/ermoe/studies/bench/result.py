"""What a benchmark leaves behind: a table to read, a record to trust, a plot to look at."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from ermoe.files import replacing
from ermoe.studies.bench.measure import Measurement
from ermoe.studies.record import Record, add_records, new_record
from ermoe.studies.tables import Table


@dataclass(frozen=True, slots=True)
class Bar:
    """A promise: ``value`` must not exceed ``limit``."""

    name: str
    value: float
    limit: float

    @property
    def holds(self) -> bool:
        """Whether the promise is kept."""
        return self.value <= self.limit


@dataclass(slots=True)
class Result:
    """All tables and bars of one benchmark."""

    name: str
    settings: dict[str, Any]
    reference: str
    tables: dict[str, list[Measurement]] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)
    bars: list[Bar] = field(default_factory=list)

    def ratio(self, table: str, candidate: str, to: str | None = None) -> float:
        """Median ratio of a candidate to the reference, or to another candidate of the same table."""
        rows = {row.name: row.ratio for row in self.tables[table]}
        return rows[candidate] / (1.0 if to is None else rows[to])

    def as_record(self) -> Record:
        """Everything, with machine, versions, commit and command."""
        figures = {
            "tables": {name: [asdict(row) for row in rows] for name, rows in self.tables.items()},
            "figures": self.figures,
            "bars": [{**asdict(bar), "holds": bar.holds} for bar in self.bars],
        }
        return new_record("bench", self.name, settings={**self.settings, "reference": self.reference}, figures=figures)


def show(result: Result, console: Console) -> None:
    """Prints the tables, the figures and the bars."""
    for name, rows in result.tables.items():
        cells = [
            [row.name, f"{row.ratio:.3f}", f"{row.ratio_low:.3f} – {row.ratio_high:.3f}", f"{1e3 * row.seconds:.1f}"]
            for row in sorted(rows, key=lambda row: row.ratio)
        ]
        console.print(f"{name}, ratios to {result.reference}: median and quartiles over rounds", highlight=False)
        console.print(Table(["candidate", "ratio", "quartiles", "ms"], cells).terminal())
    for name, value in result.figures.items():
        console.print(f"{name}: {value:.3f}")
    for bar in result.bars:
        console.print(f"{'held  ' if bar.holds else 'MISSED'} {bar.name}: {bar.value:.3f} (at most {bar.limit:g})")


def save(result: Result, folder: Path) -> Path:
    """Adds a line to ``bench.jsonl``, whose path it returns, and draws ``NAME.svg`` where there are tables."""
    path = folder / "bench.jsonl"
    add_records(path, result.as_record())
    if result.tables:
        _plot(result, folder / f"{result.name}.svg")
    return path


def _plot(result: Result, path: Path) -> None:
    from matplotlib.figure import Figure

    count = len(result.tables)
    rows = max(len(rows) for rows in result.tables.values())
    figure = Figure(figsize=(8, count * (0.9 + 0.28 * rows)), layout="constrained")
    for axes, (name, table) in zip(figure.subplots(count, 1, squeeze=False)[:, 0], result.tables.items(), strict=True):
        ordered = sorted(table, key=lambda row: -row.ratio)
        ratios = [row.ratio for row in ordered]
        spread = [[r.ratio - r.ratio_low for r in ordered], [r.ratio_high - r.ratio for r in ordered]]
        colours = ["#c8553d" if row.name.startswith("ermoe") else "#8aa1b1" for row in ordered]
        axes.barh([row.name for row in ordered], ratios, xerr=spread, color=colours, ecolor="#444", height=0.7)
        axes.axvline(1, color="#222", linewidth=0.8, linestyle="--")
        axes.set_title(name, fontsize=10, loc="left")
        axes.set_xlabel(f"time / {result.reference}", fontsize=8)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    with replacing(path) as draft:
        figure.savefig(draft, format="svg")
