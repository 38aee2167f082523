"""The options of a kind of layer, as frozen dataclasses whose fields are keywords of `ermoe.build_layer`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Unpack

from ermoe.nn.experts import Experts
from ermoe.nn.layer import MixtureLayer
from ermoe.nn.moe import MoE
from ermoe.nn.routers import OneWayRouter, Router, check_top_k
from ermoe.nn.start import Start


@dataclass(frozen=True)
class LayerSettings(ABC):
    """Everything that is to say about a layer beside its experts."""

    @abstractmethod
    def layer(self, dim: int, experts: Experts, shared: Experts | None = None, **start: Unpack[Start]) -> MixtureLayer:
        """The layer with these settings around the given experts, and one that every token meets."""


@dataclass(frozen=True)
class RouterSettings(LayerSettings):
    """The settings of a `MoE` layer, which are those of its router."""

    @abstractmethod
    def router(self, dim: int, num_experts: int, **start: Unpack[Start]) -> Router:
        """The router with these settings."""

    def layer(self, dim: int, experts: Experts, shared: Experts | None = None, **start: Unpack[Start]) -> MoE:
        if experts.num_experts == 1:
            check_top_k(getattr(self, "top_k", 1), num_experts=1)
            return MoE(OneWayRouter(), experts, shared)
        return MoE(self.router(dim, experts.num_experts, **start), experts, shared)
