"""A pretrained ViT with its photographs: converted, refined without labels, and judged beside the dense model."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ermoe
from ermoe.data.images import Images, open_images
from ermoe.data.order import Order
from ermoe.files import StrPath
from ermoe.images.conversion import PlainBatches, dense_model
from ermoe.images.presets import PRETRAINED
from ermoe.images.run import transform_for
from ermoe.models.calibrate import settle_offsets
from ermoe.nn import moe_layers
from ermoe.studies.paired import RIGHT, packed
from ermoe.train.compute import Compute
from ermoe.train.distillation import distill
from ermoe.train.loader import Loader
from ermoe.train.settings import Augmentation

_MOST_TO_FIT = 1000
AS_IT_IS: dict[str, Any] = {"layer_epochs": 0, "epochs": 0}
BY_LAYER: dict[str, Any] = {"layer_epochs": 3, "epochs": 0}
EXACT, CLUSTERS, ONE = (PRETRAINED[method] or {} for method in ("ermoe", "ermoe-clusters", "one-low-rank"))


@dataclass(slots=True)
class Photographs:
    """A dense model, photographs to convert it with, of which labels are not read, and others to judge by."""

    dense: nn.Module
    train: Images
    test: Images
    seed: int = 0
    compute: Compute = field(default_factory=Compute)

    @classmethod
    def open(cls, data: StrPath, architecture: str, weights: Path, seed: int, compute: Compute) -> Photographs:
        """The model of a file with weights, and both splits of a folder."""
        dense = dense_model(architecture, weights, compute)
        return cls(dense, open_images(data, "train"), open_images(data, "test"), seed, compute)

    def plain(self) -> PlainBatches:
        """Photographs as they are."""
        source = transform_for(self.dense).of(self.train)
        return PlainBatches(source, min(len(self.train), _MOST_TO_FIT), self.seed, self.compute)

    def varied(self) -> Loader[Any]:
        """Photographs mirrored and cropped, but not so much that they are others, to learn from."""
        transform = transform_for(self.dense, Augmentation(crop="resized", least_area=0.35), self.seed)
        return Loader(transform.of(self.train), Order(len(self.train), 32, self.seed), compute=self.compute)

    def converted(self, **options: Any) -> nn.Module:
        """The model made sparse in every second block, its experts fitted if they are small, and its loads settled."""
        is_fitted = options.get("init") == "clusters" or "rank" in options
        generator = torch.Generator().manual_seed(self.seed)
        batches = self.plain()
        model = ermoe.upcycle(self.dense, calibration=batches if is_fitted else None, generator=generator, **options)
        if not is_fitted:
            settle_offsets(model, batches)
        return model.eval()

    def refined(self, folder: Path, learning: Mapping[str, Any], **options: Any) -> tuple[nn.Module, dict[str, Any]]:
        """The same, after learning the dense model's answers; kept in a folder, from which it goes on if it stopped."""
        start = time.perf_counter()
        model: Any = self.converted(**options)
        seconds = time.perf_counter() - start
        errors = {layer: fit.error for layer, fit in model.group_fits.items()} or dict(model.output_error)
        if any(learning.values()):
            given: dict[str, Any] = {"calibration": self.plain(), "folder": folder, "compute": self.compute}
            distill(model, self.dense, self.varied(), **given, **learning)
        ermoe.save(model, folder / "model")
        return model, {"layer_errors": errors, "seconds_to_convert": seconds}

    @torch.no_grad()
    def judged(self, model: nn.Module, answers: nn.Module | None = None) -> dict[str, Any]:
        """Which photographs are named rightly, and named as the dense model does; operations, loads and drops.

        ``answers`` is another form of the model, one that cannot be counted, to ask instead.
        """
        answers = model if answers is None else answers
        right, same = [], []
        loader = Loader(transform_for(self.dense).of(self.test), batch_size=50, compute=self.compute)
        answers.eval()
        with ermoe.record_routing(model) if moe_layers(model) else nullcontext() as routing:
            for batch in loader:
                answer_B = answers(batch.image).argmax(1)
                right.append(answer_B == batch.label)
                same.append(answer_B == self.dense(batch.image).argmax(1))
        right_N = torch.cat(right).cpu().numpy()
        dense, counted = ermoe.count(self.dense), ermoe.count(model)
        layers = list(routing.summary().values()) if routing is not None else []
        return {
            "top1": float(right_N.mean()),
            "agreement": float(torch.cat(same).double().mean()),
            RIGHT: packed(right_N),
            "num_images": len(right_N),
            "operations": counted.multiply_adds.total / dense.multiply_adds.total,
            "parameters": counted.total_parameters / dense.total_parameters,
            "largest_load_cv2": max((layer["load_cv2"] for layer in layers), default=None),
            "drop_rate": max((layer["drop_rate"] for layer in layers), default=None),
        }
