"""What the studies on images share: data, models trained once for all studies, and passes over the test images.

Letters: N images.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ermoe.analysis.recorder import RoutingRecorder, record_routing
from ermoe.data.augment import Batch, in_memory
from ermoe.data.images import Images, open_images, some_of
from ermoe.data.order import hashed
from ermoe.errors import UserError
from ermoe.files import StrPath
from ermoe.images.presets import IMAGE_LEVEL, ImageRecipe, recipe
from ermoe.images.run import LabelledImages, evaluate, transform_for
from ermoe.models.io import CONFIG, load, save
from ermoe.studies.paper.setup import Setup, slug
from ermoe.train.compute import Compute, Processes
from ermoe.train.loader import Loader
from ermoe.train.loop import train
from ermoe.train.run_folder import RunFolder

PAPER_RULE, OFFSETS = "ermoe-none", "ermoe"
"""The method as the paper has it, and with our offsets."""
_MINI_STEPS = 1300  # of a miniature on data of your own: two or three minutes on two cores
_MINI_SIDE = 32
_TINY_SIDE = 107  # of which a model of 96 pixels sees the middle
_TINY_TESTED = 5000
_WORKERS = 2  # where images are in files
_MOST_IN_MEMORY = 200_000
_NAMES = {"tiny": "DeiT-Tiny at 96 pixels", "full": "ViT-B/16"}
LABELS = {
    PAPER_RULE: "ERMoE (paper's rule)",
    OFFSETS: "ERMoE with offsets",
    "ermoe-mean": "ERMoE with mean offsets",
    "v-moe": "V-MoE",
    "soft": "Soft MoE",
    "base": "BASE",
    "expert-choice": "Expert choice",
    "dense": "dense ViT",
    "gate-loss-free": "loss-free gate",
    "emoe": "EMoE",
    "one-low-rank": "one low-rank expert",
    "ermoe-shared": "ERMoE, dense FFN kept",
    "ermoe-clusters": "ERMoE, clusters, k = 1",
    "ermoe-clusters-k2": "ERMoE, clusters, k = 2",
    "ermoe-clusters-shared": "ERMoE, clusters beside a shared network",
    "single-gated": "Single-gated MoE-style",
    "deep-moe": "DeepMoE-style",
}


@dataclass(frozen=True, slots=True)
class Variant:
    """One row of a table: a method of the presets, with options of the layer and of training that differ.

    ``prepare`` changes a freshly built or loaded model, for what no option can express.
    """

    name: str
    method: str = PAPER_RULE
    sparsity: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    prepare: Callable[[nn.Module], None] | None = None

    @property
    def key(self) -> str:
        """The same for variants that are trained in the same way, whatever a table calls them."""
        options = [f"{name}={value}" for name, value in sorted({**self.sparsity, **self.training}.items())]
        own = [slug(self.name)] if self.prepare is not None else []
        return "_".join([self.method, *options, *own])


_KEPT = (PAPER_RULE, OFFSETS, "v-moe", "emoe", "ermoe-clusters", "ermoe-clusters-k2", "ermoe-shared")
"""What studies on real weights look at during training: every quarter of it is kept."""
AS_PRINTED = Variant("Eq. 7 as printed", sparsity={"weight_floor": 1e-3})
"""Mixing weights in proportion to the scores: what the miniatures, which start from scratch, are spared otherwise."""


@dataclass(frozen=True, slots=True)
class Trained:
    """A model after training, in evaluation mode, its last evaluation, and the folder of its run."""

    model: nn.Module
    figures: dict[str, float]
    folder: Path


def source(setup: Setup, path: str | None = None) -> LabelledImages:
    """The images that a study is about: ``path``, else --data, else the digits that come with scikit-learn."""
    path = path or setup.data
    if path is None and setup.is_full:
        raise UserError("--scale full wants the real data: name its folder with --data")
    return _opened(path or "digits", setup.scale)


@lru_cache(maxsize=2)
def _opened(path: str, scale: str) -> LabelledImages:
    train, test = open_images(path, "train"), open_images(path, "test")
    if scale == "tiny":
        test = drawn(test, _TINY_TESTED)
    if scale != "full":
        side = _TINY_SIDE if scale == "tiny" else _MINI_SIDE
        train, test = _held(train, side), _held(test, side)
    return LabelledImages(slug(path), train, test)


def _held(images: Images, side: int) -> Images:
    """Images in files decoded once, at the size of the models, as long as there are not too many."""
    return images if len(images) > _MOST_IN_MEMORY else in_memory(images, side, shows_progress=True)


def drawn(images: Images, number: int) -> Images:
    """At most so many of the images, drawn by a hash, in their order."""
    if len(images) <= number:
        return images
    index_N = np.sort(np.argsort(hashed(number, np.arange(len(images))), kind="stable")[:number])
    return some_of(images, index_N, summary=f"{images.summary}, of which {number} drawn")


def describe(setup: Setup, **training: Any) -> str:
    """Data, model and budget, in a sentence, and where ERMoE departs from the paper, with these changes of training."""
    data, chosen = source(setup), base_recipe(setup, PAPER_RULE)
    chosen = replace(chosen, training=replace(chosen.training, **training))
    epochs = epochs_of(setup, chosen, data)
    size = _size(chosen) if setup.scale == "mini" else f"{_NAMES[setup.scale]}, experts in every second block"
    start = f"started from {setup.weights}" if setup.weights else "from scratch"
    return (
        f"{data.train.summary}; {data.test.summary}; {size}, 8 experts, {start}, {_budget(chosen, epochs)}, "
        f"{setup.in_seeds}."
        f"{_departures(chosen)}"
    )


def _budget(chosen: ImageRecipe, epochs: int) -> str:
    if chosen.epoch_steps:
        return f"{epochs * chosen.epoch_steps} steps of {chosen.training.batch_size} images"
    return f"{epochs} epochs"


def _departures(chosen: ImageRecipe) -> str:
    """In which options ERMoE's layer and training differ from the paper's; nothing where they do not."""
    sparsity, training = chosen.sparsity or {}, chosen.training
    found = []
    if sparsity.get("weight_floor", 0) >= 0.1:
        found.append(f"{sparsity['weight_floor']:g} is added to each chosen score in Eq. 7, so mixtures are more even")
    if not sparsity.get("context_grad", True):
        found.append("attention gets no gradient from routing")
    if training.basis_lr != 1:
        found.append(f"bases learn at {training.basis_lr:g} of the rate")
    if training.retract_every:
        found.append(f"bases are retracted every {training.retract_every} steps, not once an epoch")
    return f" ERMoE departs from the paper: {'; '.join(found)}." if found else ""


def _size(chosen: ImageRecipe) -> str:
    args = chosen.model_args
    tokens = (args["img_size"] // args["patch_size"]) ** 2
    return (
        f"a ViT of width {args['embed_dim']} and depth {args['depth']} at {args['img_size']} pixels "
        f"({tokens} patches), experts in blocks 1 and 3"
    )


def base_recipe(setup: Setup, method: str) -> ImageRecipe:
    """The preset that a method has at this scale: ViT-B/16 or ResNet-18, a miniature, or a toy for digits."""
    if setup.is_full and method == PAPER_RULE:
        return recipe("paper-ermoe")
    convolutional = method in IMAGE_LEVEL
    if setup.is_full:
        return recipe(f"resnet18-{method}" if convolutional else f"b16-{method}")
    if setup.is_tiny:
        return recipe(f"deit-tiny-{method}")
    if setup.data is None and setup.pretrain is None:
        return recipe(f"digits-{method}")
    return recipe(f"cifar-{method}" if convolutional else f"cifar17-{method}")


def recipe_of(setup: Setup, variant: Variant, seed: int, data: LabelledImages) -> ImageRecipe:
    """The recipe of one run."""
    chosen = base_recipe(setup, variant.method)
    sparsity = None if chosen.sparsity is None else {**chosen.sparsity, **variant.sparsity}
    if sparsity is not None and sparsity.get("experts") == "dense":  # plain weights have no rank
        sparsity.pop("rank", None)
    epochs = epochs_of(setup, chosen, data)
    share = epochs / chosen.training.epochs
    # Studies read the last epoch: no other is judged, and none is chosen.
    budget: dict[str, Any] = {"epochs": epochs, "evaluate_every": epochs, "seed": seed}
    budget["warmup_epochs"] = share * chosen.training.warmup_epochs
    if setup.is_tiny and variant.key in _KEPT:
        budget["keep_every"] = max(1, epochs // 4)
    training = replace(chosen.training, **{**budget, **variant.training})
    return replace(chosen, sparsity=sparsity, training=training, validation=0.0, weights=setup.weights)


def epochs_of(setup: Setup, chosen: ImageRecipe, data: LabelledImages) -> int:
    """--epochs, else the preset's; miniatures on data of your own have a budget of steps instead."""
    if setup.epochs is not None:
        return setup.epochs
    if setup.scale != "mini" or chosen.architecture in IMAGE_LEVEL or chosen.model_args["img_size"] < _MINI_SIDE:
        return chosen.training.epochs
    return max(2, round(_MINI_STEPS * chosen.training.batch_size / len(data.train)))


def trained(setup: Setup, variant: Variant, seed: int, data: LabelledImages) -> Trained:
    """A variant trained on ``data``, or taken from the folder where another study trained it."""
    chosen = recipe_of(setup, variant, seed, data)
    folder = setup.trained(data.path) / f"{variant.key}-{seed}"
    compute = setup.compute(workers=_WORKERS)
    if variant.prepare is not None or chosen.calibration:
        chosen = _starting_as(chosen, partial(started, setup, variant, seed, data))
    figures = train(chosen, data, folder, compute=compute)
    return Trained(loaded(RunFolder(folder).final, variant, compute.device), figures, folder)


def started(setup: Setup, variant: Variant, seed: int, data: LabelledImages) -> nn.Module:
    """A variant before training. One that is fitted to images, which takes a minute, is kept for other studies."""
    chosen = recipe_of(setup, variant, seed, data)
    if not chosen.calibration:
        model = chosen.build(len(data.classes), images=data.train)
        if variant.prepare is not None:
            variant.prepare(model)
        return model
    folder = setup.trained(data.path) / "started" / f"{variant.key}-{seed}"
    if not (folder / CONFIG).is_file():
        save(chosen.build(len(data.classes), images=data.train), folder)
    return loaded(folder, variant)


def _starting_as(chosen: ImageRecipe, start: Callable[[], nn.Module]) -> ImageRecipe:
    """The recipe whose models are made by ``start``."""

    class Started(ImageRecipe):
        __slots__ = ()

        def build(self, num_classes: int, **given: Any) -> nn.Module:
            return start()

    return Started(**{name: getattr(chosen, name) for name in ImageRecipe.__slots__})


def loaded(folder: StrPath, variant: Variant, device: torch.device | str = "cpu") -> nn.Module:
    """A saved model of a variant, ready for evaluation."""
    model = load(folder, device=device)
    if variant.prepare is not None:
        variant.prepare(model)
    return model.eval()


def loader_of(model: nn.Module, data: LabelledImages) -> Loader[Batch]:
    """The test images as the model wants them."""
    compute = Compute(Processes(device=next(model.parameters()).device), workers=_WORKERS)
    return Loader(transform_for(model).of(data.test), batch_size=250, compute=compute)


def examined(model: nn.Module, data: LabelledImages) -> tuple[dict[str, float], RoutingRecorder]:
    """Accuracy and loss on the test images, and the recording of their routing."""
    with record_routing(model, classes=data.test.classes) as recorder:
        figures = evaluate(model, loader_of(model, data), recorder)
    return figures, recorder


@torch.inference_mode()
def routed(model: nn.Module, data: LabelledImages) -> RoutingRecorder:
    """The routing of test images whose classes need not be the model's."""
    with record_routing(model, classes=data.test.classes) as recorder:
        for batch in loader_of(model, data):
            recorder.labels(batch.label)
            model(batch.image)
    return recorder


def mean_over_layers(recorder: RoutingRecorder, measure: str) -> float:
    """The mean of a measure over layers."""
    values = [figures[measure] for figures in recorder.summary().values()]
    return sum(values) / len(values)


def halves(data: LabelledImages) -> tuple[LabelledImages, LabelledImages]:
    """Two data sets of different classes: one to learn features from, one to probe them on."""
    middle = len(data.train.classes) // 2
    parts = (range(middle), range(middle, len(data.train.classes)))
    first, second = (
        LabelledImages(f"{data.path}-half{number}", chosen(data.train, classes), chosen(data.test, classes))
        for number, classes in enumerate(parts, 1)
    )
    return first, second


def chosen(images: Images, classes: Sequence[int]) -> Images:
    """Only the images of some classes, which are numbered anew."""
    index_N = torch.isin(images.label_N, torch.tensor(list(classes))).nonzero().squeeze(1)
    label_N = torch.searchsorted(torch.tensor(list(classes)), images.label_N[index_N])
    names = [images.classes[c] for c in classes]
    summary = f"{images.summary}, of which classes {names[0]} to {names[-1]}: {len(index_N)} images"
    return some_of(images, index_N.numpy(), summary=summary, classes=names, label_N=label_N)
