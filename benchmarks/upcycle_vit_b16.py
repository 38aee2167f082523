"""How long upcycling a ViT-B/16 takes, and how much memory it needs beside the two models.

    python benchmarks/upcycle_vit_b16.py [--clusters]

With ``--clusters`` experts of rank 384 are fitted to groups of the tokens of 1,000 images instead, on two threads: half
an hour or more. Adds a line to benchmarks/results/bench.jsonl. The memory is that of the process, sampled while the
conversion runs in place; what counts is by how much its peak exceeds the larger of the memory before and after.
"""

import json
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import timm
import torch

import ermoe
from ermoe.studies.record import add_records, new_record

THREADS, THREADS_TO_FIT = 1, 2
NUM_IMAGES = 1000
RESULTS = Path(__file__).parent / "results"


class PeakMemory(threading.Thread):
    """Samples the resident memory of this process until stopped."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.before = self.peak = resident_megabytes()
        self._stopped = threading.Event()

    def run(self) -> None:
        while not self._stopped.wait(0.005):
            self.peak = max(self.peak, resident_megabytes())

    def stop(self) -> float:
        self._stopped.set()
        self.join()
        return self.peak


def resident_megabytes() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 1e6


def megabytes(model: torch.nn.Module) -> float:
    return sum(p.numel() * p.element_size() for p in model.parameters()) / 1e6


def measure(**options: Any) -> dict[str, float]:
    torch.manual_seed(0)
    dense = timm.create_model("vit_base_patch16_224").eval()
    images = torch.randn(2, 3, 224, 224)
    with torch.no_grad():
        expected = dense(images)
    memory = PeakMemory()
    memory.start()
    start = time.perf_counter()
    sparse = ermoe.upcycle(dense, num_experts=8, inplace=True, **{"top_k": 2} | options)
    seconds = time.perf_counter() - start
    peak, after = memory.stop(), resident_megabytes()
    with torch.no_grad():
        difference = (sparse(images) - expected).abs().max() / expected.std()
    return {
        "seconds": round(seconds, 2),
        "relative_difference": float(difference),
        "megabytes_before": round(memory.before),
        "megabytes_after": round(after),
        "megabytes_peak": round(peak),
        "megabytes_peak_beyond_both": round(peak - max(memory.before, after)),
        "megabytes_of_one_expert_layer": round(megabytes(sparse.blocks[1].mlp)),
        "parameters": sum(p.numel() for p in sparse.parameters()),
    }


class Noise:
    """Batches of images that are made as they are asked for, the same each time."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        return (torch.randn(25, 3, 224, 224, generator=generator) for _ in range(NUM_IMAGES // 25))


def main() -> None:
    if "--clusters" in sys.argv[1:]:
        torch.set_num_threads(THREADS_TO_FIT)
        rows = {"clusters, rank 384, k 1": measure(rank=384, top_k=1, init="clusters", calibration=Noise())}
    else:
        rows = converted()
    add_records(RESULTS / "bench.jsonl", new_record("bench", "upcycle_vit_b16", settings={}, figures=rows))
    print(json.dumps(rows, indent=2))


def converted() -> dict[str, dict[str, float]]:
    torch.set_num_threads(THREADS)
    return {
        "eigen, full rank": measure(),
        "dense experts": measure(experts="dense"),
        "eigen, rank 504": measure(rank=504),
    }


if __name__ == "__main__":
    main()
