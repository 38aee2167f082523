"""Every layer by its name: one line a method, and one function that builds any of them.

A method that routes tokens is a `Router` and its settings in a file of their own, and a line in `LAYERS`. Dispatch,
experts and all keywords of experts come with `made_of`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from ermoe.nn.eigen import EigenMoE
from ermoe.nn.experts import build_experts
from ermoe.nn.layer import MixtureLayer
from ermoe.nn.rivals.base import Base
from ermoe.nn.rivals.clip_moe import ClipMoE
from ermoe.nn.rivals.cosine import Cosine
from ermoe.nn.rivals.emoe import EMoE
from ermoe.nn.rivals.expert_choice import ExpertChoice
from ermoe.nn.rivals.loss_free import LossFree
from ermoe.nn.rivals.soft import Soft
from ermoe.nn.rivals.vmoe import VMoE
from ermoe.nn.settings import LayerSettings
from ermoe.nn.start import Start


def _keywords(function: Callable[..., object]) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]


_OF_EXPERTS = _keywords(build_experts)
_OF_MLPS = ["gated", "act_layer", "norm_layer", "bias", "drop"]
_OF_START = list(Start.__annotations__)


@dataclass(frozen=True, slots=True)
class Method:
    """How the layers of one name are built, ``build(dim, hidden_dim, **options)``, and which options they take."""

    build: Callable[..., MixtureLayer]
    options: list[str]


def made_of(settings: type[LayerSettings], *, same_start: bool = False) -> Method:
    """The method whose options are those settings and those of experts."""
    own = [setting.name for setting in fields(settings)]

    def build(dim: int, hidden_dim: int | None = None, **options: Any) -> MixtureLayer:
        def chosen(names: list[str]) -> dict[str, Any]:
            return {name: options[name] for name in names if name in options}

        start = chosen(_OF_START)
        experts = build_experts(dim, hidden_dim, **{"same_start": same_start} | chosen(_OF_EXPERTS), **start)
        shared = None
        if options.get("shared_dim") is not None:
            shared = build_experts(dim, options["shared_dim"], num_experts=1, **chosen(_OF_MLPS), **start)
        return settings(**chosen(own)).layer(dim, experts, shared, **start)

    return Method(build, [*own, *_OF_EXPERTS, "shared_dim", *_OF_START])


_EIGEN = [*_keywords(EigenMoE), *_OF_START]
LAYERS: dict[str, Method] = {
    "eigen": Method(EigenMoE, _EIGEN),
    "logit": Method(partial(EigenMoE, score="logit", balance="none", experts="dense"), _EIGEN),
    "loss-free": made_of(LossFree),
    "cosine": made_of(Cosine),
    "emoe": made_of(EMoE),
    "v-moe": made_of(VMoE, same_start=True),
    "expert-choice": made_of(ExpertChoice),
    "base": made_of(Base),
    "clip-moe": made_of(ClipMoE),
    "soft": made_of(Soft),
}


def build_layer(router: str, dim: int, hidden_dim: int | None = None, **options: Any) -> MixtureLayer:
    """The layer called ``router``, a feed-forward replacement with ``forward(x, context=None, mask=None)``.

    Every layer but "eigen" has dense experts by default, and ignores ``context``. `options_of` lists the keywords.

    >>> import torch
    >>> layer = build_layer("v-moe", 32, num_experts=4, top_k=1)
    >>> layer(torch.randn(2, 10, 32)).shape
    torch.Size([2, 10, 32])
    """
    known = options_of(router)
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ValueError(f"router={router!r} has no option {', '.join(unknown)}: it has {', '.join(known)}")
    return LAYERS[router].build(dim, hidden_dim, **options)


def options_of(router: str) -> list[str]:
    """The keywords that `build_layer` takes for one router, beside dim and hidden_dim.

    >>> options_of("base")[:3]
    ['num_experts', 'experts', 'rank']
    """
    if router not in LAYERS:
        raise ValueError(f"router={router!r}: use one of {', '.join(LAYERS)}")
    return LAYERS[router].options
