"""Every layer by its name: one line a method, and one function that builds any of them.

A method that routes tokens is a `Router` class in a file of its own and a line in `LAYERS`. Dispatch, experts and all
keywords of experts come with `routed_by`; the router's own keywords are read from its constructor.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from inspect import Parameter, Signature
from typing import Any

import torch
from torch import nn

from ermoe.nn.experts import Experts, dense_experts, eigen_experts
from ermoe.nn.moe import EigenMoE, MoE
from ermoe.nn.rivals.base import BaseRouter
from ermoe.nn.rivals.cosine import CosineRouter
from ermoe.nn.rivals.expert_choice import ExpertChoiceRouter
from ermoe.nn.rivals.loss_free import LossFreeRouter
from ermoe.nn.rivals.soft import SoftMoE
from ermoe.nn.rivals.vmoe import VMoERouter
from ermoe.nn.routers import Router

Factory = Callable[..., nn.Module]


def build_experts(
    dim: int,
    hidden_dim: int | None = None,
    *,
    num_experts: int = 8,
    experts: str = "dense",
    rank: int | None = None,
    same_start: bool = False,
    gated: bool = False,
    act_layer: Callable[[], nn.Module] = nn.GELU,
    bias: bool = True,
    drop: float = 0.0,
    generator: torch.Generator | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Experts:
    """Experts of width ``hidden_dim`` (4·dim by default): the keywords that all rivals share.

    Args:
        experts: "dense" (plain weights) or "eigen" (U diag(s) Vᵀ).
        rank: of eigen experts; min(dim, hidden_dim) by default.
        same_start: all experts start from one and the same draw, as V-MoE's do.
        gated: SwiGLU-like experts, act(x Wg) · (x Wu).
        act_layer, bias, drop: of the experts' MLPs.
        generator: source of all random numbers of the initialisation.
    """
    hidden_dim = 4 * dim if hidden_dim is None else hidden_dim
    if num_experts < 1:
        raise ValueError(f"num_experts={num_experts}: need at least one expert")
    mlp: dict[str, Any] = {"gated": gated, "act_layer": act_layer, "bias": bias, "drop": drop}
    mlp |= {"num_experts": num_experts, "generator": generator, "device": device, "dtype": dtype}
    if experts == "dense":
        built = dense_experts(dim, hidden_dim, **mlp)
    elif experts == "eigen":
        built = eigen_experts(dim, hidden_dim, rank=min(dim, hidden_dim) if rank is None else rank, **mlp)
    else:
        raise ValueError(f"experts={experts!r}: use 'eigen' or 'dense'")
    if same_start:
        built.same_start = True
        built.reset_parameters(generator)
    return built


def mixing(layer: Callable[..., nn.Module], **defaults: Any) -> Factory:
    """A factory for ``layer(dim, experts, **own)``: its keywords are those of experts and the layer's own."""
    of_experts, of_layer = _keywords(build_experts), _keywords(layer)

    def factory(dim: int, hidden_dim: int | None = None, **options: Any) -> nn.Module:
        options = defaults | options
        experts = build_experts(dim, hidden_dim, **{k: v for k, v in options.items() if k in of_experts})
        own = {k: v for k, v in options.items() if k not in of_experts or k in of_layer}
        return layer(dim, experts, **own)

    own_keywords = [keyword for name, keyword in of_layer.items() if name not in of_experts]
    keywords = [k.replace(default=defaults.get(k.name, k.default)) for k in (*own_keywords, *of_experts.values())]
    positional = [p for p in inspect.signature(factory).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    factory.__signature__ = Signature([*positional, *keywords])  # type: ignore[attr-defined]
    return factory


def routed_by(router: Callable[..., Router], **defaults: Any) -> Factory:
    """A factory for the `MoE` layer that ``router(dim, num_experts=E, **own)`` routes."""

    def layer(dim: int, experts: Experts, **own: Any) -> MoE:
        return MoE(router(dim, num_experts=experts.num_experts, **own), experts)

    keywords = [keyword for name, keyword in _keywords(router).items() if name != "num_experts"]
    layer.__signature__ = Signature(keywords)  # type: ignore[attr-defined]
    return mixing(layer, **defaults)


def _keywords(function: Callable[..., Any]) -> dict[str, Parameter]:
    parameters = inspect.signature(function).parameters
    return {name: parameter for name, parameter in parameters.items() if parameter.kind is Parameter.KEYWORD_ONLY}


LAYERS: dict[str, Factory] = {
    "eigen": EigenMoE,
    "logit": partial(EigenMoE, score="logit", balance="none", experts="dense"),
    "loss-free": routed_by(LossFreeRouter),
    "cosine": routed_by(CosineRouter),
    "v-moe": routed_by(VMoERouter, same_start=True),
    "expert-choice": routed_by(ExpertChoiceRouter),
    "base": routed_by(BaseRouter),
    "soft": mixing(SoftMoE),
}


def build_layer(router: str, dim: int, hidden_dim: int | None = None, **options: Any) -> nn.Module:
    """The layer called ``router``, a feed-forward replacement with ``forward(x, context=None, mask=None)``.

    Every layer but "eigen" has dense experts by default, and ignores ``context``. `options_of` lists the keywords.

    >>> layer = build_layer("v-moe", 32, num_experts=4, top_k=1)
    >>> layer(torch.randn(2, 10, 32)).shape
    torch.Size([2, 10, 32])
    """
    unknown = sorted(set(options) - set(options_of(router)))
    if unknown:
        raise ValueError(
            f"router={router!r} has no option {', '.join(unknown)}: it has {', '.join(options_of(router))}"
        )
    return LAYERS[router](dim, hidden_dim, **options)


def options_of(router: str) -> list[str]:
    """The keywords that `build_layer` takes for one router, beside dim and hidden_dim.

    >>> options_of("base")[:3]
    ['num_experts', 'experts', 'rank']
    """
    if router not in LAYERS:
        raise ValueError(f"router={router!r}: use one of {', '.join(LAYERS)}")
    return list(_keywords(LAYERS[router]))
