"""Which expert every token had, kept token by token: what experts know about classes, and how steady choices are.

Letters: N images of S tokens, T = N·S tokens, E experts, C classes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from ermoe.analysis import measures
from ermoe.nn import Routing, moe_layers

_SHUFFLES = 5


@dataclass(slots=True)
class Choices:
    """Of one layer: which experts a token has, boolean (T, E), and the one that weighs most, (T,); E if it has none."""

    used_TE: Tensor
    top_T: Tensor

    def of_images(self, num_images: int) -> Tensor:
        """The expert that weighs most, by image and position, (N, S)."""
        return self.top_T.view(num_images, -1)


@contextmanager
def record_choices(model: nn.Module) -> Iterator[dict[str, Choices]]:
    """By layer, the choices of all tokens that pass within it; to be read after it.

    Memory grows with the tokens, by E + 1 bytes for each; see `ermoe.record_routing` for figures that need no tokens.

    >>> from ermoe.nn import EigenMoE
    >>> layer = EigenMoE(16, num_experts=4, score="energy", generator=torch.Generator().manual_seed(0))
    >>> with torch.no_grad(), record_choices(layer) as choices:
    ...     y = layer(torch.randn(8, 10, 16))
    >>> choices[""].of_images(8).shape, choices[""].used_TE.sum(1).unique().tolist()
    (torch.Size([8, 10]), [2])
    """
    layers = moe_layers(model)
    seen: dict[str, list[Choices]] = {name: [] for name in layers}
    observers = {name: partial(_keep, seen[name]) for name in layers}
    found: dict[str, Choices] = {}
    for name, layer in layers.items():
        layer.observers.append(observers[name])
    try:
        yield found
    finally:
        for name, layer in layers.items():
            layer.observers[:] = [observer for observer in layer.observers if observer is not observers[name]]
    for name, parts in seen.items():
        found[name] = Choices(torch.cat([p.used_TE for p in parts]), torch.cat([p.top_T for p in parts]))


def _keep(seen: list[Choices], routing: Routing) -> None:
    weight_TE = routing.dense_weights().detach()
    used_TE = weight_TE > 0
    top_T = torch.where(used_TE.any(1), weight_TE.argmax(1), routing.num_experts)
    seen.append(Choices(used_TE.cpu(), top_T.to("cpu", torch.uint8)))


def class_bits(top_NS: Tensor, label_N: Tensor, generator: torch.Generator) -> tuple[float, float]:
    """What the expert of a position tells about the class, in bits, and what it seems to when labels are shuffled.

    The second figure is what counting few images alone gives: only what lies above it is information.

    >>> top, label = torch.tensor([[0, 1], [1, 1]]).repeat(50, 1), torch.tensor([0, 1]).repeat(50)
    >>> bits, chance = class_bits(top, label, torch.Generator().manual_seed(0))
    >>> bits, chance < 0.05
    (0.5, True)
    """
    own = float(measures.class_information_by_position(top_NS, label_N))
    shuffles = (label_N[torch.randperm(len(label_N), generator=generator)] for _ in range(_SHUFFLES))
    chance = [float(measures.class_information_by_position(top_NS, shuffled_N)) for shuffled_N in shuffles]
    return own, sum(chance) / len(chance)
