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

from torch import nn

from ermoe.nn.experts import Experts, build_experts
from ermoe.nn.moe import EigenMoE, MoE
from ermoe.nn.rivals.base import BaseRouter
from ermoe.nn.rivals.clip_moe import ClipMoERouter
from ermoe.nn.rivals.cosine import CosineRouter
from ermoe.nn.rivals.expert_choice import ExpertChoiceRouter
from ermoe.nn.rivals.loss_free import LossFreeRouter
from ermoe.nn.rivals.soft import SoftMoE
from ermoe.nn.rivals.vmoe import VMoERouter
from ermoe.nn.routers import Router

Factory = Callable[..., nn.Module]


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
    "clip-moe": routed_by(ClipMoERouter),
    "soft": mixing(SoftMoE),
}


def build_layer(router: str, dim: int, hidden_dim: int | None = None, **options: Any) -> nn.Module:
    """The layer called ``router``, a feed-forward replacement with ``forward(x, context=None, mask=None)``.

    Every layer but "eigen" has dense experts by default, and ignores ``context``. `options_of` lists the keywords.

    >>> import torch
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
