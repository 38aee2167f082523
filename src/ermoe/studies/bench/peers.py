"""The candidates of the layer benchmark: ours, the rivals', and the implementations people use.

All run on the same tokens with the parameters of a ViT feed-forward network times E. A peer that is not installed is
left out.

Letters: T tokens, D width, E experts, K experts per token.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ermoe.nn import Context, MoE, Router, Routing
from ermoe.nn.registry import build_layer


@dataclass(frozen=True, slots=True)
class Shape:
    """The workload: images × tokens of width D, E experts of hidden width H, K of them per token."""

    images: int = 8
    tokens: int = 197
    dim: int = 768
    hidden_dim: int = 3072
    num_experts: int = 8
    top_k: int = 2


class Forced(Router):
    """A router whose decision is made beforehand: balanced (round robin) or collapsed (everything to K experts)."""

    def __init__(self, shape: Shape, kind: str) -> None:
        super().__init__()
        self.num_experts = shape.num_experts
        self.top_k = shape.top_k
        num_tokens = shape.images * shape.tokens
        expert_TK = _forced_choice(shape, kind)
        weight_TK = torch.full((num_tokens, shape.top_k), 1 / shape.top_k)
        self._routing = Routing.from_choice(expert_TK, weight_TK, num_experts=shape.num_experts)

    def forward(
        self, x_GSD: Tensor, context: Tensor | Context | None, mask_GS: Tensor | None, basis_EDR: Tensor | None
    ) -> Routing:
        return self._routing


def _forced_choice(shape: Shape, kind: str) -> Tensor:
    """Expert ids (T, K) of a forced routing.

    >>> _forced_choice(Shape(images=1, tokens=2, num_experts=3), "balanced").tolist()
    [[0, 1], [2, 0]]
    """
    num_pairs = shape.images * shape.tokens * shape.top_k
    wrap = shape.num_experts if kind == "balanced" else shape.top_k
    return (torch.arange(num_pairs) % wrap).view(-1, shape.top_k)


class _DenseFFNs(nn.Module):
    """The floor: K plain feed-forward networks on all tokens, what the chosen experts need and nothing else."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(shape.dim, shape.hidden_dim) for _ in range(shape.top_k))
        self.down = nn.ModuleList(nn.Linear(shape.hidden_dim, shape.dim) for _ in range(shape.top_k))

    def forward(self, x: Tensor, context: Context | None = None) -> Tensor:
        outputs = [down(F.gelu(up(x))) for up, down in zip(self.up, self.down, strict=True)]
        return torch.stack(outputs).sum(0) if len(outputs) > 2 else sum(outputs[1:], outputs[0])


class _TransformersExperts(nn.Module):
    """Hugging Face's experts with one of its backends, ViT-shaped (biases, GELU), behind a softmax gate."""

    def __init__(self, backend: str, shape: Shape, routing: str) -> None:
        from transformers.integrations.moe import use_experts_implementation

        super().__init__()

        class Experts(nn.Module):
            def __init__(self, config: Any) -> None:
                super().__init__()
                self.num_experts = shape.num_experts
                self.up_proj = nn.Parameter(torch.randn(shape.num_experts, shape.hidden_dim, shape.dim) * 0.02)
                self.up_proj_bias = nn.Parameter(torch.zeros(shape.num_experts, shape.hidden_dim))
                self.down_proj = nn.Parameter(torch.randn(shape.num_experts, shape.dim, shape.hidden_dim) * 0.02)
                self.down_proj_bias = nn.Parameter(torch.zeros(shape.num_experts, shape.dim))
                self.act_fn = nn.GELU()

            def forward(self, x_TD: Tensor, expert_TK: Tensor, weight_TK: Tensor) -> Tensor:
                """The library has no eager path for this shape; this one loops over the experts that were hit."""
                y_TD = torch.zeros_like(x_TD)
                for expert in expert_TK.unique().tolist():
                    token, rank = (expert_TK == expert).nonzero(as_tuple=True)
                    hidden = F.linear(x_TD[token], self.up_proj[expert], self.up_proj_bias[expert])
                    rows = F.linear(self.act_fn(hidden), self.down_proj[expert], self.down_proj_bias[expert])
                    y_TD.index_add_(0, token, rows * weight_TK[token, rank, None])
                return y_TD

        config = type("Config", (), {"_experts_implementation": backend})()
        self.experts = use_experts_implementation(Experts, has_gate=False, has_bias=True)(config)
        self.gate = nn.Linear(shape.dim, shape.num_experts, bias=False)
        self.top_k = shape.top_k
        self.forced_TK = None if routing == "natural" else _forced_choice(shape, routing)

    def forward(self, x: Tensor, context: Context | None = None) -> Tensor:
        x_TD = x.reshape(-1, x.shape[-1])
        if self.forced_TK is not None:
            expert_TK, weight_TK = self.forced_TK, torch.full(self.forced_TK.shape, 1 / self.top_k)
        else:
            weight_TK, expert_TK = self.gate(x_TD).softmax(-1).topk(self.top_k)
        output: Tensor = self.experts(x_TD, expert_TK, weight_TK).view(x.shape)
        return output


class _FirstOutput(nn.Module):
    """A peer whose forward may also return losses."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, context: Context | None = None) -> Tensor:
        output = self.layer(x)
        return output[0] if isinstance(output, tuple) else output


def _mixtral(shape: Shape, backend: str) -> nn.Module:
    """Hugging Face's Mixtral block as it ships: SwiGLU experts of 2/3 the hidden width, so the same parameters."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    config = MixtralConfig(
        hidden_size=shape.dim,
        intermediate_size=shape.hidden_dim * 2 // 3,
        num_local_experts=shape.num_experts,
        num_experts_per_tok=shape.top_k,
    )
    config._experts_implementation = backend
    block = MixtralSparseMoeBlock(config)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(std=0.02)
    return _FirstOutput(block)


def _st_moe(shape: Shape) -> nn.Module:
    from st_moe_pytorch import MoE as StMoE

    return _FirstOutput(
        StMoE(dim=shape.dim, num_experts=shape.num_experts, gating_top_n=shape.top_k, differentiable_topk=False)
    )


def _soft_moe(shape: Shape) -> nn.Module:
    from soft_moe_pytorch import SoftMoE

    return _FirstOutput(SoftMoE(dim=shape.dim, seq_len=shape.tokens, num_experts=shape.num_experts))


def _ours(router: str, shape: Shape, routing: str, **options: Any) -> MoE:
    sizes = {"num_experts": shape.num_experts, "top_k": shape.top_k}
    layer = build_layer(router, shape.dim, shape.hidden_dim, **sizes, **options)
    assert isinstance(layer, MoE)
    return layer if routing == "natural" else MoE(Forced(shape, routing), layer.experts)


# Name -> the package it is from, and how it is built for a shape and a kind of routing.
_CANDIDATES: dict[str, tuple[str, Callable[[Shape, str], nn.Module]]] = {
    "floor": ("ermoe", lambda shape, _: _DenseFFNs(shape)),
    "ermoe R=504 r=56": ("ermoe", lambda shape, routing: _ours("eigen", shape, routing, rank=504, route_rank=56)),
    "ermoe R=D": ("ermoe", lambda shape, routing: _ours("eigen", shape, routing)),
    "ermoe dense experts": ("ermoe", lambda shape, routing: _ours("eigen", shape, routing, experts="dense")),
    "our V-MoE": ("ermoe", lambda shape, routing: _ours("v-moe", shape, routing, capacity_factor=None)),
    "transformers loop": ("transformers", partial(_TransformersExperts, "eager")),
    "transformers grouped_mm": ("transformers", partial(_TransformersExperts, "grouped_mm")),
    "Mixtral eager": ("transformers", lambda shape, _: _mixtral(shape, "eager")),
    "Mixtral grouped_mm": ("transformers", lambda shape, _: _mixtral(shape, "grouped_mm")),
    "st-moe-pytorch": ("st_moe_pytorch", lambda shape, _: _st_moe(shape)),
    "soft-moe-pytorch": ("soft_moe_pytorch", lambda shape, _: _soft_moe(shape)),
}
_ONLY_NATURAL = ("Mixtral", "st-moe", "soft-moe")  # their routing cannot be forced


def build(name: str, shape: Shape, routing: str = "natural") -> nn.Module:
    """One candidate by its name."""
    return _CANDIDATES[name][1](shape, routing)


def available(routing: str = "natural") -> list[str]:
    """Names of the candidates that are installed; peers whose routing cannot be forced take part only in "natural"."""
    installed = [name for name, (package, _) in _CANDIDATES.items() if find_spec(package)]
    return [name for name in installed if routing == "natural" or not name.startswith(_ONLY_NATURAL)]


def tokens(shape: Shape) -> tuple[Tensor, Context]:
    """Tokens with the statistics of normalised features, and where they look: at all a little, at themselves more."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape.images, shape.tokens, shape.dim, generator=generator)
    logits = torch.randn(shape.images, shape.tokens, shape.tokens, generator=generator)
    return x, Context((logits + math.log(shape.tokens) * torch.eye(shape.tokens)).softmax(-1))


def eigen_layer(shape: Shape, **options: Any) -> MoE:
    """The layer of the paper's preset."""
    return _ours("eigen", shape, "natural", **{"rank": 504, "route_rank": 56} | options)
