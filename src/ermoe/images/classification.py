"""The classification task: cross-entropy, accuracies, and what the routers do meanwhile."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from timm.data import resolve_model_data_config
from torch import Tensor, nn

from ermoe.analysis import measures
from ermoe.analysis.recorder import RoutingRecorder, record_routing
from ermoe.analysis.summary import over_layers
from ermoe.data.augment import NO_AUGMENTATION, Augmentation, Batch, Transform
from ermoe.data.images import Images
from ermoe.data.loader import Loader, some_batches
from ermoe.data.order import Order
from ermoe.errors import UserError
from ermoe.models.calibrate import settle_offsets
from ermoe.nn import moe_layers
from ermoe.train.distributed import Processes, sum_over_processes
from ermoe.train.settings import Training

_PROBE_IMAGES = 256
_PROBE_TOKENS = 2**16


class Classification:
    """Trains ``model`` to name the class of an image; see `ermoe.train.task.Task`."""

    goal = "top1"

    def __init__(
        self,
        model: nn.Module,
        train: Images,
        test: Images,
        settings: Training,
        *,
        augmentation: Augmentation = NO_AUGMENTATION,
        label_smoothing: float = 0.0,
        group: Processes | None = None,
        workers: int = 0,
    ) -> None:
        group = Processes() if group is None else group
        if train.classes != test.classes:
            raise UserError(f"{test.found}: its classes are not those of the training set; look at the path")
        self.model = model
        self.label_smoothing = label_smoothing
        self.classes = train.classes
        place: dict[str, Any] = {
            "rank": group.rank,
            "num_processes": group.num,
            "workers": workers,
            "device": group.device,
        }
        self.train_loader = Loader(
            train,
            transform_for(model, augmentation, settings.seed),
            Order(len(train), settings.batch_size, settings.seed),
            num_parts=settings.accumulate,
            **place,
        )
        self.test_loader = Loader(test, transform_for(model), batch_size=settings.batch_size, **place)
        # Drawn by a hash and read whole by every process: class folders come sorted, and a rank has only its share.
        drawn = Order(len(test), min(settings.batch_size, _PROBE_IMAGES, len(test)), seed=0)
        self._probe_loader = Loader(test, transform_for(model), drawn, device=group.device)
        self._probe: dict[str, Tensor] = {}

    @property
    def steps_per_epoch(self) -> int:
        assert self.train_loader.order is not None
        return self.train_loader.order.steps_per_epoch

    def batches(self, epoch: int, first_step: int) -> Iterator[list[Batch]]:
        return self.train_loader.epoch(epoch, first_step=first_step)

    def loss(self, network: nn.Module, batch: Batch) -> Tensor:
        """Cross-entropy; of a mixed image, that of both labels in proportion."""
        logit_BC = network(as_model(self.model, batch.image))
        if batch.other_label is None or batch.share is None:
            return F.cross_entropy(logit_BC, batch.label, label_smoothing=self.label_smoothing)
        smooth: dict[str, Any] = {"label_smoothing": self.label_smoothing, "reduction": "none"}
        own_B, other_B = (F.cross_entropy(logit_BC, label, **smooth) for label in (batch.label, batch.other_label))
        return torch.lerp(other_B, own_B, batch.share.to(own_B)).mean()

    def settle(self) -> None:
        """Offsets for images as they are, from some of the training set: the same ones on every process."""
        plain = some_batches(self.train_loader, transform_for(self.model))
        settle_offsets(self.model, (as_model(self.model, batch.image) for batch in plain))

    def evaluate(self) -> dict[str, float]:
        """Accuracies and loss on the test set and, of a sparse model, the routing of its images."""
        if not moe_layers(self.model):
            return evaluate(self.model, self.test_loader)
        with record_routing(self.model, classes=self.classes) as recorder:
            figures = evaluate(self.model, self.test_loader, recorder)
        return figures | self._routing(recorder)

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
        """By layer, which tokens of some test images use which expert, (P, E): the same images on every process."""
        order = self._probe_loader.order
        assert order is not None
        num_batches = -(-_PROBE_IMAGES // order.batch_size)
        with record_routing(self.model, probe_tokens=_PROBE_TOKENS) as recorder:
            for (batch,) in islice(self._probe_loader.epoch(), num_batches):
                self.model(as_model(self.model, batch.image))
        return {name: tally.probe().cpu().clone() for name, tally in recorder.tallies.items()}

    def state_dict(self) -> dict[str, Any]:
        """The experts of the probe at the last evaluation, for the routing fluctuation of the next."""
        return {"probe": self._probe}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._probe = state["probe"]


def transform_for(model: nn.Module, augmentation: Augmentation = NO_AUGMENTATION, seed: int = 0) -> Transform:
    """Images as the model wants them: its size, its mean and deviation, and when evaluating its share of the middle."""
    wants = resolve_model_data_config(model)
    patches: Any = getattr(model, "patch_embed", None)  # knows its size also where a preset changed it
    side = wants["input_size"][-1] if patches is None else patches.img_size[0]
    return Transform(side, augmentation, seed, tuple(wants["mean"]), tuple(wants["std"]), wants["crop_pct"])


@torch.no_grad()
def evaluate(model: nn.Module, loader: Loader, recorder: RoutingRecorder | None = None) -> dict[str, float]:
    """Loss, top-1 and top-5 accuracy over all images of a loader, on all processes; tells ``recorder`` the labels."""
    model.eval()
    sums = torch.zeros(4, dtype=torch.float64)
    for (batch,) in loader.epoch():
        if recorder is not None and len(batch):
            recorder.labels(batch.label)
        logit_BC = model(as_model(model, batch.image)).float()
        sums += _sums(logit_BC, batch.label).cpu()
    loss, top1, top5, count = sum_over_processes(sums.to(loader.device)).tolist()
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
