"""Eigen-reparameterized mixtures of experts: sparse transformers that route by their experts' own bases.

Names are resolved on first use, so that ``ermoe --help`` does not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ermoe.nn import EigenMoE, MoE, Routing, no_weight_decay, orthogonality_loss, retract, update_balance

__version__ = "0.1.0.dev0"

_HOME = {
    "EigenMoE": "ermoe.nn",
    "MoE": "ermoe.nn",
    "Routing": "ermoe.nn",
    "no_weight_decay": "ermoe.nn",
    "orthogonality_loss": "ermoe.nn",
    "retract": "ermoe.nn",
    "update_balance": "ermoe.nn",
}

__all__ = ["EigenMoE", "MoE", "Routing", "no_weight_decay", "orthogonality_loss", "retract", "update_balance"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'ermoe' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
