"""What timm's backbones share: feed-forward networks, plain, gated, or gated with both maps packed into one."""

from __future__ import annotations

from typing import Any

from timm.layers import GluMlp, Mlp, SwiGLU
from torch import nn

from ermoe.models.ffn import FFN, Linear


def refusal(mlp: Any) -> str | None:
    """Why this network cannot become experts; None if it can."""
    if type(mlp) not in (Mlp, GluMlp, SwiGLU):
        return f"its feed-forward network is a {type(mlp).__name__}; ermoe knows Mlp, GluMlp and SwiGLU"
    if not isinstance(mlp.norm, nn.Identity):
        return "its feed-forward network has an inner norm, which experts do not have"
    if not isinstance(mlp.fc2, nn.Linear):
        return "its feed-forward network is made of convolutions"
    if mlp.drop1.p != mlp.drop2.p:
        return "its feed-forward network has two different dropout rates"
    return None


def read(mlp: Any, norm: nn.Module) -> FFN:
    """The network as views of its parameters."""
    shared: dict[str, Any] = {"act": mlp.act, "norm": norm, "drop": mlp.drop1.p, "down": Linear.of(mlp.fc2)}
    kind = type(mlp)
    if kind is SwiGLU:
        return FFN(up=Linear.of(mlp.fc1_x), gate=Linear.of(mlp.fc1_g), **shared)
    if kind is GluMlp:
        half = mlp.fc1.out_features // 2
        first, second = Linear.of(mlp.fc1, slice(0, half)), Linear.of(mlp.fc1, slice(half, None))
        up, gate = (first, second) if mlp.gate_last else (second, first)
        return FFN(up=up, gate=gate, **shared)
    return FFN(up=Linear.of(mlp.fc1), **shared)


def no_weights(attn: nn.Module) -> str:
    """Why an attention module that no adapter knows cannot give a context."""
    return (
        f"its {type(attn).__name__} has no attention weights to average a context with; "
        "use score='prototype' or score='energy', which need none"
    )


def of_block(block: Any) -> FFN:
    """A block's dense feed-forward network, with the norm before it."""
    return read(block.mlp, block.norm2)
