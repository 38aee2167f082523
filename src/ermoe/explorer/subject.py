"""A model as the explorer shows it: its layers, its pictures as it sees them, its looks at them, its experts' cards.

Letters: S pixels of a side, T tokens, P patches, C classes.
"""

from __future__ import annotations

import base64
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from ermoe.analysis.plots import expert_colours
from ermoe.data.augment import Batch, Transform
from ermoe.data.images import ImagesInMemory
from ermoe.errors import UserError
from ermoe.explorer.cards import Cards
from ermoe.explorer.inspection import short
from ermoe.explorer.look import Change, Look, look
from ermoe.explorer.patches import patch_grid
from ermoe.explorer.pictures import Picture
from ermoe.nn import moe_layers
from ermoe.nn.layer import MixtureLayer
from ermoe.nn.routers import TopKRouter
from ermoe.nn.scores import EigenbasisScore, EnergyScore, LogitScore, PrototypeScore

_KEPT_LOOKS, _KEPT_PIXELS, _NAMED = 8, 32, 5
_COMPARED = {
    EigenbasisScore: "Each expert compares the patch with its context, where it looked, in its own subspace.",
    PrototypeScore: "Each expert compares the patch with a direction it has learned. Where the patch looked does not "
    "enter the score; it is shown all the same.",
    EnergyScore: "Each expert is scored by how much of the patch lies in its subspace.",
    LogitScore: "A learned gate scores the experts.",
}


class Subject:
    """One model under its name.

    Args:
        classes: names of its outputs; empty if they mean no classes.
        transform: how it wants pictures.
        labels: names of the labels that pictures have.
    """

    def __init__(
        self, name: str, model: nn.Module, transform: Transform, classes: Sequence[str], labels: Sequence[str]
    ) -> None:
        self.name, self.model, self.transform, self.classes = name, model.eval(), transform, list(classes)
        self.layers = moe_layers(model)
        if not self.layers:
            raise UserError(
                f"{name} has no mixture-of-experts layer to explore: take a sparse model, or make this one sparse "
                "with ermoe.upcycle"
            )
        side = transform.size
        self.grid_hw = patch_grid(model, torch.empty(1, 3, side, side))
        self.cards = Cards(model, self.grid_hw, labels)
        self._looks: OrderedDict[tuple[object, ...], Look] = OrderedDict()
        self._pixels: OrderedDict[str, Tensor] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def num_patches(self) -> int:
        """Of a picture."""
        return self.grid_hw[0] * self.grid_hw[1]

    def describe(self) -> dict[str, Any]:
        """What a page must know of the model before it looks at anything."""
        most = max(layer.experts.num_experts for layer in self.layers.values())
        return {
            "name": self.name,
            "grid": self.grid_hw,
            "colours": expert_colours(most),
            "layers": [_described(name, layer) for name, layer in self.layers.items()],
        }

    def pixels(self, picture: Picture) -> Tensor:
        """The picture as the model sees it, uint8 (3, S, S)."""
        with self._lock:
            kept = self._pixels.get(picture.name)
        if kept is None:
            alone = ImagesInMemory(
                picture.image_3HW[None],
                summary="a picture",
                split="test",
                classes=["", ""],
                label_N=torch.zeros(1).long(),
            )
            kept = self.transform.host(alone, np.zeros(1, np.int64), 0)[0]
            with self._lock:
                self._pixels[picture.name] = kept
                while len(self._pixels) > _KEPT_PIXELS:
                    self._pixels.popitem(last=False)
        return kept

    def drawn(self, picture: Picture) -> Image.Image:
        """The same as a picture to show."""
        return Image.fromarray(self.pixels(picture).permute(1, 2, 0).contiguous().numpy())

    def look(self, picture: Picture, change: Change, *, attention: bool = False) -> Look:
        """One pass, or what a pass has shown a moment ago. Not for several threads at once."""
        keys = [(picture.name, change.key(), True), (picture.name, change.key(), False)]
        kept = next((self._looks[key] for key in keys[: 1 if attention else 2] if key in self._looks), None)
        if kept is None:
            image = self._batch(self.pixels(picture)[None], np.zeros(1, np.int64), torch.tensor([-1])).image
            kept = look(self.model, image, change, attention=attention)
            self._looks[keys[0] if attention else keys[1]] = kept
            while len(self._looks) > _KEPT_LOOKS:
                self._looks.popitem(last=False)
        return kept

    def _batch(self, pixel_B3SS: Tensor, index_B: Any, label_B: Tensor) -> Batch:
        batch = self.transform.device(pixel_B3SS, label_B, index_B, 0)
        parameter = next(self.model.parameters())
        batch.image = batch.image.to(parameter.device, parameter.dtype)
        return batch

    def study(self, pictures: Sequence[Picture]) -> None:
        """Adds pictures of the data set to what the cards know. Not for several threads at once."""
        pixel_B3SS = torch.stack([self.pixels(picture) for picture in pictures])
        index_B = np.array([int(picture.name) for picture in pictures])
        label_B = torch.tensor([picture.label for picture in pictures])
        self.cards.add(self._batch(pixel_B3SS, index_B, label_B), pixel_B3SS)

    def told(self, seen: Look) -> dict[str, Any]:
        """A look for the page: numbers as the model has them, float32 in base64, (T, E) row by row."""
        return {
            "prediction": self.prediction(seen.output),
            "layers": [
                {
                    "weights": _packed(layer.weight_TE),
                    "scores": None if layer.score_TE is None else _packed(layer.score_TE),
                    "fell_back": None if layer.fell_back_T is None else layer.fell_back_T.int().tolist(),
                }
                for layer in seen.layers.values()
            ],
        }

    def prediction(self, output: Tensor) -> list[tuple[str, float]]:
        """The most probable classes with their probabilities; nothing of a model that knows no classes."""
        if not self.classes:
            return []
        chance, number = output.softmax(-1).topk(min(_NAMED, len(self.classes)))
        return [(self.classes[n], c) for n, c in zip(number.tolist(), chance.tolist(), strict=True)]


def _described(name: str, layer: MixtureLayer) -> dict[str, Any]:
    router, score = layer.router, layer.score
    is_steered = isinstance(router, TopKRouter)
    offsets = [0.0] * layer.experts.num_experts
    if isinstance(router, TopKRouter) and router.balance is not None:
        offsets = router.balance.offset_E.tolist()
    return {
        "id": name,
        "name": short(name),
        "experts": layer.experts.num_experts,
        "k": None if router is None else router.top_k,
        "T": None if router is None else router.threshold,
        "rule": router.below_threshold if isinstance(router, TopKRouter) else None,
        "offsets": offsets if is_steered else None,
        "compared": next((text for kind, text in _COMPARED.items() if isinstance(score, kind)), ""),
    }


def _packed(value: Tensor) -> str:
    return base64.b64encode(value.contiguous().numpy().astype("<f4").tobytes()).decode("ascii")
