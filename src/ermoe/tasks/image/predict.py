"""The classes of single images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from ermoe.data.images import ImagesInFiles
from ermoe.data.loader import Loader
from ermoe.tasks.image.classification import transform_for


@dataclass(frozen=True, slots=True)
class Prediction:
    """The most probable classes of one image, best first."""

    image: str
    classes: list[str]
    probabilities: list[float]


@torch.inference_mode()
def predict(model: nn.Module, paths: Sequence[str], classes: Sequence[str], *, top: int = 5) -> list[Prediction]:
    """What the model sees in each file."""
    unlabelled = torch.zeros(len(paths), dtype=torch.long)
    found = f"{len(paths)} files"
    images = ImagesInFiles(Path(), paths, found=found, split="test", classes=classes, label_N=unlabelled)
    model.eval()
    device = next(model.parameters()).device
    predictions: list[Prediction] = []
    for (batch,) in Loader(images, transform_for(model), batch_size=16, device=device).epoch():
        chance_BK, class_BK = model(batch.image).float().softmax(-1).topk(min(top, len(classes)))
        for chance_K, class_K in zip(chance_BK.tolist(), class_BK.tolist(), strict=True):
            names = [classes[number] for number in class_K]
            predictions.append(Prediction(paths[len(predictions)], names, chance_K))
    return predictions
