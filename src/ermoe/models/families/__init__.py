"""The backbones that can be made sparse: one small adapter per family, found by where a model's class is defined."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any, Protocol, cast

from torch import nn

from ermoe.errors import UserError
from ermoe.models.ffn import FFN
from ermoe.models.sparse_block import SparseBlock
from ermoe.plain import Json


class Family(Protocol):
    """How one family of backbones is laid out. An adapter is a module with these names.

    Models and blocks of other libraries are `Any`: torch does not type the attributes of modules.
    """

    SPARSE_BLOCK: type[SparseBlock]

    def blocks(self, model: Any) -> list[tuple[str, nn.Module]]:
        """The transformer blocks from input to output, with their names in the model."""

    def refusal(self, block: Any) -> str | None:
        """Why this block cannot be made sparse, as the end of a sentence about it; None if it can."""

    def no_context(self, block: Any) -> str | None:
        """Why its attention cannot say where tokens looked; None if it can."""

    def ffn(self, block: Any) -> FFN:
        """The feed-forward network of a dense block, as views of its parameters."""

    def num_tokens(self, model: Any) -> int:
        """Length of the sequence at the model's own image size."""

    def image_size(self, model: Any) -> tuple[int, ...]:
        """The model's own size of images (height, width) or volumes."""

    def describe(self, model: Any) -> Json:
        """What it takes to build the model's dense form again, as plain as JSON."""

    def build(self, description: Json, *, device: str = "cpu") -> nn.Module:
        """The dense model a description means, freshly initialised."""


# Name in config.json -> the adapter, and the modules that define its models' classes or their bases. Those of
# applications are known by their address alone: loading such a model imports its application, and nothing else does.
FAMILIES: dict[str, tuple[str, ...]] = {
    "timm_vit": ("ermoe.models.families.timm_vit", "timm.models.vision_transformer"),
    "timm_eva": ("ermoe.models.families.timm_eva", "timm.models.eva"),
    "torchvision_vit": ("ermoe.models.families.torchvision_vit", "torchvision.models.vision_transformer"),
    "hugging_face_vit": ("ermoe.models.families.hugging_face_vit", "transformers.models.vit.modeling_vit"),
    "volume": ("ermoe.models.families.volume", "ermoe.models.vit3d"),
    "clip": ("ermoe.retrieval.clip.adapter", "ermoe.retrieval.clip.model"),
    "whole": (
        "ermoe.models.families.whole",
        "ermoe.brain.rivals.sfcn",
        "ermoe.brain.rivals.swin3d",
        "ermoe.images.rivals.single_gated",
        "ermoe.images.rivals.deep_moe",
    ),
}
_NAMES = {home: name for name, (_, *homes) in FAMILIES.items() for home in homes}


def family_name(model: nn.Module) -> str:
    """The family of a model, as a saved model calls it.

    >>> import timm
    >>> family_name(timm.create_model("test_vit"))
    'timm_vit'
    """
    for base in type(model).__mro__:
        if base.__module__ in _NAMES:
            return _NAMES[base.__module__]
    raise UserError(
        f"{type(model).__module__}.{type(model).__name__} is no backbone ermoe knows: use a timm VisionTransformer or "
        "Eva, a torchvision VisionTransformer, a Hugging Face ViT or ermoe's ViT3D, or put ermoe.EigenMoE into blocks "
        "of your own"
    )


def family_of(model: nn.Module) -> Family:
    """The adapter for a model."""
    return family_named(family_name(model))


def family_named(name: str) -> Family:
    """The adapter of the name that a saved model gives.

    >>> family_named("timm_vit").__name__
    'ermoe.models.families.timm_vit'
    """
    if name not in FAMILIES:
        raise UserError(f"config.json names the unknown backbone family {name!r}: ermoe knows {', '.join(FAMILIES)}")
    adapter, home, *_ = FAMILIES[name]
    try:
        return cast(Family, import_module(adapter))
    except ImportError as problem:
        library = home.partition(".")[0]
        raise UserError(f"this version of {library} is not one ermoe knows ({problem}): upgrade {library}") from problem


def named_blocks(model: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """The children of the container at a dotted path, with their full names."""
    for name, block in model.get_submodule(path).named_children():
        yield f"{path}.{name}", block
