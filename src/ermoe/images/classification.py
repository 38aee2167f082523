"""The classification task: cross-entropy, accuracies, and what the routers do meanwhile."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from timm.data import resolve_model_data_config
from torch import Tensor, nn

from ermoe.analysis import measures
from ermoe.analysis.recorder import RoutingRecorder, record_routing
from ermoe.analysis.summary import over_layers
from ermoe.data.augment import Batch, Transform
from ermoe.data.augmentation import NO_AUGMENTATION, Augmentation
from ermoe.data.order import Order
from ermoe.errors import UserError
from ermoe.images.labelled import LabelledImages
from ermoe.images.presets import Recipe
from ermoe.nn import moe_layers
from ermoe.nn.basis import orthogonality_penalty, orthonormality_error
from ermoe.nn.orthogonality import bases
from ermoe.nn.sharding import own_experts
from ermoe.train.compute import Compute, sum_over_processes
from ermoe.train.loader import Loader, some_batches
from ermoe.train.settling import settle_on

_PROBE_IMAGES = 256
_PROBE_TOKENS = 2**16


class Classification:
    """Trains ``model`` to name the class of an image; see `ermoe.train.task.Task`.

    The best epoch is chosen by images that are held out of the training set; by test images nothing is chosen.
    """

    goal = "validation_top1"

    def __init__(self, model: nn.Module, data: LabelledImages, recipe: Recipe, compute: Compute) -> None:
        self.model = model
        self.recipe = recipe
        self.compute = compute
        self.classes = data.classes
        self.train_images, validation = data.without_validation(recipe.validation)
        training, plain = recipe.training, transform_for(model)
        self.train_loader = Loader(
            transform_for(model, recipe.augmentation, training.seed).of(self.train_images),
            Order(len(self.train_images), training.batch_size, training.seed),
            num_parts=training.accumulate,
            compute=compute,
        )
        self.test_loader = Loader(plain.of(data.test), batch_size=training.batch_size, compute=compute)
        self.validation_loader = (
            None
            if validation is None
            else Loader(plain.of(validation), batch_size=training.batch_size, compute=compute)
        )
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
            figures["fluctuation"] = statistics.fmean(_changed(self._probe[name], probe[name]) for name in probe)
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
    found = [own_experts(basis.detach()) for basis in bases(model)]
    if not found:
        return {}
    return {
        "drift": max(float(orthonormality_error(basis).max()) for basis in found),
        "penalty": sum(float(orthogonality_penalty(basis)) for basis in found),
    }


def transform_for(model: nn.Module, augmentation: Augmentation = NO_AUGMENTATION, seed: int = 0) -> Transform:
    """Images as the model wants them: its size, its mean and deviation, and when evaluating its share of the middle."""
    wants = resolve_model_data_config(model)
    patches: Any = getattr(model, "patch_embed", None)  # knows its size also where a preset changed it
    side = wants["input_size"][-1] if patches is None else patches.img_size[0]
    return Transform(side, augmentation, seed, tuple(wants["mean"]), tuple(wants["std"]), wants["crop_pct"])


@torch.no_grad()
def evaluate(model: nn.Module, loader: Loader[Batch], recorder: RoutingRecorder | None = None) -> dict[str, float]:
    """Loss, top-1 and top-5 accuracy over all images of a loader, on all processes; tells ``recorder`` the labels."""
    model.eval()
    sums = torch.zeros(4, dtype=torch.float64)
    for (batch,) in loader.epoch():
        if recorder is not None and len(batch):
            recorder.labels(batch.label)
        logit_BC = model(as_model(model, batch.image)).float()
        sums += _sums(logit_BC, batch.label).cpu()
    loss, top1, top5, count = sum_over_processes(sums.to(loader.compute.device)).tolist()
    if not math.isfinite(loss):
        raise UserError("the model's answers are not numbers: use an earlier checkpoint, or higher precision")
    return {"loss": loss / count, "top1": top1 / count, "top5": top5 / count}


def _sums(logit_BC: Tensor, label_B: Tensor) -> Tensor:
    best_BK = logit_BC.topk(min(5, logit_BC.shape[1])).indices
    hit_BK = best_BK == label_B.unsqueeze(1)
    loss = F.cross_entropy(logit_BC, label_B, reduction="sum")
    return torch.stack(
        [loss.double(), hit_BK[:, 0].sum(), hit_BK.any(1).sum(), label_B.new_tensor(len(label_B))]
    ).double()


def _changed(before_PE: Tensor, after_PE: Tensor) -> float:
    return float(measures.changed(before_PE, after_PE).float().mean())


def as_model(model: nn.Module, image_BCSS: Tensor) -> Tensor:
    """Images in the precision of the model's weights."""
    return image_BCSS.to(next(model.parameters()).dtype)
