"""The adapter of networks that are saved and loaded like any other, but have no blocks to make sparse."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

from torch import nn

from ermoe.errors import UserError
from ermoe.models.ffn import FFN
from ermoe.models.sparse_block import SparseBlock
from ermoe.plain import Json

SPARSE_BLOCK = SparseBlock
# Class in config.json -> the address of what builds it.
_BUILDERS = {
    "SFCN": "ermoe.brain.rivals.sfcn:SFCN",
    "Swin3D": "ermoe.brain.rivals.swin3d:Swin3D",
    "SingleGatedMoEStyle": "ermoe.images.rivals.image_level:image_level",
    "DeepMoEStyle": "ermoe.images.rivals.image_level:image_level",
}


def blocks(model: Any) -> list[tuple[str, nn.Module]]:
    """None."""
    return []


def refusal(block: Any) -> str | None:
    """There is no block to refuse."""
    return "it has no transformer blocks"


def no_context(block: Any) -> str | None:
    """There is no attention to ask."""
    return "it has no attention"


def ffn(block: Any) -> FFN:
    """No block has one."""
    raise AssertionError("a network without blocks was asked for the feed-forward network of one")


def num_tokens(model: Any) -> int:
    """No tokens."""
    return 0


def image_size(model: Any) -> tuple[int, ...]:
    """Any size."""
    return ()


def describe(model: Any) -> Json:
    """The class and the arguments of its constructor, those that can be changed as they are now."""
    if not hasattr(model, "config"):
        raise UserError(
            f"this {type(model).__name__} was built from a network of your own and cannot be written down: build it "
            "with ermoe.images.rivals.image_level.image_level, or save its state_dict"
        )
    now = {name: getattr(model, name) for name in inspect.signature(type(model)).parameters if hasattr(model, name)}
    return {"class": type(model).__name__, **model.config, **now, "num_classes": model.num_classes}


def build(description: Json, *, device: str = "cpu") -> nn.Module:
    """The network a description means, freshly initialised."""
    arguments = {name: value for name, value in description.items() if name != "class"}
    # Built on the CPU first: MONAI reads numbers from tensors while it builds, which the meta device does not have.
    module, _, builder = _BUILDERS[description["class"]].partition(":")
    network: nn.Module = getattr(import_module(module), builder)(**arguments)
    return network.to(device)
