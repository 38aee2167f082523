"""Dense, V-MoE and ERMoE image towers on Flickr8k, from scratch or from a pretrained ViT.

    python benchmarks/retrieval_flickr8k.py FOLDER [--weights FILE] [--seeds 1 2 3] [--threads 2]

FOLDER holds Flickr8k's images, Flickr8k.token.txt and the split lists; images are used at 96 pixels. Every row has the
same towers, data order, epochs and recipe: preset ``small``, or ``deit-tiny`` where FILE holds deit_tiny_patch16_224's
weights, from which all image towers start. Dev chooses the epoch; test is read once, at the end, and the record keeps
which queries found their answer, so that rows are compared in pairs. A queue that resumes: a line a run in
benchmarks/results/flickr8k.jsonl or flickr8k_deit.jsonl.

The last two rows are the supplement's question: an ERMoE tower is trained against the text tower of the dense run with
the same seed, which stays frozen, or learns on.

Letters: S seeds, I images, B draws.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import tyro
from numpy.typing import NDArray
from rich.console import Console

from ermoe.retrieval.evaluation import evaluate
from ermoe.retrieval.figures import CUTS, RECALLS, Retrieval
from ermoe.retrieval.run import train
from ermoe.studies.record import Job, Record, run_queue
from ermoe.studies.tables import Show, Table, one_row_a_name, spread
from ermoe.train.run_folder import read_lines

RESULTS = Path(__file__).parent / "results"
PROTOCOL = "flickr8k-1k"
# study -> (family of presets, R@10 that the dense tower must reach in both directions)
STUDIES = {"flickr8k": ("small", 0.08), "flickr8k_deit": ("deit-tiny", 0.20)}

# row -> (method, whether its text tower comes from the dense run with the same seed)
ROWS = {
    "dense": ("dense", False),
    "v-moe": ("v-moe", False),
    "ermoe": ("ermoe", False),
    "ermoe-text-frozen": ("ermoe-frozen", True),
    "ermoe-text-tuned": ("ermoe", True),
}
TOWERS = {"dense": "dense", "v-moe": "V-MoE", "ermoe": "ERMoE"}
PAIRS = (("v-moe", "dense"), ("ermoe", "dense"), ("ermoe", "v-moe"))
_DRAWS = 2000


@dataclass(frozen=True)
class Options:
    """Train every row with every seed."""

    data: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """Flickr8k."""
    weights: Path | None = None
    """Weights of deit_tiny_patch16_224, for image towers that start from them."""
    seeds: tuple[int, ...] = (1, 2, 3)
    rows: tuple[str, ...] = ()
    """Rows to run; by default all, or with weights those that learn their own text tower."""
    epochs: int | None = None
    """Other than the preset's."""
    runs: Path | None = None
    """Folder of the runs; runs/STUDY by default."""
    out: Path = RESULTS
    threads: int = 2

    @property
    def study(self) -> str:
        return "flickr8k" if self.weights is None else "flickr8k_deit"

    @property
    def chosen_rows(self) -> tuple[str, ...]:
        return self.rows or tuple(ROWS if self.weights is None else TOWERS)

    def preset(self, row: str) -> str:
        return f"{STUDIES[self.study][0]}-{ROWS[row][0]}"

    def folder(self, row: str, seed: int) -> Path:
        return (self.runs or Path("runs") / self.study) / f"{row}-{seed}"


def figures_of_run(options: Options, row: str, seed: int, console: Console) -> dict[str, Any]:
    """Trains, and reads the test split once."""
    folder = options.folder(row, seed)
    changes: dict[str, Any] = {} if options.epochs is None else {"epochs": options.epochs}
    if options.weights is not None:
        changes["weights"] = str(options.weights)
    if ROWS[row][1]:
        changes["text_from"] = str(options.folder("dense", seed))
    went_on = (folder / "checkpoints" / "last.pt").is_file()
    train(
        options.preset(row), options.data, folder, protocol=PROTOCOL, cache=True, seed=seed, console=console, **changes
    )
    test = evaluate(folder, options.data, PROTOCOL, again=True)  # a run that was stopped here is read anew, and counted
    assert test.answers is not None
    dropped = ("data", "weights", "text_from")
    return {
        "test": {name: value for name, value in test.record.items() if name not in ("model", "save")},
        "hits": hits(test.answers.retrieval),
        "dev": [line for line in read_lines(folder / "metrics.jsonl") if line["kind"] == "test"],
        "config": {k: v for k, v in json.loads((folder / "config.json").read_text()).items() if k not in dropped},
        **({"seconds": None} if went_on else {}),
    }


def hits(retrieval: Retrieval) -> dict[str, str]:
    """Which queries found a right answer among the first k, as bits: of images, and of captions in their order."""
    directions = {"i2t": retrieval.image_to_text, "t2i": retrieval.text_to_image}
    return {
        f"{direction}_r{k}": np.packbits(ranks.found_within(k).numpy()).tobytes().hex()
        for direction, ranks in directions.items()
        for k in CUTS
    }


def found(record: Record, name: str) -> NDArray[np.float64]:
    """The share of each image's queries that found an answer, (I,): its own, or those of its captions."""
    test = record["figures"]["test"]
    num_images, num_captions = test["num_images"], test["num_captions"]
    bits = np.unpackbits(np.frombuffer(bytes.fromhex(record["figures"]["hits"][name]), dtype=np.uint8))
    if name.startswith("i2t"):
        return bits[:num_images].astype(float)
    # Captions follow the order of their images, and all images have equally many.
    return np.asarray(bits[:num_captions].reshape(num_images, -1).mean(1))


def table(records: Sequence[Record]) -> Table:
    """Test recalls, mean ± standard deviation over seeds, one line a row."""
    return one_row_a_name(records, "row", _recalls(".1%") | _costs())


def towers(records: Sequence[Record]) -> Table:
    """The same of towers that started from one ViT, with the pairs that found their expert full."""
    dropped: dict[str, Show] = {"dropped pairs": lambda runs: _mean(_on_dev(runs, "drop_rate"), ".1%")}
    return one_row_a_name(records, "image tower", _recalls(".1%") | dropped | _costs(), TOWERS)


def _recalls(style: str) -> dict[str, Show]:
    recalls: dict[str, Show] = {
        f"{name[:3].upper()} R@{name[5:]}": spread("test", "figures", name, style=style) for name in RECALLS
    }
    return {**recalls, "RSUM": spread("test", "figures", "rsum", style=".1f")}


def _costs() -> dict[str, Show]:
    return {
        "load CV²": lambda runs: _mean(_on_dev(runs, "load_cv2"), ".3f"),
        "minutes": lambda runs: _mean([run["seconds"] and run["seconds"] / 60 for run in runs], ".1f"),
    }


def _on_dev(runs: Sequence[Record], name: str) -> list[float | None]:
    return [run["figures"]["dev"][-1].get(name) for run in runs]


def _mean(values: list[float | None], style: str) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.fmean(known):{style}}" if known else "–"


def pairs(records: Sequence[Record]) -> Table:
    """How far one tower is above another, query by query, in points with 95 % intervals over images and seeds."""
    columns = {"I2T R@1": ["i2t_r1"], "I2T R@10": ["i2t_r10"], "T2I R@1": ["t2i_r1"], "T2I R@10": ["t2i_r10"]}
    columns["RSUM"] = list(RECALLS)
    rows = []
    for one, other in PAIRS:
        own, theirs = ({run["seed"]: run for run in records if run["name"] == name} for name in (one, other))
        if seeds := sorted(own.keys() & theirs.keys()):
            cells = []
            for names in columns.values():
                apart_SI = [sum(found(own[s], name) - found(theirs[s], name) for name in names) for s in seeds]
                cells.append(difference(np.asarray(apart_SI)))
            rows.append([f"{TOWERS[one]} over {TOWERS[other]}", str(len(seeds)), *cells])
    return Table(["", "seeds", *columns], rows)


def difference(apart_SI: NDArray[np.float64]) -> str:
    """The mean difference in points with its 95 % interval: seeds and images are both drawn with replacement.

    >>> difference(np.ones((3, 4)) / 4)
    '+25.0 (+25.0 … +25.0)'
    """
    random = np.random.default_rng(0)
    num_seeds, num_images = apart_SI.shape
    weight_BS = random.multinomial(num_seeds, [1 / num_seeds] * num_seeds, _DRAWS) / num_seeds
    weight_BI = random.multinomial(num_images, [1 / num_images] * num_images, _DRAWS) / num_images
    low, high = np.quantile((weight_BS @ apart_SI * weight_BI).sum(1), (0.025, 0.975))
    return f"{100 * apart_SI.mean():+.1f} ({100 * low:+.1f} … {100 * high:+.1f})"


def verdict(records: Sequence[Record], bar: float) -> str:
    """Whether the dense tower clears the bar in both directions, in the mean over seeds, and how its worst run does."""
    dense = [record["figures"]["test"]["figures"] for record in records if record["name"] == "dense"]
    if not dense:
        return "no dense run yet"
    recalls = [[figures[name] for figures in dense] for name in ("i2t_r10", "t2i_r10")]
    means = [statistics.fmean(own) for own in recalls]
    word = "held" if min(means) >= bar else "MISSED"
    return (
        f"{word}: R@10 of the dense tower is {means[0]:.1%} (I2T) and {means[1]:.1%} (T2I) in the mean of {len(dense)} "
        f"seeds, {min(map(min, recalls)):.1%} in the worst run and direction (bar: {bar:.0%})"
    )


def main(options: Options) -> None:
    torch.set_num_threads(options.threads)
    console = Console()
    jobs = [
        Job(row, seed, partial(figures_of_run, options, row, seed, console), {"preset": options.preset(row)})
        for seed in options.seeds
        for row in options.chosen_rows
    ]
    records = run_queue(options.study, jobs, options.out / f"{options.study}.jsonl", console=console)
    shown = [table(records)] if options.weights is None else [towers(records), pairs(records)]
    words = [*(own.markdown() for own in shown), verdict(records, STUDIES[options.study][1])]
    console.print(*words, sep="\n\n", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
