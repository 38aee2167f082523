"""DeiT-Tiny's weights, made sparse in every way and fine-tuned on the same images in the same order (scale tiny).

Every run is judged once, by the same test images: who is right, who goes where, and what it costs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ermoe.analysis import plots
from ermoe.analysis.choices import class_bits, record_choices
from ermoe.analysis.plots import Curve, Scale, curves
from ermoe.analysis.recorder import RoutingRecorder, record_routing
from ermoe.explorer.inspection import pooled_share
from ermoe.files import read_json, to_json, write_json
from ermoe.images.run import LabelledImages, as_model, transform_for
from ermoe.models.count import count
from ermoe.nn import moe_layers
from ermoe.nn.rivals.vmoe import VMoERouter
from ermoe.studies.bench.measure import compare, take_turns
from ermoe.studies.bench.step import training_step_of
from ermoe.studies.figures import Runs, mean
from ermoe.studies.paired import RIGHT, Judged, apart, packed, paired_verdict
from ermoe.studies.paper import images
from ermoe.studies.paper.images import LABELS, OFFSETS, PAPER_RULE, Trained, Variant
from ermoe.studies.paper.setup import Setup
from ermoe.studies.paper.study import Findings, Job, every, study
from ermoe.train.loop import settle_on

_NO_LIMIT, _WITHOUT = "no limit", ", no limit at inference"
TIMES = "times"
"""The run that times a step of every method, in turns."""
_METHODS = ("dense", "v-moe", "gate-loss-free", "emoe", PAPER_RULE, OFFSETS, "ermoe-shared")
_FITTED = ("ermoe-clusters", "ermoe-clusters-k2", "ermoe-clusters-shared", "one-low-rank")
CONTEST = {method: LABELS[method] for method in (*_METHODS, *_FITTED)}
"""Methods of the contest and what its table calls them, in its order."""


def judged(model: nn.Module, data: LabelledImages) -> dict[str, Any]:
    """Which test images a model names rightly and, of a sparse one, where their tokens go."""
    if not moe_layers(model):
        return answers(model, data)
    with record_routing(model, classes=data.classes) as recorder, record_choices(model) as choices:
        figures = answers(model, data, recorder)
    layers = recorder.summary()
    names = ("load_cv2", "weight_cv2", "max_load", "drop_rate", "fallback_rate", "spread")
    generator = torch.Generator().manual_seed(0)
    label_N = data.test.label_N
    bits = {layer: class_bits(own.of_images(len(label_N)), label_N, generator) for layer, own in choices.items()}
    return {
        **figures,
        **{name: images.mean_over_layers(recorder, name) for name in names},
        "largest_load_cv2": max(layer["load_cv2"] for layer in layers.values()),
        "share": pooled_share(list(recorder.tallies.values())),
        "class_bits": mean([own for own, _ in bits.values()]),
        "shuffled_bits": mean([chance for _, chance in bits.values()]),
        "bits_by_layer": bits,
    }


@torch.no_grad()
def answers(model: nn.Module, data: LabelledImages, recorder: RoutingRecorder | None = None) -> dict[str, Any]:
    """Accuracy, and which test images are named rightly; tells ``recorder`` their classes."""
    model.eval()
    right = []
    for batch in images.loader_of(model, data):
        if recorder is not None:
            recorder.labels(batch.label)
        right.append((model(as_model(model, batch.image)).argmax(1) == batch.label).cpu())
    right_N = torch.cat(right).numpy()
    return {"top1": float(right_N.mean()), RIGHT: packed(right_N), "num_images": len(right_N)}


@contextmanager
def no_limit(model: nn.Module) -> Iterator[bool]:
    """Within it, V-MoE's experts take every token at inference; says whether there is anything to lift."""
    routers = [layer.router for layer in moe_layers(model).values() if isinstance(layer.router, VMoERouter)]
    before = [(router, router.settings) for router in routers]
    try:
        for router, settings in before:
            router.settings = replace(settings, eval_capacity_factor=None)
        yield bool(routers)
    finally:
        for router, settings in before:
            router.settings = settings


def contested(setup: Setup, variant: Variant, seed: int) -> dict[str, Any]:
    """A method at the end of fine-tuning, V-MoE also without a limit, and a sparse one before it started.

    It is written beside the run, for other studies.
    """
    data = images.source(setup)
    result = images.trained(setup, variant, seed, data)
    path = result.folder / "judged.json"
    if not path.is_file():
        write_json(path, to_json(_judged(setup, variant, seed, result)))
    return dict(read_json(path, "remove it"))


def _judged(setup: Setup, variant: Variant, seed: int, result: Trained) -> dict[str, Any]:
    data = images.source(setup)
    found = {**judged(result.model, data), "size": _size(result.model)}
    found |= {name: result.figures[name] for name in ("loss", "drift", "penalty") if name in result.figures}
    with no_limit(result.model) as has_limit:
        if has_limit:
            found[_NO_LIMIT] = judged(result.model, data)
    if moe_layers(result.model):
        found["start"] = _at_start(setup, variant, seed, data)
    return found


def _at_start(setup: Setup, variant: Variant, seed: int, data: LabelledImages) -> dict[str, Any]:
    """What experts tell about the class before training, offsets settled; its classifier is fresh and not judged."""
    device = setup.compute().device
    model = images.started(setup, variant, seed, data).to(device)
    settle_on(model, transform_for(model).of(data.train), device)
    names = ("load_cv2", "largest_load_cv2", "class_bits", "shuffled_bits", "bits_by_layer")
    return {name: value for name, value in judged(model, data).items() if name in names}


def _size(model: nn.Module) -> dict[str, float]:
    counted = count(model)
    return {
        "operations": 2 * counted.multiply_adds.total,  # as records have it
        "parameters": counted.total_parameters,
    }


def _timed(setup: Setup, methods: Sequence[str], rounds: int) -> dict[str, Any]:
    """A training step of every method over the dense model's, in turns."""
    data = images.source(setup)
    steps: dict[str, Callable[[], object]] = {}
    for method in methods:
        model = images.started(setup, Variant(method, method), 1, data)
        size = images.base_recipe(setup, method).training.batch_size
        loader = replace(images.loader_of(model, data), batch_size=size)
        batch = next(iter(loader))
        steps[method] = training_step_of(model, itertools.repeat((batch.image, batch.label)))
    return {row.name: row.ratio for row in compare(take_turns(steps, rounds=rounds, warmup=1), methods[0])}


def _jobs(setup: Setup) -> list[Job]:
    timing = Job(TIMES, 1, partial(_timed, setup, list(CONTEST), 5))
    return [*every(CONTEST, lambda setup, name, seed: contested(setup, Variant(name, name), seed))(setup), timing]


@study(
    "fine-tuning from the same pretrained weights",
    "ViT-B/16 from ImageNet weights; ERMoE 88.03 % on ImageNet-1K, V-MoE 87.41.",
    images.describe,
    _jobs,
)
def finetune(runs: Runs) -> Findings:
    """A row for each method, V-MoE also without a limit at inference, compared in pairs with dense and with V-MoE."""
    header = ["method", "accuracy", "over dense", "over V-MoE", "operations ÷ dense", "parameters ÷ dense"]
    header += ["step time ÷ dense", "load CV²", "dropped", "class bits (shuffled)", "at the start"]
    rows = []
    for method, label in CONTEST.items():
        rows.append(_row(runs, method, label))
        if runs.of(method, _NO_LIMIT, "top1"):
            rows.append(_row(runs, method, label + _WITHOUT, _NO_LIMIT))
    return Findings(header, rows, _on_contest(runs))


def _row(runs: Runs, method: str, label: str, *path: str) -> list[str]:
    row = [label, runs.cell(method, *path, "top1")]
    row += [points(runs, (method, *path), (other,)) for other in ("dense", "v-moe")]
    for name in ("operations", "parameters"):
        ratio = runs.mean(method, "size", name) / runs.mean("dense", "size", name)
        row.append(f"{ratio:.2f}" if ratio == ratio else "–")
    row += [runs.cell(TIMES, method, style=".2f"), runs.cell(method, *path, "load_cv2", style=".3f")]
    row.append(runs.cell(method, *path, "drop_rate", style=".1%"))
    return [*row, bits_cell(runs, method, *path), bits_cell(runs, method, "start")]


def points(runs: Runs, ours: Judged, theirs: Judged) -> str:
    """The cell of a paired difference."""
    found = apart(runs, ours, theirs)
    return "–" if found is None else str(found)


def bits_cell(runs: Runs, method: str, *path: str) -> str:
    """Bits about the class that experts tell given the position, and those that shuffled labels seem to."""
    own = runs.of(method, *path, "class_bits")
    return f"{mean(own):.3f} ({runs.mean(method, *path, 'shuffled_bits'):.3f})" if own else "–"


def information(runs: Runs, method: str, *path: str) -> float:
    """What lies above the bits of shuffled labels."""
    return runs.mean(method, *path, "class_bits") - runs.mean(method, *path, "shuffled_bits")


def _on_contest(runs: Runs) -> list[str]:
    ours = [method for method in CONTEST if method.startswith("ermoe") and runs.of(method, "top1")]
    if not ours:
        return []
    best = max(ours, key=lambda method: runs.mean(method, "top1"))
    name = ((best,), f"the best of ERMoE ({LABELS[best]})")
    rivals = {"V-MoE": ("v-moe",), "V-MoE without a limit": ("v-moe", _NO_LIMIT), "dense": ("dense",)}
    sentences = [paired_verdict(runs, name, (rival, label)) for label, rival in rivals.items()]
    one = (("one-low-rank",), "one low-rank expert")
    clusters = {"ermoe-clusters": "clusters, k = 1", "ermoe-clusters-shared": "clusters beside a shared network"}
    sentences += [paired_verdict(runs, ((method,), label), one) for method, label in clusters.items()]
    at_start = {LABELS[method]: information(runs, method, "start") for method in ours}
    told = ", ".join(f"{label} {bits:.3f}" for label, bits in at_start.items())
    return [*sentences, f"Bits about the class given the position, above shuffled labels, at the start: {told}."]


_FIGURE_4 = {
    "base": ("near uniform", "#667085"),
    "soft": ("tail grows with depth", "#2563eb"),
    "v-moe": ("pronounced tail", "#8b5fbf"),
    "gate-loss-free": ("–", "#0891b2"),
    "emoe": ("–", "#65a30d"),
    PAPER_RULE: ("nearly flat", plots.ACCENT),
    OFFSETS: ("–", "#d97706"),
    "ermoe-shared": ("–", "#be185d"),
    "ermoe-clusters": ("–", "#7c2d12"),
}


@study(
    "how evenly experts are used on test images",
    "128 experts (16 layers × 8; a ViT-B has 12 blocks) on Tiny-ImageNet and ImageNet; curves without numbers.",
    images.describe,
    every(_FIGURE_4, lambda setup, name, seed: contested(setup, Variant(name, name), seed)),
)
def balance(runs: Runs) -> Findings:
    """A row for each method, and all experts of all layers sorted by usage."""
    header = ["method", "paper", "load CV²", "largest of a layer", "weight CV²", "max / mean load", "dropped"]
    header += ["accuracy", "class bits (shuffled)", "at the start"]
    rows, lines = [], {}
    for method, (paper, _) in _FIGURE_4.items():
        if not runs.of(method, "top1"):
            continue
        rows.append([LABELS[method], paper, *_loads(runs, method)])
        if runs.of(method, _NO_LIMIT, "top1"):
            rows.append([LABELS[method] + _WITHOUT, "–", *_loads(runs, method, _NO_LIMIT)])
        share = [mean(own) for own in zip(*runs.of(method, "share"), strict=True)]  # type: ignore[arg-type]
        lines[LABELS[method]] = Curve(range(1, len(share) + 1), [len(share) * own for own in share])
    colours = [colour for method, (_, colour) in _FIGURE_4.items() if LABELS[method] in lines]
    scale = Scale("experts of all layers, busiest first", "load / mean load", whole_x=True)
    ours = (PAPER_RULE, "the paper's rule")
    pairs = [(("v-moe", "V-MoE"), ours), (("base", "BASE"), ours), (ours, (OFFSETS, "offsets"))]
    sentences = [runs.verdict(*pair, "load_cv2", what="load CV²") for pair in pairs]
    return Findings(header, rows, sentences, curves(lines, colours, scale))


def _loads(runs: Runs, method: str, *path: str) -> list[str]:
    loads = [runs.cell(method, *path, name, style=".3f") for name in ("load_cv2", "largest_load_cv2", "weight_cv2")]
    row = [*loads, runs.cell(method, *path, "max_load", style=".2f")]
    row += [runs.cell(method, *path, "drop_rate", style=".1%"), runs.cell(method, *path, "top1")]
    return [*row, bits_cell(runs, method, *path), bits_cell(runs, method, "start")]


_SUPPLEMENT_13 = {"expert-choice": "78.95", PAPER_RULE: "88.03", OFFSETS: "–", "dense": "–"}


@study(
    "accuracy of expert choice beside ERMoE",
    "ImageNet, the settings of Table 1; 9.1 points between the two.",
    images.describe,
    every(_SUPPLEMENT_13, lambda setup, name, seed: contested(setup, Variant(name, name), seed)),
)
def expert_choice(runs: Runs) -> Findings:
    """A row for each method."""
    header = ["method", "paper: top-1", "accuracy", "over expert choice", "load CV²"]
    rows = []
    for method, paper in _SUPPLEMENT_13.items():
        row = [LABELS[method], paper, runs.cell(method, "top1"), points(runs, (method,), ("expert-choice",))]
        rows.append([*row, runs.cell(method, "load_cv2", style=".3f")])
    return Findings(
        header, rows, [paired_verdict(runs, ((PAPER_RULE,), "ERMoE"), (("expert-choice",), "expert choice"))]
    )
