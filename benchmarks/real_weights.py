"""What becomes of a pretrained ViT: converted, refined and slimmed, beside one smaller network for all tokens.

Every row starts from the same dense weights and sees the same unlabelled photographs (the training split). All are
judged by the photographs of the other split; a record keeps which of them were named rightly, so that rows are
compared in pairs. A queue that resumes: a line a run in benchmarks/results/real_weights.jsonl.

    python benchmarks/real_weights.py DATA --weights FILE [--only NAME …]

DATA is a folder with train/CLASS/ and val/CLASS/ of 224-pixel photographs, FILE holds deit_tiny_patch16_224's weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import tyro
from torch import nn

import ermoe
from ermoe.data.images import open_images
from ermoe.data.order import Order
from ermoe.images.conversion import PlainBatches, dense_model
from ermoe.images.run import transform_for
from ermoe.models.slim import slim
from ermoe.nn import moe_layers
from ermoe.studies.record import Job, Record, read_records, run_queue
from ermoe.studies.tables import Table
from ermoe.train.compute import Compute
from ermoe.train.distillation import distill
from ermoe.train.loader import Loader
from ermoe.train.settings import Augmentation

RESULTS = Path(__file__).parent / "results"
_ODD = [1, 3, 5, 7, 9, 11]
_NO_LEARNING = {"layer_epochs": 0, "epochs": 0}
_BY_LAYER = {"layer_epochs": 12, "epochs": 0}
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


@dataclass
class Bench:
    """The dense model and the photographs."""

    options: Options
    compute: Compute = field(default_factory=Compute)

    def __post_init__(self) -> None:
        self.dense = dense_model(self.options.architecture, self.options.weights, self.compute)
        self.train, self.test = (open_images(self.options.data, split) for split in ("train", "test"))

    def plain(self) -> PlainBatches:
        source = transform_for(self.dense).of(self.train)
        return PlainBatches(source, len(self.train), self.options.seed, self.compute)

    def varied(self) -> Loader[Any]:
        transform = transform_for(self.dense, Augmentation(crop="resized"), self.options.seed)
        return Loader(transform.of(self.train), Order(len(self.train), 32, self.options.seed), compute=self.compute)

    @torch.no_grad()
    def judged(self, model: nn.Module) -> dict[str, Any]:
        """Which photographs are named rightly, and named as the dense model does; operations and loads."""
        right, same = [], []
        loader = Loader(transform_for(self.dense).of(self.test), batch_size=50, compute=self.compute)
        model.eval()
        with ermoe.record_routing(model) if moe_layers(model) else _Nothing() as routing:
            for (batch,) in loader.epoch():
                answer_B = model(batch.image).argmax(1)
                right.append(answer_B == batch.label)
                same.append(answer_B == self.dense(batch.image).argmax(1))
        right_N, same_N = torch.cat(right).numpy(), torch.cat(same).numpy()
        dense, counted = ermoe.count(self.dense), ermoe.count(model)
        loads = [layer["load_cv2"] for layer in routing.summary().values()] if moe_layers(model) else []
        return {
            "top1": float(right_N.mean()),
            "agreement": float(same_N.mean()),
            "right": np.packbits(right_N).tobytes().hex(),
            "operations": counted.flops.total / dense.flops.total,
            "parameters": counted.total_parameters / dense.total_parameters,
            "largest_load_cv2": max(loads, default=None),
        }


class _Nothing:
    def __enter__(self) -> None:
        return None

    def __exit__(self, *problem: object) -> None:
        return None


def dense(bench: Bench, name: str) -> dict[str, Any]:
    return bench.judged(bench.dense)


def converted(bench: Bench, name: str, learning: dict[str, int], **options: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(bench.options.seed)
    start = time.perf_counter()
    given = {"top_k": 1, "blocks": _ODD, "calibration": bench.plain(), "generator": generator, **options}
    model: Any = ermoe.upcycle(bench.dense, **given)
    seconds_to_convert = time.perf_counter() - start
    fits = {layer: fit.error for layer, fit in model.group_fits.items()} or dict(model.output_error)
    if learning["layer_epochs"] or learning["epochs"]:
        folder = bench.options.cache / name
        given = {"calibration": bench.plain(), "folder": folder, "compute": bench.compute}
        distill(model, bench.dense, bench.varied(), **given, **learning)
    ermoe.save(model, bench.options.cache / name / "model")
    return {**bench.judged(model), "layer_errors": fits, "seconds_to_convert": seconds_to_convert}


def slimmed(bench: Bench, name: str, learning: dict[str, int], budget: float, num_experts: int) -> dict[str, Any]:
    found = slim(
        bench.dense,
        bench.varied(),
        budget=budget,
        num_experts=num_experts,
        calibration=bench.plain(),
        held_out=bench.plain(),
        folder=bench.options.cache / name,
        compute=bench.compute,
        seed=bench.options.seed,
        **learning,
    )
    ermoe.save(found.model, bench.options.cache / name / "model")
    return {**bench.judged(found.model), "layers": found.as_json()["layers"]}


_CLUSTERS = {"init": "clusters", "rank": 96}
ROWS: dict[str, Callable[..., dict[str, Any]]] = {
    "dense": dense,
    "exact": partial(converted, learning=_NO_LEARNING, top_k=2),
    "clusters-r96": partial(converted, learning=_NO_LEARNING, **_CLUSTERS),
    "clusters-r96-own-bases": partial(converted, learning=_NO_LEARNING, **_CLUSTERS, routing_basis="experts"),
    "one-r96": partial(converted, learning=_NO_LEARNING, rank=96, num_experts=1),
    "clusters-r96-refined": partial(converted, learning=_BY_LAYER, **_CLUSTERS),
    "one-r96-refined": partial(converted, learning=_BY_LAYER, rank=96, num_experts=1),
    **{
        f"{kind}-{budget}{stage}": partial(slimmed, learning=learning, budget=budget, num_experts=num_experts)
        for budget in (0.9, 0.8, 0.7)
        for stage, learning in (("-fitted", _NO_LEARNING), ("", _WHOLE))
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
    right = {record["name"]: _bits(record["figures"]["right"]) for record in records}
    rows = []
    for name in LABELS:
        for figures in (record["figures"] for record in records if record["name"] == name):
            apart_N = right[name] - right["dense"]
            half = 1.96 * apart_N.std() / len(apart_N) ** 0.5
            row = [f"{100 * figures['top1']:.1f}", f"{100 * apart_N.mean():+.1f} ± {100 * half:.1f}"]
            row += [f"{figures['operations']:.3f}", f"{figures['parameters']:.2f}"]
            rows.append([LABELS[name], *row])
    return Table(["model", "top-1 %", "over dense", "operations ÷ dense", "parameters ÷ dense"], rows)


def _bits(text: str) -> np.ndarray:
    return np.unpackbits(np.frombuffer(bytes.fromhex(text), dtype=np.uint8)).astype(float)


def main(options: Options) -> None:
    torch.set_num_threads(options.threads)
    if unknown := set(options.only) - set(ROWS):
        raise SystemExit(f"--only {', '.join(unknown)}: use {', '.join(ROWS)}")
    bench = Bench(options)
    settings = {"data": options.data.resolve().name, "architecture": options.architecture}
    names = options.only or tuple(ROWS)
    jobs = [Job(name, options.seed, partial(ROWS[name], bench, name), settings) for name in names]
    path = options.out / "real_weights.jsonl"
    run_queue("real-weights", jobs, path)
    print(table(read_records(path)).markdown())


if __name__ == "__main__":
    main(tyro.cli(Options))
