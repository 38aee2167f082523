"""Exact ranks of all of Flickr30k, 31,783 images and 158,915 texts of width 512, in under 2 GB and without the matrix.

    python benchmarks/retrieval_ranking.py [--share 1.0] [--threads 2]

Adds a line to benchmarks/results/bench.jsonl. The vectors are random but for a common part of each image and its
texts; the memory is the peak of a process of its own, everything included: Python, torch, and the vectors themselves.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro

from ermoe.retrieval.figures import retrieve
from ermoe.studies.record import add_records, new_record

RESULTS = Path(__file__).parent / "results"
NUM_IMAGES, NUM_TEXTS, WIDTH = 31_783, 158_915, 512
LIMIT_MEGABYTES = 2000


@dataclass(frozen=True)
class Benchmark:
    """Rank everything once in both directions."""

    share: float = 1.0
    """Of the images, for a quick look; only the whole set is written down."""
    threads: int = 2
    measure: bool = False
    """Internal: measure in this process and print JSON."""


def measure(benchmark: Benchmark) -> dict[str, Any]:
    """Ranks, and the time and peak memory of it."""
    torch.set_num_threads(benchmark.threads)
    num_images = max(2, round(benchmark.share * NUM_IMAGES))
    owner_T = torch.arange(num_images).repeat_interleave(NUM_TEXTS // NUM_IMAGES)
    image_ID, text_TD = vectors(num_images, owner_T)
    start = time.perf_counter()
    both = retrieve(image_ID, text_TD, owner_T)
    seconds = time.perf_counter() - start
    return {
        "num_images": num_images,
        "num_texts": len(owner_T),
        "width": WIDTH,
        "seconds": round(seconds, 1),
        "peak_megabytes": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
        "matrix_megabytes": round(4 * num_images * len(owner_T) / 2**20, 1),
        "tied_queries": both.num_tied,
        "figures": both.figures(),
    }


def vectors(num_images: int, owner_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Unit vectors; a text is its image's vector under noise that leaves it findable, not easy."""
    generator = torch.Generator().manual_seed(0)
    image_ID = torch.nn.functional.normalize(torch.randn(num_images, WIDTH, generator=generator), dim=-1)
    text_TD = torch.randn(len(owner_T), WIDTH, generator=generator).mul_(0.25)
    for rows in torch.arange(len(owner_T)).split(8192):
        text_TD[rows] += image_ID[owner_T[rows]]
    return image_ID, text_TD.div_(text_TD.norm(dim=-1, keepdim=True))


def main(benchmark: Benchmark) -> None:
    if benchmark.measure:
        print(json.dumps(measure(benchmark)))
        return
    again = [sys.executable, __file__, "--measure", "--share", str(benchmark.share)]
    again += ["--threads", str(benchmark.threads)]
    measured = json.loads(subprocess.run(again, capture_output=True, text=True, check=True).stdout)
    holds = measured["peak_megabytes"] <= LIMIT_MEGABYTES
    print(
        f"{measured['num_images']:,} × {measured['num_texts']:,}: {measured['seconds']} s, peak "
        f"{measured['peak_megabytes']:,} MB {'held' if holds else 'MISSED'} (limit {LIMIT_MEGABYTES:,} MB; the matrix "
        f"would take {measured['matrix_megabytes']:,} MB)"
    )
    if benchmark.share < 1:
        return
    figures = {"limit_megabytes": LIMIT_MEGABYTES, "holds": holds, **measured}
    settings = {"threads": benchmark.threads}
    add_records(RESULTS / "bench.jsonl", new_record("bench", "retrieval_ranking", settings=settings, figures=figures))


if __name__ == "__main__":
    main(tyro.cli(Benchmark, description=__doc__))
