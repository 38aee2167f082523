"""Dense, V-MoE and ERMoE image towers on Flickr8k from scratch, and a frozen against a tuned text tower.

    python benchmarks/retrieval_flickr8k.py FOLDER [--seeds 1 2 3] [--threads 2]

FOLDER holds Flickr8k's images, Flickr8k.token.txt and the split lists; images are used at 96 pixels. Every row has the
same towers, data order, epochs and recipe (preset ``small``). Dev chooses the epoch; test is read once, at the end. A
queue that resumes: one JSON a run in benchmarks/results/flickr8k, and runs that have one are not repeated.

The last two rows are the supplement's question: an ERMoE tower is trained against the text tower of the dense run with
the same seed, which stays frozen, or learns on.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from rich.console import Console

from ermoe.files import replacing
from ermoe.retrieval.evaluation import evaluate
from ermoe.retrieval.figures import RECALLS
from ermoe.retrieval.run import train
from ermoe.studies.record import commit, machine, versions
from ermoe.train.run_folder import read_lines

RESULTS = Path(__file__).parent / "results" / "flickr8k"
PROTOCOL = "flickr8k-1k"
BAR = 8  # the dense tower must find eight times as much as a random order

# row -> (preset, whether its text tower comes from the dense run with the same seed)
ROWS = {
    "dense": ("small-dense", False),
    "v-moe": ("small-v-moe", False),
    "ermoe": ("small-ermoe", False),
    "ermoe-text-frozen": ("small-ermoe-frozen", True),
    "ermoe-text-tuned": ("small-ermoe", True),
}


@dataclass(frozen=True)
class Study:
    """Train every row with every seed, one JSON a run."""

    data: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """Flickr8k."""
    seeds: tuple[int, ...] = (1, 2, 3)
    rows: tuple[str, ...] = tuple(ROWS)
    epochs: int | None = None
    """Other than the preset's."""
    runs: Path = Path("runs/flickr8k")
    """Folder of the runs."""
    out: Path = RESULTS
    threads: int = 2


def run_one(study: Study, row: str, seed: int, path: Path, console: Console) -> None:
    """Trains, reads the test split once, and writes the record."""
    preset, takes_text = ROWS[row]
    folder = study.runs / f"{row}-{seed}"
    changes = {} if study.epochs is None else {"epochs": study.epochs}
    text_from = str(study.runs / f"dense-{seed}") if takes_text else None
    was_begun = (folder / "checkpoints" / "last.pt").is_file()
    start = time.perf_counter()
    train(
        preset, study.data, folder, protocol=PROTOCOL, cache=True, text_from=text_from, seed=seed, console=console,
        **changes,
    )  # fmt: skip
    seconds = time.perf_counter() - start
    test = evaluate(folder, study.data, PROTOCOL).record
    lines = read_lines(folder / "metrics.jsonl")
    record = {
        "row": row,
        "seed": seed,
        "command": f"python benchmarks/retrieval_flickr8k.py FOLDER --rows {row} --seeds {seed}",
        "test": {name: value for name, value in test.items() if name not in ("model", "save")},
        "dev": [line for line in lines if line["kind"] == "test"],
        "wall_seconds": None if was_begun else round(seconds, 1),  # a run that went on has no single time
        "threads": study.threads,
        "commit": commit(),
        "machine": machine(),
        "versions": {**versions(), "open_clip_torch": version("open_clip_torch")},
        "config": {k: v for k, v in json.loads((folder / "config.json").read_text()).items() if k != "data"},
    }
    with replacing(path) as draft:
        draft.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")


def table(records: list[dict[str, Any]]) -> str:
    """Test recalls in per cent, mean ± standard deviation over seeds, one line a row, in Markdown."""
    names = [*RECALLS, "rsum"]
    lines = ["| row | seeds | I2T R@1 | R@5 | R@10 | T2I R@1 | R@5 | R@10 | RSUM | load CV² | minutes |"]
    lines.append("| :-- |" + " --: |" * 10)
    for row in dict.fromkeys(record["row"] for record in records):
        own = [record for record in records if record["row"] == row]
        cells = [_cell([_value(record, name) for record in own]) for name in names]
        load = [record["dev"][-1]["load_cv2"] for record in own if "load_cv2" in record["dev"][-1]]
        cells += [f"{statistics.fmean(load):.3f}" if load else "–"]
        seconds = [record["wall_seconds"] for record in own if record["wall_seconds"] is not None]
        cells += [f"{statistics.fmean(seconds) / 60:.1f}" if seconds else "–"]
        lines.append("| " + " | ".join([row, str(len(own)), *cells]) + " |")
    return "\n".join(lines)


def _value(record: dict[str, Any], name: str) -> float:
    value = record["test"]["figures"][name]
    return value if name == "rsum" else 100 * value


def _cell(values: list[float]) -> str:
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.1f}{spread}"


def verdict(records: list[dict[str, Any]]) -> str:
    """Whether the dense tower clears the bar in both directions, in the mean over seeds, and how its worst run does."""
    dense = [record["test"] for record in records if record["row"] == "dense"]
    if not dense:
        return "no dense run yet"
    times = [[test["figures"][name] / test["chance"][name] for test in dense] for name in ("i2t_r10", "t2i_r10")]
    means = [statistics.fmean(own) for own in times]
    word = "held" if min(means) >= BAR else "MISSED"
    return (
        f"{word}: R@10 of the dense tower is {means[0]:.1f} (I2T) and {means[1]:.1f} (T2I) times chance in the mean of "
        f"{len(dense)} seeds, {min(map(min, times)):.1f} in the worst run and direction (bar: {BAR})"
    )


def main(study: Study) -> None:
    torch.set_num_threads(study.threads)
    console = Console()
    records = []
    for seed in study.seeds:
        for row in study.rows:
            path = study.out / f"{row}-{seed}.json"
            if not path.is_file():
                run_one(study, row, seed, path, console)
            records.append(json.loads(path.read_text()))
    console.print(table(records), verdict(records), sep="\n\n", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main(tyro.cli(Study, description=__doc__))
