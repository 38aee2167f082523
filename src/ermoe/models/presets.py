"""Named models: each preset is a function of no arguments that says what it is and where its numbers come from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import timm
import torch
from torch import nn

import ermoe.models.vit  # noqa: F401 (its import tells timm of the sparse models)
from ermoe.errors import UserError
from ermoe.models.upcycle import Options, upcycle


@dataclass(frozen=True, slots=True)
class Preset:
    """A timm backbone and the options that make it sparse; ``sparsity=None`` leaves it dense."""

    architecture: str
    sparsity: Options | None
    args: Options = field(default_factory=dict)

    def build(
        self, *, device: torch.device | str = "cpu", generator: torch.Generator | None = None, **args: Any
    ) -> nn.Module:
        """The model with fresh weights; ``args`` go to timm, such as ``num_classes=10``."""
        with torch.device(device):
            model = timm.create_model(self.architecture, **{**self.args, **args})
        if self.sparsity is None:
            return model
        return upcycle(model, init="random", inplace=True, generator=generator, **self.sparsity)


def _paper_b16() -> Preset:
    """The paper's ViT-B/16: 8 experts, 2 a token, in blocks 1, 3, …, 11; T = 0.5, no offsets.

    The paper gives neither rank. R = 504 is the multiple of 8 that comes nearest to its 243.0 M parameters; r = 56
    lies in the middle of the range that fits its 1.169 G routing operations.
    """
    return Preset("vit_base_patch16_224", {"rank": 504, "route_rank": 56, "balance": "none"})


def _parity_b16() -> Preset:
    """ViT-B/16 at full rank, which equals a dense ViT-B/16 exactly after `ermoe.upcycle`."""
    return Preset("vit_base_patch16_224", {})


def _dense_experts_b16() -> Preset:
    """ViT-B/16 with plain expert weights beside a routing basis: exact parity at V-MoE's cost plus routing."""
    return Preset("vit_base_patch16_224", {"experts": "dense"})


def _v_moe_b16() -> Preset:
    """V-MoE B/16, every-2, 8 experts, 2 a token: the paper's main baseline."""
    return Preset("vit_base_patch16_224", {"router": "v-moe"})


def _vit_b16() -> Preset:
    """The dense ViT-B/16 that all of these start from."""
    return Preset("vit_base_patch16_224", None)


def _small_s16() -> Preset:
    """ViT-S/16 at full rank."""
    return Preset("vit_small_patch16_224", {})


def _tiny_ti16() -> Preset:
    """ViT-Ti/16 at full rank."""
    return Preset("vit_tiny_patch16_224", {})


PRESETS: dict[str, Callable[[], Preset]] = {
    "paper-b16": _paper_b16,
    "parity-b16": _parity_b16,
    "dense-experts-b16": _dense_experts_b16,
    "v-moe-b16": _v_moe_b16,
    "vit-b16": _vit_b16,
    "small-s16": _small_s16,
    "tiny-ti16": _tiny_ti16,
}


def preset(name: str) -> Preset:
    """The preset called ``name``.

    >>> preset("paper-b16").sparsity["rank"]
    504
    """
    if name not in PRESETS:
        raise UserError(f"there is no preset {name!r}: use one of {', '.join(PRESETS)}")
    return PRESETS[name]()
