"""Named models, and what they cost beside the paper's figures.

The paper's "FLOPs" are multiply-adds: its 26.3 G for V-MoE B/16 would be 52.6 G if multiplications and additions were
counted one by one. Figures here, and of `ermoe.count`, are multiply-adds too.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import timm
import torch
from torch import nn

import ermoe.models.vit  # noqa: F401 (its import tells timm of the sparse models)
from ermoe.errors import unknown_name
from ermoe.models.count import Count, count
from ermoe.models.merge import merge
from ermoe.models.upcycle import Options, upcycle


@dataclass(frozen=True, slots=True)
class Preset:
    """A timm backbone and the options that make it sparse; ``sparsity=None`` leaves it dense.

    ``about`` says what it is and where its numbers come from.
    """

    architecture: str
    sparsity: Options | None
    args: Options = field(default_factory=dict)
    about: str = ""

    def build(
        self, *, device: torch.device | str = "cpu", generator: torch.Generator | None = None, **args: Any
    ) -> nn.Module:
        """The model with fresh weights; ``args`` go to timm, such as ``num_classes=10``."""
        with torch.device(device):
            model = timm.create_model(self.architecture, **{**self.args, **args})
        if self.sparsity is None:
            return model
        return upcycle(model, init="random", inplace=True, is_new=True, generator=generator, **self.sparsity)


_B16 = "vit_base_patch16_224"
PRESETS: dict[str, Preset] = {
    "paper-b16": Preset(
        _B16,
        {"rank": 504, "route_rank": 56, "balance": "none"},
        about="The paper's ViT-B/16: 8 experts, 2 a token, in blocks 1, 3, …, 11; T = 0.5, no offsets. The paper gives "
        "neither rank. R = 504 is the multiple of 8 that comes nearest to its 243.0 M parameters; r = 56 lies in the "
        "middle of the range that fits its 1.169 G routing operations.",
    ),
    "parity-b16": Preset(
        _B16, {}, about="ViT-B/16 at full rank, which equals a dense ViT-B/16 exactly after `ermoe.upcycle`."
    ),
    "dense-experts-b16": Preset(
        _B16,
        {"experts": "dense"},
        about="ViT-B/16 with plain expert weights beside a routing basis: exact parity at V-MoE's cost plus routing.",
    ),
    "v-moe-b16": Preset(
        _B16, {"router": "v-moe"}, about="V-MoE B/16, every-2, 8 experts, 2 a token: the paper's main baseline."
    ),
    "vit-b16": Preset(_B16, None, about="The dense ViT-B/16 that all of these start from."),
    "huge-h14": Preset(
        "vit_huge_patch14_224",
        {"num_experts": 64, "rank": 840},
        {"num_classes": 1000},
        about="ViT-H/14 with 64 experts of rank 840 in every second block: a model for a cluster; see --cluster.",
    ),
    "small-s16": Preset("vit_small_patch16_224", {}, about="ViT-S/16 at full rank."),
    "tiny-ti16": Preset("vit_tiny_patch16_224", {}, about="ViT-Ti/16 at full rank."),
}


def preset(name: str) -> Preset:
    """The preset called ``name``.

    >>> preset("paper-b16").sparsity["rank"]
    504
    """
    if name not in PRESETS:
        raise unknown_name("preset", name, PRESETS)
    return PRESETS[name]


@dataclass(frozen=True, slots=True)
class _Published:
    """Figures that the paper prints: parameters in millions, multiply-adds in billions."""

    total: float
    active: float
    multiply_adds: float
    routing: float | None = None


PAPER = {
    "paper-b16": _Published(total=243.0, active=113.2, multiply_adds=23.6, routing=1.169),
    "v-moe-b16": _Published(total=284.9, active=129.9, multiply_adds=26.3),
}

WHAT_DOES_NOT_FIT = (
    "The paper's total for V-MoE is that of 8 experts in 6 of 12 blocks; its total for ERMoE fits rank 504 there. "
    "Its active parameters fit neither: with 2 experts a token V-MoE B/16 has 114.9 M, not 129.9 M. "
    "Nor do its 16 layers of experts (a ViT-B has 12 blocks) and its routing memory of E·d·r²."
)


@dataclass(frozen=True, slots=True)
class Way:
    """One way to make a dense model sparse, and what it costs."""

    name: str
    parity: str
    count: Count


def millions(number: float) -> str:
    """A number of parameters, in millions unless it is small.

    >>> millions(86_567_656), millions(52_310)
    ('86.6 M', '52.3 k')
    """
    return f"{number / 1e6:.1f} M" if number >= 1e5 else f"{number / 1e3:.1f} k"


def multiply_adds(number: float) -> str:
    """A number of them, in billions unless it is small.

    >>> multiply_adds(17_563_828_224), multiply_adds(2_600_000), multiply_adds(480)
    ('17.56 G', '2.60 M', '0.48 k')
    """
    size, unit = next(
        (size, unit) for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")) if number >= size / 10 or size == 1e3
    )
    return f"{number / size:.2f} {unit}"


def count_preset(preset: Preset) -> Count:
    """Counts a preset without building its weights."""
    return count(preset.build(device="meta"))


def ways(preset: Preset) -> list[Way]:
    """The dense backbone of a preset made sparse at full rank, the same merged, at two thirds of it, with plain expert
    weights, and with the dense network shared.

    V-MoE is the last row, for comparison. All have 8 experts in every second block, 2 a token.
    """
    backbone: Any = preset.build(device="meta")
    dim = backbone.embed_dim
    cut = 8 * (21 * dim // 256)  # the paper's 504 of 768
    options: dict[str, tuple[str, dict[str, Any]]] = {
        f"eigen, R = {dim}": ("exact", {}),
        f"eigen, R = {cut}": ("approximate", {"rank": cut}),
        "eigen, dense experts": ("exact", {"experts": "dense"}),
        f"dense shared, eigen, R = {dim // 4}": ("exact", {"shared": "dense"}),
        "V-MoE": ("none", {"router": "v-moe"}),
    }
    found = []
    for name, (parity, sparsity) in options.items():
        model = Preset(preset.architecture, sparsity, preset.args).build(device="meta")
        found.append(Way(name, parity, count(model)))
        if not sparsity:
            found.append(Way("the same, merged to answer", parity, count(merge(model))))
    return found


def parts(counted: Count) -> list[tuple[str, str, str]]:
    """Name, multiply-adds and share of every part of an image's cost."""
    total = counted.multiply_adds.total
    return [
        (name.replace("_", " "), multiply_adds(work), f"{work / total:.1%}")
        for name, work in asdict(counted.multiply_adds).items()
        if work
    ]
