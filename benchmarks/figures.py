"""Single figures in the sentences of README.md and docs/, from the records: `make tables` writes them too.

A figure stands in a document between `<!-- figure: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from ermoe.models.presets import PRESETS, Way, millions, ways
from ermoe.studies.figures import Runs
from ermoe.studies.paired import apart
from ermoe.studies.record import Record, read_records

RESULTS = Path(__file__).parent / "results"
EXTRA = "extra time over a plain pass"
TOKENS = {224: 197, 384: 577, 512: 1025}  # of a ViT with patches of 16 pixels, by image size
MEASURED_ON = ("Intel Xeon", "AVX-512")
"""The processor of single figures and short tables; the table of bars has a row for each."""


def processor_of(record: Record) -> tuple[str, ...]:
    """Whose cores a benchmark ran on, and the vector instructions it was held to or had, where that is on record."""
    machine = record["environment"]["machine"]
    cpu = machine["cpu"].replace("(R)", "").removesuffix(" Processor")
    instructions = record["settings"].get("instructions", machine.get("instructions"))
    return (cpu,) if instructions is None else (cpu, instructions.replace("AVX512", "AVX-512"))


@cache
def figures_of_benchmark(name: str) -> dict[str, Any]:
    """Of the last run of a benchmark."""
    found = [record for record in read_records(RESULTS / "bench.jsonl") if record["name"] == name]
    there = [record for record in found if processor_of(record) == MEASURED_ON]
    return dict((there or found)[-1]["figures"])


def ratio(benchmark: str, table: str, row: str) -> str:
    """A time over that of the first row."""
    return next(f"{own['ratio']:.2f}" for own in figures_of_benchmark(benchmark)["tables"][table] if own["name"] == row)


def figure(benchmark: str, *path: str, style: str = ".0f", times: float = 1) -> str:
    """A number of a benchmark's record."""
    found: Any = figures_of_benchmark(benchmark)
    for name in path:
        found = found[name]
    return f"{times * found:{style}}"


def beside_v_moe(image_size: int) -> str:
    """Multiply-adds of a layer over V-MoE's, by the formulas of docs/explanation/cost-model.md."""
    tokens, dim, hidden, experts, top_k, rank, routing = TOKENS[image_size], 768, 3072, 8, 2, 504, 56
    own = 2 * top_k * tokens * rank * (dim + hidden) + tokens * dim * experts * routing + tokens**2 * experts * routing
    return f"{own / (2 * top_k * tokens * dim * hidden + tokens * dim * experts):.2f}"


def beside_floor(rank: int, top_k: int, columns: int, averaged: int) -> str:
    """Multiply-adds of a layer of DeiT-Ti over its floor: ``columns`` route, ``averaged`` have a context."""
    tokens, dim, hidden = 197, 192, 768
    own = 2 * top_k * rank * (dim + hidden) + dim * columns + tokens * averaged
    return f"{own / (2 * top_k * dim * hidden):.2f}"


def routing_beside_v_moe(columns: int) -> str:
    """Multiply-adds of routing with its context over those of V-MoE's layer, both of ViT-B."""
    tokens, dim, hidden, top_k, experts = 197, 768, 3072, 2, 8
    return f"{(dim * columns + tokens * columns) / (2 * top_k * dim * hidden + dim * experts):.2f}"


@cache
def ways_of_b16() -> list[Way]:
    """A ViT-B/16 made sparse in every way, counted."""
    return ways(PRESETS["paper-b16"])


def active(name: str) -> str:
    """Parameters that a token of a ViT-B/16 meets."""
    return next(millions(way.count.active_parameters) for way in ways_of_b16() if way.name == name)


def shared_beside_dense() -> str:
    """Multiply-adds of layers with a shared network over those of the other half of the blocks, which are dense."""
    work = next(way.count.multiply_adds for way in ways_of_b16() if way.name.startswith("dense shared"))
    return f"{(work.experts + work.shared_expert + work.routing + work.context) / work.dense_ffn:.1f}"


def parameters(row: str) -> str:
    """Of a row of the study on real weights, over the dense model's."""
    records = read_records(RESULTS / "real_weights.jsonl")
    return next(f"{record['figures']['parameters']:.1f}" for record in records if record["name"] == row)


def time_of(row: str) -> str:
    """Of a row of the study on real weights, over the dense model's."""
    records = read_records(RESULTS / "real_weights.jsonl")
    return next(f"{record['figures'][row]['ratio']:.2f}" for record in records if record["name"] == "times")


def minutes_of(row: str) -> str:
    """That a row of the study on real weights took; a trained one starts from the fit of its twin."""
    records = read_records(RESULTS / "real_weights.jsonl")
    return next(f"{record['seconds'] / 60:.0f}" for record in records if record["name"] == row)


FINE_TUNED = "paper/finetune/tiny-tiny-imagenet-200-from-deit_tiny_patch16_224.safetensors/records.jsonl"


def points_apart(ours: str, theirs: str, study: str = "real_weights.jsonl") -> str:
    """Between two rows of a study on real weights, image by image, with half of the 95 % interval."""
    return str(apart(Runs(read_records(RESULTS / study)), (ours,), (theirs,)))


FIGURES: dict[str, Callable[[], str]] = {
    "clusters-over-one": lambda: points_apart("clusters-r96", "one-r96"),
    "slim-over-low-rank": lambda: points_apart("slim-0.8", "one-low-rank-0.8"),
    "slim-over-low-rank-fitted": lambda: points_apart("slim-0.8-fitted", "one-low-rank-0.8-fitted"),
    "slim-over-narrow-fitted": lambda: points_apart("slim-0.8-fitted", "one-narrow-0.8-fitted"),
    "clusters-over-low-rank": lambda: points_apart("ermoe-clusters-shared", "one-low-rank", FINE_TUNED),
    "slim-parameters": lambda: parameters("slim-0.8-fitted"),
    "slim-minutes-to-fit": lambda: minutes_of("slim-0.8-fitted"),
    "slim-minutes-to-learn": lambda: minutes_of("slim-0.8"),
    "slim-time": lambda: time_of("slim-0.8"),
    "one-narrow-time": lambda: time_of("one-narrow-0.8"),
    "inspection-extra": lambda: figure(
        "inspect_cost", "figures", "extra time over a plain pass", style=".1f", times=100
    ),
    "inspection-megabytes": lambda: figure("inspect_cost", "figures", "report MB", style=".2f"),
    "memory-80-people": lambda: figure("brain_memory", "peak_megabytes", "80"),
    "memory-160-people": lambda: figure("brain_memory", "peak_megabytes", "160"),
    "storage-largest": lambda: f"{max(figures_of_benchmark('brain_storage')['largest_change_years'].values()):.4f}",
    "turned-nod": lambda: figure("brain_storage", "median_change_years", "5° nod", style=".2f"),
    "turned-lean": lambda: figure("brain_storage", "median_change_years", "5° lean", style=".2f"),
    "resampled": lambda: figure("brain_storage", "median_change_years", "1 mm", style=".2f"),
    "other-mask": lambda: figure("brain_storage", "median_change_years", "mask from deepbet", style=".1f"),
    "ranked-images": lambda: figure("retrieval_ranking", "num_images", style=","),
    "ranked-texts": lambda: figure("retrieval_ranking", "num_texts", style=","),
    "ranking-megabytes": lambda: figure("retrieval_ranking", "peak_megabytes", style=",.0f"),
    "ranking-matrix": lambda: figure("retrieval_ranking", "matrix_megabytes", times=1e-3),
    "layer-balanced": lambda: ratio("layer", "forward, balanced, 2 threads", "ermoe R=504 r=56"),
    "layer-collapsed": lambda: ratio("layer", "forward, collapsed, 2 threads", "ermoe R=504 r=56"),
    "deit-unrouted": lambda: ratio("parts", "DeiT-Ti, forward", "ERMoE: unrouted"),
    "slim-unrouted": lambda: ratio("parts", "slim, forward", "ERMoE: unrouted"),
    "deit-by-operations": lambda: beside_floor(rank=128, top_k=2, columns=128, averaged=128),
    "slim-by-operations": lambda: beside_floor(rank=96, top_k=1, columns=16, averaged=0),
    "merged-by-operations": lambda: routing_beside_v_moe(8 * 96),
    "memory-ermoe": lambda: figure("model", "figures", "peak memory MB beyond parameters, ermoe paper-b16"),
    "memory-v-moe": lambda: figure("model", "figures", "peak memory MB beyond parameters, V-MoE"),
    "rank-504-moves": lambda: figure("upcycle_vit_b16", "eigen, rank 504", "relative_difference", style=".1f"),
    "active-paper-b16": lambda: active("eigen, R = 504"),
    "active-v-moe-b16": lambda: active("V-MoE"),
    "shared-base": shared_beside_dense,
    **{f"size-{size}": lambda size=size: beside_v_moe(size) for size in TOKENS},
}
