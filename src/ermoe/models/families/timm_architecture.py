"""Writing down which timm model a model is, so that it can be built again.

timm remembers the name of an architecture and not the arguments it was created with. They are read off the model: every
property in which it differs from the plain architecture becomes an argument.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import timm
import torch
from timm.layers import GluMlp
from timm.models.vision_transformer import VisionTransformer
from torch import nn

import ermoe.models.vit  # noqa: F401 (its import tells timm of the sparse models)
from ermoe.errors import UserError
from ermoe.files import Json
from ermoe.models.backbones import dense_network

_ROTATION = ("temperature", "grid_offset", "grid_indexing", "shift_coords", "jitter_coords", "rescale_coords")
_FORBIDDEN = {"pretrained", "checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir"}


def _rate(module: nn.Module | None) -> float:
    """A dropout rate, whatever it drops."""
    for name in ("drop_prob", "prob", "p"):
        if hasattr(module, name):
            return float(f"{getattr(module, name):.6g}")  # timm spaces rates in float32
    return 0.0


def _mlp_ratio(model: Any) -> float:
    network: Any = dense_network(model.blocks[0])
    # VisionTransformer counts both halves of a packed gate as hidden width, Eva counts one.
    packed = isinstance(model, VisionTransformer) and isinstance(network, GluMlp)
    return float((2 if packed else 1) * network.fc2.in_features / model.embed_dim)


def _rope(name: str) -> Callable[[Any], Any]:
    """A reader of rotary positions; None for models, and for kinds of rotation, that have no such property."""

    def read(model: Any) -> Any:
        value = getattr(getattr(model, "rope", None), name, None)
        return list(value) if isinstance(value, tuple) else value

    return read


# Argument of timm.create_model -> how to read it off a model.
_PROPERTIES: dict[str, Callable[[Any], Any]] = {
    **{name: attrgetter(name) for name in ("num_classes", "global_pool", "embed_dim", "dynamic_img_size")},
    **{f"rope_{name}": _rope(name) for name in _ROTATION},
    "ref_feat_shape": _rope("ref_feat_shape"),
    "img_size": lambda m: list(m.patch_embed.img_size),
    "patch_size": lambda m: list(m.patch_embed.patch_size),
    "in_chans": lambda m: m.patch_embed.proj.in_channels,
    "depth": lambda m: len(m.blocks),
    "num_heads": lambda m: m.blocks[0].attn.num_heads,
    "mlp_ratio": _mlp_ratio,
    "dynamic_img_pad": lambda m: m.patch_embed.dynamic_img_pad,
    "pool_include_prefix": lambda m: getattr(m, "pool_include_prefix", False),
    "rope_rotate_half": lambda m: getattr(m.blocks[0].attn, "rotate_half", False),
    "drop_rate": lambda m: _rate(m.head_drop),
    "pos_drop_rate": lambda m: _rate(m.pos_drop),
    "patch_drop_rate": lambda m: _rate(m.patch_drop),
    "proj_drop_rate": lambda m: _rate(m.blocks[0].attn.proj_drop),
    "attn_drop_rate": lambda m: _rate(m.blocks[0].attn.attn_drop),
    "drop_path_rate": lambda m: _rate(m.blocks[-1].drop_path1),
}


def describe(model: Any) -> Json:
    """The architecture's name and the arguments in which this model differs from it."""
    architecture = (getattr(model, "pretrained_cfg", None) or {}).get("architecture")
    if not architecture:
        raise UserError(
            f"this {type(model).__name__} does not say which timm architecture it is: create it with timm.create_model"
        )
    plain = build({"architecture": architecture, "args": {}}, device="meta")
    args = {name: read(model) for name, read in _PROPERTIES.items() if read(model) != read(plain)}
    return {"architecture": architecture, "args": args}


def build(description: Json, *, device: str = "cpu") -> nn.Module:
    """The model a description means, freshly initialised."""
    architecture = description["architecture"]
    if ":" in architecture:
        raise UserError(f"{architecture!r} is the address of another model: name an architecture in config.json")
    forbidden = _FORBIDDEN & set(description["args"])
    if forbidden:
        raise UserError(f"a saved model may not set {', '.join(sorted(forbidden))}: remove it from config.json")
    args: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in description["args"].items()
    }
    with torch.device(device):
        return timm.create_model(architecture, **args)
