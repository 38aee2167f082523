"""The study of benchmarks/retrieval_flickr8k.py: its table and its bar."""

import importlib.util
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "retrieval_flickr8k.py"
spec = importlib.util.spec_from_file_location("retrieval_flickr8k", SCRIPT)
study = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look their module up
spec.loader.exec_module(study)


def record(row, seed, recall):
    figures = {**dict.fromkeys(study.RECALLS, recall), "rsum": 600 * recall}
    test = {"figures": figures, "chance": dict.fromkeys(study.RECALLS, 0.01)}
    dev = [{"load_cv2": 0.25}] if row != "dense" else [{}]
    return {"name": row, "seed": seed, "figures": {"test": test, "dev": dev}, "seconds": 60.0 if seed == 1 else None}


def test_every_row_has_its_mean_and_spread_over_seeds():
    lines = (
        study.table([record("dense", 1, 0.10), record("dense", 2, 0.12), record("ermoe", 1, 0.2)])
        .markdown()
        .splitlines()
    )
    assert lines[2].startswith("| dense | 2 | 11.0% ± 1.4% |")
    assert lines[2].endswith("| 66.0 ± 8.5 | – | 1.0 |")
    assert lines[3].endswith("| 120.0 | 0.250 | 1.0 |")


def test_the_bar_is_eight_times_chance_in_the_mean_of_the_dense_runs():
    assert study.verdict([record("dense", 1, 0.1), record("dense", 2, 0.09)]).startswith("held")
    assert study.verdict([record("dense", 1, 0.1), record("dense", 2, 0.05)]).startswith("MISSED")
    assert "7.0 in the worst run" in study.verdict([record("dense", 1, 0.1), record("dense", 2, 0.07)])
    assert study.verdict([record("ermoe", 1, 0.1)]) == "no dense run yet"
