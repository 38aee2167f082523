"""What a benchmark leaves behind: a table to read, a JSON to trust, a plot to look at."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ermoe.files import replacing
from ermoe.studies.bench.clock import Measurement


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

    def as_json(self) -> dict[str, Any]:
        """Everything, with machine, versions, commit and command."""
        return {
            "benchmark": self.name,
            "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
            "commit": commit(),
            "machine": machine(),
            "versions": versions(),
            "settings": self.settings,
            "reference": self.reference,
            "tables": {name: [asdict(row) for row in rows] for name, rows in self.tables.items()},
            "figures": self.figures,
            "bars": [{**asdict(bar), "holds": bar.holds} for bar in self.bars],
        }


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        cpu = names[0] if names else cpu
    return {"cpu": cpu, "cores": os.cpu_count(), "system": platform.system(), "python": platform.python_version()}


def versions() -> dict[str, str]:
    """Versions of everything that takes part."""
    found = {}
    for package in ("ermoe", "torch", "timm", "transformers", "st-moe-pytorch", "soft-moe-pytorch"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """The commit of the checkout this code runs from, with "+" for uncommitted changes; "" outside a checkout."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run(
            [*git, "status", "--porcelain", "--", ":/src"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")


def show(result: Result, console: Console) -> None:
    """Prints the tables, the figures and the bars."""
    for name, rows in result.tables.items():
        table = Table(title=name, caption=f"ratios to {result.reference}: median and quartiles over rounds")
        for column in ("candidate", "ratio", "quartiles", "ms"):
            table.add_column(column, justify="left" if column == "candidate" else "right")
        for row in sorted(rows, key=lambda row: row.ratio):
            quartiles = f"{row.ratio_low:.3f} – {row.ratio_high:.3f}"
            table.add_row(row.name, f"{row.ratio:.3f}", quartiles, f"{1e3 * row.seconds:.1f}")
        console.print(table)
    for name, value in result.figures.items():
        console.print(f"{name}: {value:.3f}")
    for bar in result.bars:
        console.print(f"{'held  ' if bar.holds else 'MISSED'} {bar.name}: {bar.value:.3f} (at most {bar.limit:g})")


def save(result: Result, folder: Path) -> Path:
    """Writes ``NAME.json`` and, where there are tables, ``NAME.svg``; returns the JSON's path."""
    path = folder / f"{result.name}.json"
    with replacing(path) as draft:
        draft.write_text(json.dumps(result.as_json(), indent=1, ensure_ascii=False) + "\n")
    if result.tables:
        _plot(result, path.with_suffix(".svg"))
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
