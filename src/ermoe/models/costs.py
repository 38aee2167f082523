"""What sparsity costs: a preset beside the paper's figures, and the three ways from a dense model to a sparse one.

The paper's "FLOPs" are multiply-adds: its 26.3 G for V-MoE B/16 would be 52.6 G if multiplications and additions were
counted one by one. Figures here are multiply-adds too, half of what `ermoe.count` says.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ermoe.models.count import Count, count
from ermoe.models.presets import Preset


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
    """A number of parameters.

    >>> millions(86_567_656)
    '86.6 M'
    """
    return f"{number / 1e6:.1f} M"


def multiply_adds(flops: float) -> str:
    """Operations as billions of multiply-adds.

    >>> multiply_adds(35_127_656_448)
    '17.56 G'
    """
    return f"{flops / 2e9:.2f} G"


def count_preset(preset: Preset) -> Count:
    """Counts a preset without building its weights."""
    return count(preset.build(device="meta"))


def three_ways(preset: Preset) -> list[Way]:
    """The dense backbone of a preset made sparse at full rank, at two thirds of it, and with plain expert weights.

    V-MoE is the fourth row, for comparison. All have 8 experts in every second block, 2 a token.
    """
    backbone: Any = preset.build(device="meta")
    dim = backbone.embed_dim
    cut = 8 * (21 * dim // 256)  # the paper's 504 of 768
    options: dict[str, tuple[str, dict[str, Any]]] = {
        f"eigen, R = {dim}": ("exact", {}),
        f"eigen, R = {cut}": ("approximate", {"rank": cut}),
        "eigen, dense experts": ("exact", {"experts": "dense"}),
        "V-MoE": ("none", {"router": "v-moe"}),
    }
    return [
        Way(name, parity, count_preset(Preset(preset.architecture, sparsity, preset.args)))
        for name, (parity, sparsity) in options.items()
    ]


def parts(counted: Count) -> list[tuple[str, str, str]]:
    """Name, multiply-adds and share of every part of an image's cost."""
    total = counted.flops.total
    return [
        (name.replace("_", " "), multiply_adds(flops), f"{flops / total:.1%}")
        for name, flops in asdict(counted.flops).items()
        if flops
    ]
