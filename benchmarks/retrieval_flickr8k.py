"""Dense, V-MoE and ERMoE image towers on Flickr8k from scratch, and a frozen against a tuned text tower.

    python benchmarks/retrieval_flickr8k.py FOLDER [--seeds 1 2 3] [--threads 2]

FOLDER holds Flickr8k's images, Flickr8k.token.txt and the split lists; images are used at 96 pixels. Every row has the
same towers, data order, epochs and recipe (preset ``small``). Dev chooses the epoch; test is read once, at the end. A
queue that resumes: a line a run in benchmarks/results/flickr8k.jsonl.

The last two rows are the supplement's question: an ERMoE tower is trained against the text tower of the dense run with
the same seed, which stays frozen, or learns on.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from rich.console import Console

from ermoe.retrieval.evaluation import evaluate
from ermoe.retrieval.figures import RECALLS
from ermoe.retrieval.run import train
from ermoe.studies.record import Job, Record, run_queue
from ermoe.studies.tables import Show, Table, one_row_a_name, spread
from ermoe.train.run_folder import read_lines

RESULTS = Path(__file__).parent / "results"
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
class Options:
    """Train every row with every seed."""

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


def figures_of_run(options: Options, row: str, seed: int, console: Console) -> dict[str, Any]:
    """Trains, and reads the test split once."""
    preset, takes_text = ROWS[row]
    folder = options.runs / f"{row}-{seed}"
    changes = {} if options.epochs is None else {"epochs": options.epochs}
    text_from = str(options.runs / f"dense-{seed}") if takes_text else None
    went_on = (folder / "checkpoints" / "last.pt").is_file()
    train(
        preset, options.data, folder, protocol=PROTOCOL, cache=True, text_from=text_from, seed=seed, console=console,
        **changes,
    )  # fmt: skip
    test = evaluate(folder, options.data, PROTOCOL).record
    return {
        "test": {name: value for name, value in test.items() if name not in ("model", "save")},
        "dev": [line for line in read_lines(folder / "metrics.jsonl") if line["kind"] == "test"],
        "config": {k: v for k, v in json.loads((folder / "config.json").read_text()).items() if k != "data"},
        **({"seconds": None} if went_on else {}),
    }


def table(records: list[Record]) -> Table:
    """Test recalls, mean ± standard deviation over seeds, one line a row."""
    columns: dict[str, Show] = {
        f"{name[:3].upper()} R@{name[5:]}": spread("test", "figures", name, style=".1%") for name in RECALLS
    }
    columns["RSUM"] = spread("test", "figures", "rsum", style=".1f")
    columns["load CV²"] = lambda runs: _mean([run["figures"]["dev"][-1].get("load_cv2") for run in runs], ".3f")
    columns["minutes"] = lambda runs: _mean([run["seconds"] and run["seconds"] / 60 for run in runs], ".1f")
    return one_row_a_name(records, "row", columns)


def _mean(values: list[float | None], style: str) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.fmean(known):{style}}" if known else "–"


def verdict(records: list[Record]) -> str:
    """Whether the dense tower clears the bar in both directions, in the mean over seeds, and how its worst run does."""
    dense = [record["figures"]["test"] for record in records if record["name"] == "dense"]
    if not dense:
        return "no dense run yet"
    times = [[test["figures"][name] / test["chance"][name] for test in dense] for name in ("i2t_r10", "t2i_r10")]
    means = [statistics.fmean(own) for own in times]
    word = "held" if min(means) >= BAR else "MISSED"
    return (
        f"{word}: R@10 of the dense tower is {means[0]:.1f} (I2T) and {means[1]:.1f} (T2I) times chance in the mean of "
        f"{len(dense)} seeds, {min(map(min, times)):.1f} in the worst run and direction (bar: {BAR})"
    )


def main(options: Options) -> None:
    torch.set_num_threads(options.threads)
    console = Console()
    jobs = [
        Job(row, seed, partial(figures_of_run, options, row, seed, console), {"preset": ROWS[row][0]})
        for seed in options.seeds
        for row in options.rows
    ]
    records = run_queue("flickr8k", jobs, options.out / "flickr8k.jsonl", console=console)
    console.print(table(records).markdown(), verdict(records), sep="\n\n", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
