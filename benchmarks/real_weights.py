"""What becomes of a pretrained ViT: converted, refined and slimmed, beside one smaller network for all tokens.

Every row starts from the same dense weights and sees the same unlabelled photographs (the training split). All are
judged by the photographs of the other split; a record keeps which of them were named rightly, so that rows are
compared in pairs. A queue that resumes: a line a run in benchmarks/results/real_weights.jsonl.

    python benchmarks/real_weights.py DATA --weights FILE [--only NAME …]

DATA is a folder with train/CLASS/ and val/CLASS/ of 224-pixel photographs, FILE holds deit_tiny_patch16_224's weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro

import ermoe
from ermoe.models.slim import slim
from ermoe.studies.conversions import AS_IT_IS, BY_LAYER, CLUSTERS, EXACT, ONE, Photographs
from ermoe.studies.figures import Runs
from ermoe.studies.paired import apart
from ermoe.studies.record import Job, Record, read_records, run_queue
from ermoe.studies.tables import Table
from ermoe.train.compute import Compute

RESULTS = Path(__file__).parent / "results"
_WHOLE = {"layer_epochs": 10, "epochs": 25}


@dataclass(frozen=True)
class Options:
    """Convert, refine and slim a pretrained ViT, and judge what comes out."""

    data: Annotated[Path, tyro.conf.Positional]
    """Folder with train/ and val/, a folder a class each."""
    weights: Path
    """Weights of the architecture."""
    architecture: str = "deit_tiny_patch16_224"
    only: tuple[str, ...] = ()
    """Rows to run; all by default."""
    seed: int = 0
    threads: int = 2
    out: Path = RESULTS
    cache: Path = Path("runs/real_weights")
    """Where learning that was stopped goes on from, and models are kept."""


def dense(bench: Photographs, options: Options, name: str) -> dict[str, Any]:
    return bench.judged(bench.dense)


def converted(
    bench: Photographs, options: Options, name: str, learning: dict[str, int], **given: Any
) -> dict[str, Any]:
    model, about = bench.refined(options.cache / name, learning, **given)
    return {**bench.judged(model), **about}


def slimmed(
    bench: Photographs, options: Options, name: str, learning: dict[str, int], budget: float, num_experts: int
) -> dict[str, Any]:
    found = slim(
        bench.dense,
        bench.varied(),
        budget=budget,
        num_experts=num_experts,
        calibration=bench.plain(),
        held_out=bench.plain(),
        folder=options.cache / name,
        compute=bench.compute,
        seed=bench.seed,
        **learning,
    )
    ermoe.save(found.model, options.cache / name / "model")
    return {**bench.judged(found.model), "layers": found.as_json()["layers"]}


ROWS: dict[str, Callable[..., dict[str, Any]]] = {
    "dense": dense,
    "exact": partial(converted, learning=AS_IT_IS, **EXACT),
    "clusters-r96": partial(converted, learning=AS_IT_IS, **CLUSTERS),
    "clusters-r96-own-bases": partial(converted, learning=AS_IT_IS, **CLUSTERS, routing_basis="experts"),
    "one-r96": partial(converted, learning=AS_IT_IS, **ONE),
    "clusters-r96-refined": partial(converted, learning=BY_LAYER, **CLUSTERS),
    "one-r96-refined": partial(converted, learning=BY_LAYER, **ONE),
    **{
        f"{kind}-{budget}{stage}": partial(slimmed, learning=learning, budget=budget, num_experts=num_experts)
        for budget in (0.9, 0.8, 0.7)
        for stage, learning in (("-fitted", AS_IT_IS), ("", _WHOLE))
        for kind, num_experts in (("slim", 8), ("one-narrow", 1))
    },
}


LABELS = {
    "dense": "dense",
    "exact": "full rank, 8 experts, 2 a token",
    "clusters-r96": "rank 96 in every second block, 8 experts, 1 a token",
    "clusters-r96-own-bases": "the same, routed by the experts' own bases",
    "one-r96": "rank 96 in every second block, one for all tokens",
    "clusters-r96-refined": "rank 96, 8 experts, refined layer by layer",
    "one-r96-refined": "rank 96, one for all, refined layer by layer",
    **{
        f"{kind}-{budget}{stage}": f"{label} of the operations{remark}"
        for budget in (0.9, 0.8, 0.7)
        for stage, remark in (("-fitted", ", not trained"), ("", ", trained"))
        for kind, label in (("slim", f"slim, 8 experts: {budget}"), ("one-narrow", f"one narrow network: {budget}"))
    },
}


def table(records: list[Record]) -> Table:
    """Accuracy, and the difference from the dense model photograph by photograph, with its 95 % interval."""
    runs, rows = Runs(records), []
    for name in LABELS:
        for figures in (record["figures"] for record in records if record["name"] == name):
            row = [f"{100 * figures['top1']:.1f}", str(apart(runs, (name,), ("dense",)) or "–")]
            row += [f"{figures['operations']:.3f}", f"{figures['parameters']:.2f}"]
            rows.append([LABELS[name], *row])
    return Table(["model", "top-1 %", "over dense", "operations ÷ dense", "parameters ÷ dense"], rows)


def main(options: Options) -> None:
    torch.set_num_threads(options.threads)
    if unknown := set(options.only) - set(ROWS):
        raise SystemExit(f"--only {', '.join(unknown)}: use {', '.join(ROWS)}")
    bench = Photographs.open(options.data, options.architecture, options.weights, options.seed, Compute())
    settings = {"data": options.data.resolve().name, "architecture": options.architecture}
    names = options.only or tuple(ROWS)
    jobs = [Job(name, options.seed, partial(ROWS[name], bench, options, name), settings) for name in names]
    path = options.out / "real_weights.jsonl"
    run_queue("real-weights", jobs, path)
    print(table(read_records(path)).markdown())


if __name__ == "__main__":
    main(tyro.cli(Options))
