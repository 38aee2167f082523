"""The study of benchmarks/retrieval_flickr8k.py: its tables and its bars."""

import importlib.util
import sys
from pathlib import Path

import torch

from ermoe.retrieval.figures import Ranks, Retrieval

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "retrieval_flickr8k.py"
spec = importlib.util.spec_from_file_location("retrieval_flickr8k", SCRIPT)
study = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look their module up
spec.loader.exec_module(study)


def record(row, seed, recall, hits=None):
    figures = {**dict.fromkeys(study.RECALLS, recall), "rsum": 600 * recall}
    test = {"figures": figures, "num_images": 40, "num_captions": 80}
    dev = [{"load_cv2": 0.25, "drop_rate": 0.125}] if row != "dense" else [{}]
    seconds = 60.0 if seed == 1 else None
    return {"name": row, "seed": seed, "figures": {"test": test, "dev": dev, "hits": hits}, "seconds": seconds}


def test_every_row_has_its_mean_and_spread_over_seeds():
    records = [record("dense", 1, 0.10), record("dense", 2, 0.12), record("ermoe", 1, 0.2)]
    lines = study.table(records).markdown().splitlines()
    assert lines[2].startswith("| dense | 2 | 11.0% ± 1.4% |")
    assert lines[2].endswith("| 66.0 ± 8.5 | – | 1.0 |")
    assert lines[3].endswith("| 120.0 | 0.250 | 1.0 |")
    assert study.towers(records).markdown().splitlines()[3].endswith("| 120.0 | 12.5% | 0.250 | 1.0 |")


def test_rows_are_compared_query_by_query():
    """Both towers find half of the images; by their captions one finds all that the other does, and a quarter more."""
    few, more = (
        found_by(range(0, 40, 2), range(0, 80, 2)),
        found_by(range(1, 40, 2), [*range(0, 80, 2), *range(1, 40, 2)]),
    )
    records = [record(row, seed, 0.5, hits) for seed in (1, 2) for row, hits in (("dense", few), ("ermoe", more))]
    (row,) = study.pairs(records).rows
    assert row[:2] == ["ERMoE over dense", "2"]
    assert row[2].startswith("+0.0 (-")
    assert row[4].startswith("+25.0 (+")
    assert row[6].startswith("+75.0 (")


def found_by(images, captions):
    ranks = [Ranks(torch.ones(n).index_fill(0, torch.tensor(list(first)), 0) * 10, torch.zeros(n), torch.zeros(n), n)
             for n, first in ((40, images), (80, captions))]  # fmt: skip
    return study.hits(Retrieval(*ranks, torch.arange(40).repeat_interleave(2)))


def test_the_bar_is_of_the_mean_of_the_dense_runs():
    dense = [record("dense", 1, 0.1), record("dense", 2, 0.07)]
    assert study.verdict(dense, 0.08).startswith("held")
    assert study.verdict(dense, 0.09).startswith("MISSED")
    assert "7.0% in the worst run" in study.verdict(dense, 0.08)
    assert study.verdict([record("ermoe", 1, 0.1)], 0.08) == "no dense run yet"
