"""The adapter of networks that are saved and loaded like any other, but have no blocks to make sparse."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

from torch import nn

from ermoe.errors import UserError
from ermoe.files import Json
from ermoe.models.backbones import Family, SparseBlock
from ermoe.nn.ffn import FFN

# Class in config.json -> the address of what builds it.
_BUILDERS = {
    "SFCN": "ermoe.brain.rivals.sfcn:SFCN",
    "Swin3D": "ermoe.brain.rivals.swin3d:Swin3D",
    "SingleGatedMoEStyle": "ermoe.images.rivals.image_level:image_level",
    "DeepMoEStyle": "ermoe.images.rivals.image_level:image_level",
}


class Whole(Family):
    """No blocks, no tokens, images of any size."""

    sparse_block = SparseBlock

    def blocks(self, model: Any) -> list[tuple[str, nn.Module]]:
        return []

    def ffn(self, block: Any) -> FFN:
        raise AssertionError("a network without blocks was asked for the feed-forward network of one")

    def num_tokens(self, model: Any) -> int:
        return 0

    def image_size(self, model: Any) -> tuple[int, ...]:
        return ()

    def describe(self, model: Any) -> Json:
        """The class and the arguments of its constructor, those that can be changed as they are now."""
        name = type(model).__name__
        if not hasattr(model, "config"):
            raise UserError(
                f"this {name} was built from a network of your own and cannot be written down: build it with "
                "ermoe.images.rivals.image_level.image_level, or save its state_dict"
            )
        now = {name: getattr(model, name) for name in inspect.signature(type(model)).parameters if hasattr(model, name)}
        return {"class": name, **model.config, **now, "num_classes": model.num_classes}

    def build(self, description: Json, *, device: str = "cpu") -> nn.Module:
        arguments = {name: value for name, value in description.items() if name != "class"}
        # Built on the CPU first: MONAI reads numbers from tensors while it builds, which the meta device does not have.
        module, _, builder = _BUILDERS[description["class"]].partition(":")
        network: nn.Module = getattr(import_module(module), builder)(**arguments)
        return network.to(device)


FAMILY = Whole()
