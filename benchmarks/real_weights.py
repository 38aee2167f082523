"""What becomes of a pretrained ViT: converted, refined and slimmed, beside one smaller network for all tokens.

Every row starts from the same dense weights and sees the same unlabelled photographs (the training split). All are
judged by the photographs of the other split; a record keeps which of them were named rightly, so that rows are
compared in pairs. A queue that resumes: a line a run in benchmarks/results/real_weights.jsonl.

    python benchmarks/real_weights.py DATA --weights FILE [--only NAME …]

DATA is a folder with train/CLASS/ and val/CLASS/ of 224-pixel photographs, FILE holds deit_tiny_patch16_224's weights.

Kinds of slim models: experts of less width (`slim`), small ones beside a network that all tokens share (`slim-shared`),
one network of less width or of lower rank for all tokens. Rates are tuned for each kind alike (`tune-…`), on a fifth of
the training photographs that was not learned from. `times` wants an idle machine: models of the other rows, in turns, 8
photographs at once.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import tyro
from matplotlib.figure import Figure
from torch import nn

import ermoe
from ermoe.analysis import plots
from ermoe.analysis.plots import Curve, Scale, curves
from ermoe.analysis.report import save_drawing
from ermoe.data.images import some_of
from ermoe.images.conversion import PlainBatches
from ermoe.images.run import transform_for
from ermoe.models.backbones import family_of
from ermoe.models.slim import slim
from ermoe.studies.bench.measure import compare, inferring, take_turns
from ermoe.studies.conversions import AS_IT_IS, BY_LAYER, CLUSTERS, EXACT, ONE, Photographs
from ermoe.studies.figures import Runs
from ermoe.studies.paired import apart
from ermoe.studies.record import Job, Record, read_records, run_queue
from ermoe.studies.tables import Table
from ermoe.train.compute import Compute

RESULTS = Path(__file__).parent / "results"
BUDGETS = (0.9, 0.8, 0.7)
ALL_BUDGETS = (0.95, 0.9, 0.85, 0.8, 0.75, 0.7)
KINDS: dict[str, dict[str, Any]] = {
    "slim": {"num_experts": 8},
    "slim-16": {"num_experts": 16},
    "slim-shared": {"num_experts": 16, "routed": 0.125},
    "one-narrow": {"num_experts": 1},
    "one-low-rank": {"num_experts": 1, "cut": "rank"},
}
COMPARED = ("slim", "one-low-rank")
"""Kinds whose curve has budgets in between, fitted layer by layer only."""
RATES = (1.5e-5, 5e-5, 1.5e-4)
WHOLE: dict[str, Any] = {"layer_epochs": 0, "epochs": 5}
BEST_RATES = {"slim": 1.5e-5, "slim-16": 1.5e-5, "slim-shared": 1.5e-5, "one-narrow": 5e-5, "one-low-rank": 5e-5}
"""By trials on a fifth of the training photographs; `tune-…` rows, once on record, settle them."""
_ROUNDS = 25


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
    plot: Path | None = None
    """Also draw the curve of slimming to this file, without its ending."""


def dense(bench: Photographs, options: Options, name: str) -> dict[str, Any]:
    return bench.judged(bench.dense)


def converted(
    bench: Photographs, options: Options, name: str, learning: dict[str, Any], **given: Any
) -> dict[str, Any]:
    model, about = bench.refined(options.cache / name, learning, **given)
    return {**bench.judged(model), **about}


def slimmed(
    bench: Photographs,
    options: Options,
    name: str,
    learning: dict[str, Any],
    held_out: PlainBatches | None = None,
    **given: Any,
) -> dict[str, Any]:
    """A slim model, judged by the other split; or by what was held out of training, as rates are tuned."""
    _take_fit(options.cache, name)
    found = slim(
        bench.dense,
        bench.varied(),
        calibration=bench.plain(),
        held_out=held_out or bench.plain(),
        folder=options.cache / name,
        compute=bench.compute,
        seed=bench.seed,
        **learning,
        **given,
    )
    if held_out is not None:
        return {"agreement": found.agreement, "divergence": found.divergence}
    ermoe.save(found.model, options.cache / name / "model")
    return {**bench.judged(found.model), "layers": found.as_json()["layers"]}


def _take_fit(cache: Path, name: str) -> None:
    """Rows that differ only in how they learn start from one and the same fit, which takes minutes."""
    twins = [
        row for row in ROWS if row.startswith(("tune-", *KINDS)) and _without_learning(row) == _without_learning(name)
    ]
    done = [cache / twin / "fitted" for twin in twins if (cache / twin / "fitted" / "fits.json").exists()]
    if done and not (cache / name / "fitted").exists():
        shutil.copytree(done[0], cache / name / "fitted")


def _without_learning(row: str) -> str:
    """The name of a row without its rate, or without the stage at which its learning ends."""
    for end in (*_STAGES, *(f"-{rate:g}" for rate in RATES if row.startswith("tune-"))):
        row = row.removesuffix(end)
    return row


def tuned(bench: Photographs, options: Options, name: str, **given: Any) -> dict[str, Any]:
    """Learning from four fifths of the training photographs, judged by the last fifth; no label is read."""
    order = np.random.default_rng(0).permutation(len(bench.train))
    middle = 4 * len(order) // 5
    parts = [some_of(bench.train, part, summary=bench.train.summary) for part in (order[:middle], order[middle:])]
    held_out = PlainBatches(transform_for(bench.dense).of(parts[1]), len(parts[1]), bench.seed, bench.compute)
    return slimmed(replace(bench, train=parts[0]), options, name, budget=0.8, held_out=held_out, **given)


def cut_by_svd(bench: Photographs, options: Options, name: str, budget: float) -> dict[str, Any]:
    """Every network cut to one rank by its singular values, whatever its inputs are."""
    family = family_of(bench.dense)
    ffn = family.ffn(family.blocks(bench.dense)[0][1])
    saved = (1 - budget) * ermoe.count(bench.dense).multiply_adds.total / family.num_tokens(bench.dense)
    entries = 2 * ffn.dim * ffn.hidden_dim - saved / len(family.blocks(bench.dense))
    rank = int(entries / (2 * (ffn.dim + ffn.hidden_dim)))
    return bench.judged(ermoe.upcycle(bench.dense, blocks="all", num_experts=1, top_k=1, rank=rank))


def in_int8(bench: Photographs, options: Options, name: str) -> dict[str, Any]:
    """torch's dynamic quantisation of all linear layers: as many operations, each on fewer bits."""
    return bench.judged(bench.dense, answers=_quantised(bench.dense))


def _quantised(model: nn.Module) -> nn.Module:
    quantised: nn.Module = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    return quantised


def times(bench: Photographs, options: Options, name: str) -> dict[str, Any]:
    """Time of a pass over the dense model's, 8 photographs at once, of the models that other rows have left.

    Each takes turns with the dense one alone, so that models do not push one another out of the cache.
    """
    image = next(iter(bench.plain()))[:8]
    models = {"int8": _quantised(bench.dense)}
    for row in ("clusters-r96", *(f"{kind}-{budget}" for budget in BUDGETS for kind in KINDS)):
        folder = next(
            (f for f in (options.cache / row, options.cache / f"{row}-fitted") if (f / "model").exists()), None
        )
        if folder is not None:
            models[row] = ermoe.load(folder / "model").eval()
    found = {"dense": {"ratio": 1.0, "low": 1.0, "high": 1.0}}
    for row, model in models.items():
        pair = {"dense": inferring(bench.dense, image), row: inferring(model, image)}
        _, own = compare(take_turns(pair, rounds=_ROUNDS), "dense")
        found[row] = {"ratio": own.ratio, "low": own.ratio_low, "high": own.ratio_high}
    return found


ROWS: dict[str, Callable[..., dict[str, Any]]] = {
    "dense": dense,
    "exact": partial(converted, learning=AS_IT_IS, **EXACT),
    "clusters-r96": partial(converted, learning=AS_IT_IS, **CLUSTERS),
    "clusters-r96-own-bases": partial(converted, learning=AS_IT_IS, **CLUSTERS, routing_basis="experts"),
    "one-r96": partial(converted, learning=AS_IT_IS, **ONE),
    "clusters-r96-refined": partial(converted, learning=BY_LAYER, **CLUSTERS),
    "one-r96-refined": partial(converted, learning=BY_LAYER, **ONE),
    "clusters-r96-trained": partial(converted, learning={**WHOLE, "lr": BEST_RATES["slim"]}, **CLUSTERS),
    "one-r96-trained": partial(converted, learning={**WHOLE, "lr": BEST_RATES["one-low-rank"]}, **ONE),
    "int8": in_int8,
    **{f"svd-{budget}": partial(cut_by_svd, budget=budget) for budget in BUDGETS},
    **{
        f"tune-{kind}-{rate:g}": partial(tuned, learning={**WHOLE, "lr": rate}, **options)
        for kind, options in KINDS.items()
        for rate in RATES
    },
    **{
        f"{kind}-{budget}-fitted": partial(slimmed, learning=AS_IT_IS, budget=budget, **options)
        for kind, options in KINDS.items()
        for budget in (ALL_BUDGETS if kind in COMPARED else BUDGETS)
    },
    **{
        f"{kind}-{budget}": partial(slimmed, learning={**WHOLE, "lr": BEST_RATES[kind]}, budget=budget, **options)
        for kind, options in KINDS.items()
        for budget in BUDGETS
    },
    "times": times,
}


_STAGES = {"-fitted": ", not trained", "": ", trained"}
_WORDS = {
    "slim": "slim, 8 experts",
    "slim-16": "slim, 16 experts",
    "slim-shared": "slim, 16 small experts beside a shared network",
    "one-narrow": "one narrow network a block",
    "one-low-rank": "one low-rank network a block",
}
LABELS = {
    "dense": "dense",
    "exact": "full rank, 8 experts, 2 a token",
    "clusters-r96": "rank 96 in every second block, 8 experts, 1 a token",
    "clusters-r96-own-bases": "the same, routed by the experts' own bases",
    "one-r96": "rank 96 in every second block, one for all tokens",
    "clusters-r96-refined": "rank 96, 8 experts, refined layer by layer",
    "one-r96-refined": "rank 96, one for all, refined layer by layer",
    "clusters-r96-trained": "rank 96, 8 experts, trained",
    "one-r96-trained": "rank 96, one for all, trained",
    "int8": "dense, linear layers in int8 (torch, dynamic)",
    **{f"svd-{budget}": f"{budget}: one network a block, cut by SVD" for budget in BUDGETS},
    **{
        f"{kind}-{budget}{stage}": f"{budget}: {label}{remark}"
        for budget in ALL_BUDGETS
        for kind, label in _WORDS.items()
        for stage, remark in _STAGES.items()
    },
}


def table(records: list[Record]) -> Table:
    """Accuracy, and the difference from the dense model photograph by photograph, with its 95 % interval."""
    runs, rows = Runs(records), []
    timed = next((record["figures"] for record in records if record["name"] == "times"), {})
    for name in LABELS:
        for figures in (record["figures"] for record in records if record["name"] == name):
            row = [f"{100 * figures['top1']:.1f}", str(apart(runs, (name,), ("dense",)) or "–")]
            row += [f"{100 * figures['agreement']:.1f}", f"{figures['operations']:.3f}", f"{figures['parameters']:.2f}"]
            rows.append([LABELS[name], *row, f"{timed[name]['ratio']:.2f}" if name in timed else "–"])
    header = ["model", "top-1 %", "over dense", "same answer %", "operations ÷ dense", "parameters ÷ dense"]
    return Table([*header, "time ÷ dense"], rows)


def tuning_table(records: list[Record]) -> Table:
    """What each kind of model reached on training photographs that it did not learn from, by its learning rate.

    Kinds without a run are left out.
    """
    divergence = {r["name"]: r["figures"]["divergence"] for r in records if r["name"].startswith("tune-")}
    cells = [[divergence.get(f"tune-{kind}-{rate:g}") for rate in RATES] for kind in KINDS]
    rows = [
        [_WORDS[kind], *("–" if cell is None else f"{cell:.3f}" for cell in row)]
        for kind, row in zip(KINDS, cells, strict=True)
        if set(row) != {None}
    ]
    return Table(["KL(dense ‖ model) at 0.8 of the operations", *(f"rate {rate:g}" for rate in RATES)], rows)


def drawing(records: list[Record]) -> Figure:
    """Accuracy by operations, a line a kind of model, with 95 % intervals of the difference from the dense one."""
    runs = Runs(records)
    figures = {record["name"]: record["figures"] for record in records}
    families = {
        **{_WORDS[kind]: [f"{kind}-{budget}" for budget in BUDGETS] for kind in KINDS},
        **{f"{_WORDS[kind]}, not trained": [f"{kind}-{budget}-fitted" for budget in ALL_BUDGETS] for kind in COMPARED},
        "one network a block, cut by SVD": [f"svd-{budget}" for budget in BUDGETS],
        "dense, in int8": ["int8"],
    }
    lines = {}
    for label, rows in families.items():
        names = [name for name in rows if name in figures]
        widths = [apart(runs, (name,), ("dense",)) for name in names]
        if names:
            lines[label] = Curve(
                [figures[name]["operations"] for name in names],
                [100 * figures[name]["top1"] for name in names],
                error=[100 * width.half_width if width is not None else 0.0 for width in widths],
                marked=True,
                dashed=label.endswith("not trained"),
            )
    return curves(lines, plots.expert_colours(len(lines)), Scale("operations ÷ dense", "top-1 %", from_zero=False))


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
    records = read_records(path)
    print(*(found.markdown() for found in (tuning_table(records), table(records)) if found.rows), sep="\n\n")
    if options.plot is not None:
        save_drawing(drawing(records), options.plot, description="Accuracy of slim models by their operations")


if __name__ == "__main__":
    main(tyro.cli(Options))
