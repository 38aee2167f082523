"""Studies: many runs, one JSON each, in a queue that can be stopped at any time and started again."""

from __future__ import annotations

import json
import shlex
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ermoe.data.augmentation import Augmentation
from ermoe.errors import UserError
from ermoe.files import replacing
from ermoe.images.presets import recipe
from ermoe.images.run import train
from ermoe.studies.bench.clock import Measurement
from ermoe.studies.bench.record import commit, machine, versions
from ermoe.train.run_folder import differences
from ermoe.train.settings import Training

COLUMNS = {
    "top1": ("accuracy", ".2%"),
    "load_cv2": ("load CV²", ".4f"),
    "weight_cv2": ("weight CV²", ".4f"),
    "fallback_rate": ("fallback", ".1%"),
    "fluctuation": ("fluctuation", ".1%"),
}

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Study:
    """Every preset with every seed on one data set; ``epochs`` is None for the presets' own."""

    presets: Sequence[str]
    data: Path
    seeds: Sequence[int]
    out: Path
    threads: int = 2
    epochs: int | None = None

    @property
    def changes(self) -> dict[str, Any]:
        """What differs from the presets."""
        return {} if self.epochs is None else {"epochs": self.epochs}

    @property
    def command(self) -> str:
        """What to type to have this study again.

        >>> Study(["digits-dense"], Path("digits"), [1, 2], Path("out"), epochs=3).command
        'ermoe image study digits-dense --data digits --seeds 1 2 --epochs 3 --threads 2 --out out'
        """
        words = ["ermoe", "image", "study", *self.presets, "--data", self.data, "--seeds", *self.seeds]
        words += [word for name, value in self.changes.items() for word in (f"--{name}", value)]
        return shlex.join(str(word) for word in [*words, "--threads", self.threads, "--out", self.out])


def run_queue(study: Study, *, console: Console | None = None) -> list[Record]:
    """Trains every preset with every seed, seeds outermost, so that an unfinished study still compares all presets.

    A run leaves ``out/PRESET-SEED.json``. Runs that have theirs are not repeated; one that was interrupted goes on. A
    JSON of a run with other settings is refused.
    """
    torch.set_num_threads(study.threads)
    runs = [replace(study, presets=[preset], seeds=[seed]) for seed in study.seeds for preset in study.presets]
    for run in runs:
        _earlier(run)  # refuses what does not belong here before the first run, which may take long
    return [_earlier(run) or _run_one(run, console) for run in runs]


def _path(run: Study) -> Path:
    return run.out / f"{run.presets[0]}-{run.seeds[0]}.json"


def _run_one(run: Study, console: Console | None) -> Record:
    (preset,), (seed,) = run.presets, run.seeds
    folder = run.out / "runs" / f"{preset}-{seed}"
    start = time.perf_counter()
    figures = train(preset, run.data, folder, seed=seed, console=console, **run.changes)
    record = {
        "preset": preset,
        "seed": seed,
        "command": run.command,
        "changes": run.changes,
        "figures": figures,
        "wall_seconds": round(time.perf_counter() - start, 1),
        "threads": run.threads,
        **circumstances(),
        "config": json.loads((folder / "config.json").read_text()),
    }
    write_record(_path(run), record)
    return record


def circumstances() -> Record:
    """What a figure may depend on beside its settings."""
    return {"commit": commit(), "machine": machine(), "versions": versions()}


def _earlier(run: Study) -> Record | None:
    """The record that is there already; refused if its settings are not the preset's with the changes asked for."""
    path = _path(run)
    if not path.is_file():
        return None
    record = read_record(path)
    chosen = recipe(run.presets[0])
    chosen = replace(chosen, training=replace(chosen.training, seed=run.seeds[0], **run.changes))
    asked = json.loads(json.dumps(asdict(chosen) | {"data set": data_name(run.data)}))
    recorded = record["config"] | {"data set": data_name(record["config"]["data"])}
    # A setting that is newer than the record then had what is its default now.
    for name, kind in (("training", Training), ("augmentation", Augmentation)):
        recorded[name] = asdict(kind()) | recorded[name]
    common = asked.keys() & recorded.keys()
    if changed := differences({name: recorded[name] for name in common}, {name: asked[name] for name in common}):
        raise UserError(
            f"{path} holds a run with other settings ({'; '.join(changed)}): choose another folder, or remove that file"
        )
    return record


def data_name(data: str | Path) -> str:
    """What stays of a data set when it is moved: the last part of its path."""
    return Path(data).resolve().name


def read_record(path: Path) -> Record:
    """What `write_record` wrote."""
    try:
        record: Record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as problem:
        raise UserError(f"{path} is damaged: remove it, and its run is repeated") from problem
    return record


def write_record(path: Path, record: Record) -> None:
    """As JSON, in one step."""
    with replacing(path) as draft:
        draft.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def table(records: Sequence[Record], steps: Mapping[str, Measurement] | None = None) -> str:
    """One row a preset, in Markdown: mean ± standard deviation over seeds, and median (quartiles) of step times.

    >>> print(table([{"preset": "a", "seed": 1, "figures": {"top1": 0.5}}]))
    | preset | seeds | accuracy |
    | :-- | --: | --: |
    | a | 1 | 50.00% |
    """
    shown = [name for name in COLUMNS if any(name in record["figures"] for record in records)]
    titles = [COLUMNS[name][0] for name in shown] + (["step / dense"] if steps else [])
    lines = ["| " + " | ".join(["preset", "seeds", *titles]) + " |", "| :-- |" + " --: |" * (1 + len(titles))]
    for preset in dict.fromkeys(record["preset"] for record in records):
        own = [record["figures"] for record in records if record["preset"] == preset]
        cells = [_cell([f[name] for f in own if name in f], COLUMNS[name][1]) for name in shown]
        cells += [_ratio(steps.get(preset))] if steps else []
        lines.append("| " + " | ".join([preset, str(len(own)), *cells]) + " |")
    return "\n".join(lines)


def _cell(values: list[float], style: str) -> str:
    if not values:
        return "–"
    spread = f" ± {statistics.stdev(values):{style}}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):{style}}{spread}"


def _ratio(step: Measurement | None) -> str:
    return "–" if step is None else f"{step.ratio:.2f} ({step.ratio_low:.2f}–{step.ratio_high:.2f})"
