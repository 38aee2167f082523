"""Image classification from a preset and a data set to a finished run: the data, the model, the task, and `train`."""

from __future__ import annotations

import logging
import math
import os
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import timm
import torch
import torch.nn.functional as F
from timm.data import resolve_model_data_config
from torch import Tensor, nn

import ermoe.models.vit  # noqa: F401 (its import tells timm of the sparse models)
from ermoe.analysis import measures
from ermoe.analysis.recorder import RoutingRecorder, record_routing
from ermoe.analysis.summary import over_layers
from ermoe.data.augment import Batch, Transform
from ermoe.data.images import Images, open_images, some_of
from ermoe.data.order import hashed
from ermoe.data.shard_order import order_of
from ermoe.errors import UserError
from ermoe.files import Json, StrPath
from ermoe.images.conversion import PlainBatches
from ermoe.images.presets import IMAGE_LEVEL, ImageRecipe, recipe
from ermoe.images.rivals.image_level import image_level
from ermoe.models.freeze import CLASSIFIERS
from ermoe.models.io import load
from ermoe.models.upcycle import restart_ffns, upcycle
from ermoe.models.weights.foreign import load_weights
from ermoe.nn import moe_layers
from ermoe.nn.basis import orthonormality_error
from ermoe.nn.orthogonality import bases, orthogonality_loss
from ermoe.nn.precision import double, widest
from ermoe.nn.sharding import over_processes, own_experts
from ermoe.train import loop
from ermoe.train.compute import Compute, Processes, sum_over_processes
from ermoe.train.loader import Loader, some_batches
from ermoe.train.loop import settle_on
from ermoe.train.run_folder import RunFolder, model_folder
from ermoe.train.settings import NO_AUGMENTATION, Augmentation, changed

_VALIDATION = 0x5EED  # a stream of numbers that no epoch draws from
_PROBE_IMAGES = 256
_PROBE_TOKENS = 2**16


def train(
    preset: str | ImageRecipe,
    data: StrPath,
    folder: StrPath,
    *,
    compute: Compute | None = None,
    resume: str = "auto",
    **changes: Any,
) -> dict[str, float]:
    """Trains a preset on a data set in a run folder, or goes on with the run there; returns the last evaluation.

    Args:
        preset: a name of `ermoe.images.presets.PRESETS`, or a recipe of your own.
        data: a path or name for `ermoe.open_images`.
        folder: of the run; `evaluate`, `predict` and `ermoe.load` take it.
        compute: processes, device, workers and console; its fields may also be given one by one.
        resume: see `ermoe.train.loop.fit`.
        changes: fields of the recipe, such as ``weights``, or of its training that are to differ.
    """
    compute, changes = loop.means_among(changes, compute)
    chosen = changed(recipe(preset) if isinstance(preset, str) else preset, changes)
    run = RunFolder(Path(folder))
    with run.locked(compute.group):
        images = LabelledImages.open(data)
        compute.say(f"{images.train.summary}\n{images.test.summary}")
        is_new = compute.group.is_main and not run.last.is_file()
        if is_new and chosen.init == "dense" and chosen.weights is None:
            logging.getLogger("ermoe").warning(
                "%s is made to start from pretrained weights and starts from random ones: give --weights FILE, or timm",
                chosen.preset,
            )
        return loop.train(chosen, images, folder, compute=compute, resume=resume)


@dataclass(frozen=True, slots=True)
class LabelledImages:
    """Both splits of a data set; see `ermoe.train.loop.TrainingData`."""

    path: str
    train: Images
    test: Images

    def __post_init__(self) -> None:
        if self.train.classes != self.test.classes:
            raise UserError(f"{self.test.summary}: its classes are not those of the training set; look at the path")

    @classmethod
    def open(cls, path: StrPath) -> LabelledImages:
        """What `ermoe.open_images` finds at ``path``."""
        return cls(os.fspath(path), open_images(path, "train"), open_images(path, "test"))

    @property
    def classes(self) -> list[str]:
        """Their names."""
        return self.train.classes

    def identity(self) -> Json:
        """Where they are, and how many."""
        return {"data": self.path, "num_images": len(self.train), "num_classes": len(self.classes)}

    def beside(self) -> dict[str, list[str]]:
        """The names of the classes, which `ermoe image predict` shows."""
        return {"classes.json": self.classes}

    def without_validation(self, share: float) -> tuple[Images, Images | None]:
        """The training images less those held out to choose the best epoch, and those; the same for every seed.

        >>> train, validation = LabelledImages.open("digits").without_validation(0.1)
        >>> len(train), len(validation)
        (1078, 120)
        """
        count = round(share * len(self.train))
        if count == 0:
            return self.train, None
        order = np.argsort(hashed(_VALIDATION, np.arange(len(self.train))), kind="stable")
        return some_of(self.train, np.sort(order[count:])), some_of(self.train, np.sort(order[:count]))


def build(recipe: ImageRecipe, num_classes: int, images: Images | None = None) -> nn.Module:
    """The model of a recipe, its experts fitted to ``images`` if it says so; random numbers follow from the seed."""
    torch.manual_seed(recipe.training.seed)
    if recipe.architecture in IMAGE_LEVEL:
        if recipe.weights is not None:
            raise UserError(
                f"weights={recipe.weights}: {recipe.architecture} networks start from scratch; leave the option out"
            )
        return image_level(recipe.architecture, num_classes=num_classes, **recipe.model_args)
    generator = torch.Generator().manual_seed(recipe.training.seed)
    model = _dense(recipe, generator, num_classes=num_classes)
    if recipe.sparsity is None:
        return model
    is_fresh = recipe.init in ("same", "random")  # which would draw networks anew that weights were given for
    is_new = is_fresh and recipe.weights is None
    init = "dense" if is_fresh and not is_new else recipe.init
    options = {"init": init, "generator": generator, "inplace": True, "is_new": is_new, **recipe.sparsity}
    if not recipe.calibration:
        return upcycle(model, **options)
    if images is None:
        raise UserError(f"{recipe.preset}: its experts are fitted to training images; pass images=")
    # Tokens are weighed by what they mean for the answer, of which a fresh classifier knows nothing.
    knowing: Any = _dense(recipe, generator)
    batches = PlainBatches(transform_for(knowing).of(images), recipe.calibration, recipe.training.seed, Compute())
    sparse: Any = upcycle(knowing, calibration=batches, **options)
    sparse.reset_classifier(num_classes)
    sparse.head.load_state_dict(model.head.state_dict())
    return cast(nn.Module, sparse)


def _dense(recipe: ImageRecipe, generator: torch.Generator, **classes: Any) -> Any:
    """The dense model of a recipe, by default with as many classes as its architecture is known for."""
    model = _timm_model(recipe, **classes)
    if recipe.init == "same" and recipe.weights is None:
        restart_ffns(model, generator)
    if recipe.weights is not None and recipe.weights != "timm":
        _start_from(model, recipe.weights)
    return model


def _timm_model(recipe: ImageRecipe, **classes: Any) -> nn.Module:
    pretrained = recipe.weights == "timm"
    try:
        return timm.create_model(recipe.architecture, pretrained=pretrained, **classes, **recipe.model_args)
    except OSError as problem:  # what every failure to reach the hub is
        if not pretrained:
            raise
        raise UserError(
            f"weights=timm: timm's weights of {recipe.architecture} cannot be fetched ({type(problem).__name__}); "
            "connect to the network, or give a file with weights"
        ) from problem


def _start_from(model: nn.Module, weights: str) -> None:
    """Loads everything but a classifier for other classes, which stays fresh."""
    fit = load_weights(model, weights, strict=False)
    if lacking := [name for name in fit.missing if not name.startswith("head.")]:
        raise UserError(f"{weights} lacks {lacking[0]} ({len(lacking)} such): it holds weights of another model")
    if fit.missing:
        logging.getLogger("ermoe").warning("%s has a classifier for other classes: ours starts afresh", weights)


class Classification(loop.Task):
    """Trains ``model`` to name the class of an image; see `ermoe.train.loop.Task`.

    The best epoch is chosen by images that are held out of the training set; by test images nothing is chosen.
    """

    goal = "validation_top1"

    def __init__(self, model: nn.Module, data: LabelledImages, recipe: ImageRecipe, compute: Compute) -> None:
        self.model = model
        self.recipe = recipe
        self.compute = compute
        self.classes = data.classes
        self.lr_scales = {f"{name}.": recipe.head_lr for name in CLASSIFIERS}
        self.train_images, validation = data.without_validation(recipe.validation)
        training, plain = recipe.training, transform_for(model)
        self.train_loader = Loader(
            transform_for(model, recipe.augmentation, training.seed).of(self.train_images),
            order_of(
                self.train_images, training.batch_size, training.seed, shuffle=recipe.shuffle, steps=recipe.epoch_steps
            ),
            num_parts=training.accumulate,
            compute=compute,
        )
        judged: dict[str, Any] = {"batch_size": training.batch_size, "compute": compute}
        self.test_loader = Loader(plain.of(data.test), **judged)
        self.validation_loader = None if validation is None else Loader(plain.of(validation), **judged)
        self._probe: dict[str, Tensor] = {}
        self._drift: dict[str, float] = {}

    @property
    def steps_per_epoch(self) -> int:
        return self.train_loader.steps_per_epoch

    def batches(self, epoch: int, first_step: int) -> Iterator[list[Batch]]:
        """The epoch's batches; then, before the bases are retracted, how far they have drifted is written down."""
        yield from self.train_loader.epoch(epoch, first_step=first_step)
        self._drift = drift(self.model)

    def loss(self, network: nn.Module, batch: Batch) -> Tensor:
        """Cross-entropy; of a mixed image, that of both labels in proportion."""
        logit_BC = network(as_model(self.model, batch.image))
        if batch.other_label is None or batch.share is None:
            return F.cross_entropy(logit_BC, batch.label, label_smoothing=self.recipe.label_smoothing)
        smooth: dict[str, Any] = {"label_smoothing": self.recipe.label_smoothing, "reduction": "none"}
        own_B, other_B = (F.cross_entropy(logit_BC, label, **smooth) for label in (batch.label, batch.other_label))
        return torch.lerp(other_B, own_B, batch.share.to(own_B)).mean()

    def settle(self) -> str | None:
        """Offsets for images as they are, from some of the training set: the same ones on every process."""
        return settle_on(self.model, transform_for(self.model).of(self.train_images), self.compute.device)

    def evaluate(self) -> dict[str, float]:
        """Accuracies and loss on test and validation images and, of a sparse model, the routing of test images."""
        figures = {}
        if self.validation_loader is not None:
            chosen_by = evaluate(self.model, self.validation_loader)
            figures = {f"validation_{name}": chosen_by[name] for name in ("loss", "top1")}
        if not moe_layers(self.model):
            return evaluate(self.model, self.test_loader) | figures
        with record_routing(self.model, classes=self.classes) as recorder:
            judged = evaluate(self.model, self.test_loader, recorder)
        return judged | figures | self._drift | self._routing(recorder)

    def _routing(self, recorder: RoutingRecorder) -> dict[str, float]:
        layers = recorder.reduce().summary()
        figures = over_layers(layers)
        probe = self._experts_of_probe()
        if all(name in self._probe and self._probe[name].shape == used.shape for name, used in probe.items()):
            changed = (measures.changed(self._probe[name], used) for name, used in probe.items())
            figures["fluctuation"] = statistics.fmean(float(changed_P.float().mean()) for changed_P in changed)
        self._probe = probe
        for layer, measured in layers.items():
            figures |= {f"{layer}/{name}": value for name, value in measured.items() if not math.isnan(value)}
        return figures

    @torch.no_grad()
    def _experts_of_probe(self) -> dict[str, Tensor]:
        """By layer, which tokens of some test images use which expert, (P, E): the same images on every process.

        They are drawn by a hash, because class folders come sorted, and a process has only its share of them.
        """
        size = min(self.recipe.training.batch_size, _PROBE_IMAGES, len(self.test_loader.source))
        drawn = some_batches(self.test_loader.source, self.compute.device, num_items=_PROBE_IMAGES, batch_size=size)
        with record_routing(self.model, probe_tokens=_PROBE_TOKENS) as recorder:
            for batch in drawn:
                self.model(as_model(self.model, batch.image))
        return {name: tally.probe().cpu().clone() for name, tally in recorder.tallies.items()}

    def state_dict(self) -> dict[str, Any]:
        """The experts of the probe at the last evaluation, for the routing fluctuation of the next."""
        return {"probe": self._probe}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._probe = state["probe"]


@torch.no_grad()
def drift(model: nn.Module) -> dict[str, float]:
    """Worst spectral error and summed squared Frobenius error of all bases; nothing for a model without any."""
    found = list(bases(model))
    if not found:
        return {}
    return {"drift": max(_worst_error(basis) for basis in found), "penalty": float(orthogonality_loss(model))}


def _worst_error(basis: Tensor) -> float:
    """Of all experts; a process may hold none of them."""
    own_E = orthonormality_error(own_experts(basis.detach()))
    return float(over_processes(own_E.max() if len(own_E) else own_E.new_zeros(()), basis, "max"))


def transform_for(model: nn.Module, augmentation: Augmentation = NO_AUGMENTATION, seed: int = 0) -> Transform:
    """Images as the model wants them: its size, its mean and deviation, and when evaluating its share of the middle."""
    wants = resolve_model_data_config(model)
    patches: Any = getattr(model, "patch_embed", None)  # knows its size also where a preset changed it
    side = wants["input_size"][-1] if patches is None else patches.img_size[0]
    return Transform(side, augmentation, seed, tuple(wants["mean"]), tuple(wants["std"]), wants["crop_pct"])


@torch.no_grad()
def evaluate(
    model: nn.Module | StrPath,
    data: Loader[Batch] | Images | StrPath,
    recorder: RoutingRecorder | None = None,
    *,
    batch_size: int = 100,
    compute: Compute | None = None,
) -> dict[str, float]:
    """``loss``, ``top1`` and ``top5`` accuracy of a classifier, on all processes.

    Args:
        model: a run folder, a model folder, a repository of the hub, or the model itself.
        data: a folder or name for `ermoe.open_images`, whose test split is taken; images; or a loader of them.
        recorder: of `ermoe.record_routing`, which is told the labels.
        batch_size: images at a time, unless there is a loader.
        compute: device and workers, unless there is a loader; a model that is given stays where it is.
    """
    if isinstance(data, Loader):
        return _evaluate(model if isinstance(model, nn.Module) else opened(model, data.compute), data, recorder)
    images = data if isinstance(data, Images) else open_images(data, "test")
    if isinstance(model, nn.Module):
        compute, own = compute or Compute(Processes(device=next(model.parameters()).device)), model
    else:
        from ermoe.images.predicting import check_classes

        compute = compute or Compute()
        own = opened(model, compute)
        check_classes(os.fspath(model), own.num_classes, images.summary, images.classes)
    return _evaluate(own, Loader(transform_for(own).of(images), batch_size=batch_size, compute=compute), recorder)


def opened(model: StrPath, compute: Compute) -> Any:
    """The model of a run folder, a model folder or a repository of the hub."""
    return load(model_folder(model), device=compute.device)


def _evaluate(model: nn.Module, loader: Loader[Batch], recorder: RoutingRecorder | None) -> dict[str, float]:
    model.eval()
    device = loader.compute.device
    sums = torch.zeros(4, dtype=torch.float64)
    for batch in loader:
        if recorder is not None and len(batch):
            recorder.labels(batch.label)
        logit_BC = model(as_model(model, batch.image)).float()
        sums += _sums(logit_BC, batch.label).cpu()
    loss, top1, top5, count = sum_over_processes(sums.to(device, widest(device))).tolist()
    if not math.isfinite(loss):
        raise UserError("the model's answers are not numbers: use an earlier checkpoint, or higher precision")
    return {"loss": loss / count, "top1": top1 / count, "top5": top5 / count}


def _sums(logit_BC: Tensor, label_B: Tensor) -> Tensor:
    best_BK = logit_BC.topk(min(5, logit_BC.shape[1])).indices
    hit_BK = best_BK == label_B.unsqueeze(1)
    loss = F.cross_entropy(logit_BC, label_B, reduction="sum")
    return double(torch.stack([loss, hit_BK[:, 0].sum(), hit_BK.any(1).sum(), label_B.new_tensor(len(label_B))]))


def as_model(model: nn.Module, image_BCSS: Tensor) -> Tensor:
    """Images in the precision of the model's weights."""
    return image_BCSS.to(next(model.parameters()).dtype)
