"""DeiT-Tiny made sparse, and not trained on labels: accuracy (Tab. 1), frozen features (Tab. 2) and cost (tiny)."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from ermoe.data.images import open_images
from ermoe.files import replacing
from ermoe.images.presets import PRETRAINED
from ermoe.images.probe import READINGS, Features, features, probe
from ermoe.models.count import count
from ermoe.studies.bench.measure import compare, inferring, take_turns
from ermoe.studies.conversions import AS_IT_IS, BY_LAYER, Photographs
from ermoe.studies.figures import Runs
from ermoe.studies.paired import paired_verdict
from ermoe.studies.paper import images
from ermoe.studies.paper.finetuning import no_limit, points
from ermoe.studies.paper.images import LABELS, OFFSETS
from ermoe.studies.paper.setup import Setup, slug
from ermoe.studies.paper.study import Findings, Job, every, study

_ARCHITECTURE = "deit_tiny_patch16_224"
_REFINED = ", refined layer by layer"
_NO_LIMIT = ", no limit at inference"
_EXACT = "ERMoE, exact"
_CLUSTERS, _ONE = LABELS["ermoe-clusters"], LABELS["one-low-rank"]
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("dense", AS_IT_IS),
    _EXACT: (OFFSETS, AS_IT_IS),
    "V-MoE": ("v-moe", AS_IT_IS),
    _CLUSTERS: ("ermoe-clusters", AS_IT_IS),
    _ONE: ("one-low-rank", AS_IT_IS),
    _CLUSTERS + _REFINED: ("ermoe-clusters", BY_LAYER),
    _ONE + _REFINED: ("one-low-rank", BY_LAYER),
}
"""What the table calls a model → its method, and what it learns without labels."""


def opened(setup: Setup, seed: int, data: str | None = None) -> Photographs:
    """DeiT-Tiny at the size it was trained at, with the images of a folder, --data by default."""
    assert setup.weights is not None
    return Photographs.open(data or setup.data or "", _ARCHITECTURE, Path(setup.weights), seed, setup.compute())


def _described(setup: Setup, calibration: str | None = None) -> str:
    fitted, test = open_images(calibration or setup.data or "", "train"), open_images(setup.data or "", "test")
    return (
        f"DeiT-Tiny at 224 pixels from {setup.weights}, experts in every second block, 8 experts, fitted to at most "
        f"1,000 unlabelled images of {fitted.summary}; judged by {test.summary}; {setup.in_seeds}."
    )


def _accuracy(setup: Setup, name: str, seed: int) -> dict[str, Any]:
    """A converted model beside the dense one, photograph by photograph; V-MoE also without a limit."""
    given = opened(setup, seed)
    method, learning = ROWS[name]
    options = PRETRAINED[method]
    if options is None:
        return given.judged(given.dense)
    if setup.epochs is not None and learning["layer_epochs"]:
        learning = {**learning, "layer_epochs": setup.epochs}
    folder = setup.trained(slug(setup.data or "")) / "converted" / f"{slug(name)}-{seed}"
    model, about = given.refined(folder, learning, **options)
    found = {**given.judged(model), **about}
    with no_limit(model) as has_limit:
        if has_limit:
            found[_NO_LIMIT] = given.judged(model)
    return found


@study(
    "accuracy of converted models on photographs, without training on labels",
    "ViT-B/16 from ImageNet weights, fine-tuned on ImageNet-1K for 300 epochs; ERMoE 88.03 %, V-MoE 87.41.",
    _described,
    every(ROWS, _accuracy),
)
def imagenet(runs: Runs) -> Findings:
    """A row for each model, compared with the dense one photograph by photograph."""
    header = ["model", "top-1", "over dense", "same answer as dense", "operations ÷ dense", "parameters ÷ dense"]
    header += ["largest load CV²", "dropped"]
    rows = []
    for name in ROWS:
        rows.append(_row(runs, name))
        if runs.of(name, _NO_LIMIT, "top1"):
            rows.append(_row(runs, name, _NO_LIMIT))
    sentences = [
        paired_verdict(runs, ((name,), name), (("dense",), "dense"), "top-1") for name in ROWS if name != "dense"
    ]
    for stage in ("", _REFINED):
        pair = ((_CLUSTERS + stage,), _CLUSTERS + stage), ((_ONE + stage,), _ONE + stage)
        sentences.append(paired_verdict(runs, *pair, "top-1"))
    return Findings(header, rows, sentences)


def _row(runs: Runs, name: str, *path: str) -> list[str]:
    row = ["".join((name, *path)), runs.cell(name, *path, "top1", style=".1%"), points(runs, (name, *path), ("dense",))]
    styles = {"agreement": ".1%", "operations": ".3f", "parameters": ".2f", "largest_load_cv2": ".3f"}
    row += [runs.cell(name, *path, figure, style=style) for figure, style in styles.items()]
    return [*row, runs.cell(name, *path, "drop_rate", style=".1%")]


_TABLE_2 = {  # CIFAR-10 and Tiny-ImageNet, each with 5 and 10 shots
    "dense": "–",
    "v-moe": "94.62/98.94, 81.12/83.16",
    OFFSETS: "96.05/98.79, 83.17/85.04",
    "ermoe-clusters": "–",
}
_PROBED, _TESTED = 6000, 3000
_SHOTS = (5, 10)


def _probe_described(setup: Setup) -> str:
    train = open_images(setup.data or "", "train")
    return (
        f"{_described(setup, setup.pretrain)} Features are frozen. Heads learn from at most {_PROBED:,} images of "
        f"{train.summary}, and {_TESTED:,} of the others judge them."
    )


def _probed(setup: Setup, method: str, seed: int) -> dict[str, Any]:
    """Probes of frozen features, which are computed once for all seeds: those draw the images of a class."""
    train = images.drawn(opened(setup, seed=0).train, _PROBED)
    given = _features(setup, method)
    found: dict[str, Any] = {}
    for reading in READINGS:
        for n in _SHOTS:
            result = probe(given, train, reading=reading, shots=n, seed=seed)
            found[f"{reading}-{n}"] = {"mean": result.mean, "half_width_95": result.half_width}
    return found


def _features(setup: Setup, method: str) -> Features:
    fitted_to = "" if setup.pretrain is None else f"-after-{slug(setup.pretrain)}"
    name = f"{method}{fitted_to}-from-{slug(setup.weights or '')}.safetensors"
    path = setup.trained(slug(setup.data or "")) / "features" / name
    if not path.is_file():
        data = opened(setup, seed=0)
        train, test = images.drawn(data.train, _PROBED), images.drawn(data.test, _TESTED)
        found = features(_converted(opened(setup, 0, setup.pretrain), PRETRAINED[method]), train, test, workers=2)
        with replacing(path) as draft:
            save_file({name: getattr(found, name) for name in Features.__slots__}, draft)
    return Features(**load_file(path))


def _converted(given: Photographs, options: dict[str, Any] | None) -> nn.Module:
    return given.dense if options is None else given.converted(**options)


@study(
    "linear probes of frozen features",
    "features from ImageNet, frozen; a linear head trained for 5 and 10 epochs on CIFAR-10, CIFAR-100, Tiny-ImageNet.",
    _probe_described,
    every(_TABLE_2, _probed),
)
def few_shot(runs: Runs) -> Findings:
    """A row for each method, in both readings of "shot"."""
    words = {"images": "images a class", "epochs": "epochs"}
    titles = {f"{reading}-{n}": f"{n} {words[reading]}" for reading in READINGS for n in _SHOTS}
    header = ["method", "paper (5/10: CIFAR-10, Tiny-ImageNet)", *titles.values()]
    rows = [[LABELS[m], paper, *(runs.cell(m, key, "mean") for key in titles)] for m, paper in _TABLE_2.items()]
    pairs = [((OFFSETS, "ERMoE, exact"), (other, LABELS[other])) for other in ("v-moe", "dense")]
    pairs.append((("ermoe-clusters", "ERMoE, clusters"), ("dense", "dense")))
    sentences = [
        runs.verdict(*pair, key, "mean", what=title, form=".1%") for pair in pairs for key, title in titles.items()
    ]
    return Findings(header, rows, sentences)


_FREE = LABELS["v-moe"] + _NO_LIMIT
_TIMED = ("v-moe", "dense", OFFSETS, "ermoe-shared", "ermoe-clusters", "ermoe-clusters-k2", "one-low-rank")
_COSTS: dict[str, dict[str, Any] | None] = {
    _FREE: {"router": "v-moe", "eval_capacity_factor": None},
    **{LABELS[method]: PRETRAINED[method] for method in _TIMED},
}
"""What the table calls a model → how it is made sparse; V-MoE with all its work is what others are compared with."""


def _costs(setup: Setup) -> dict[str, Any]:
    """Parameters, operations, and the time of a forward pass of eight images, in turns."""
    given = opened(setup, seed=0)
    few = images.drawn(given.train, 200)  # whatever experts are fitted to, they cost the same
    given = Photographs(given.dense, few, given.test, given.seed, given.compute)
    batch = next(iter(given.plain()))[:8]
    found: dict[str, dict[str, float]] = {}
    work = {}
    for name, options in _COSTS.items():
        model = _converted(given, options)
        counted = count(model)
        found[name] = {
            "parameters": counted.total_parameters / 1e6,
            "active": counted.active_parameters / 1e6,
            "multiply_adds": counted.multiply_adds.total / 1e9,
        }
        work[name] = inferring(model.eval(), batch)
    for row in compare(take_turns(work, rounds=15), _FREE):
        found[row.name] |= {"seconds": row.seconds, "ratio": row.ratio, "low": row.ratio_low, "high": row.ratio_high}
    return found


@study(
    "parameters, operations and time of one image",
    "ViT-B/16 at 224 pixels with 8 experts; V-MoE with two experts a token in every second block.",
    lambda setup: f"{_described(setup)} Timed on this machine: 8 images, {torch.get_num_threads()} threads, in turns.",
    lambda setup: [Job("costs", 1, partial(_costs, setup))],
)
def efficiency(runs: Runs) -> Findings:
    """A row for each model."""
    header = [
        "model",
        "parameters M (active)",
        "multiply-adds G",
        "time ÷ V-MoE without limit (quartiles)",
        "time ÷ dense",
    ]
    (figures,) = (record["figures"] for record in runs.records)
    rows = []
    for name in _COSTS:
        if own := figures.get(name):
            row = [name, f"{own['parameters']:.1f} ({own['active']:.1f})", f"{own['multiply_adds']:.2f}"]
            row += [f"{own['ratio']:.2f} ({own['low']:.2f}–{own['high']:.2f})"]
            rows.append([*row, f"{own['ratio'] / figures[LABELS['dense']]['ratio']:.2f}"])
    return Findings(header, rows, ["The paper's inference times give ERMoE a ratio of 0.93 to V-MoE."])
