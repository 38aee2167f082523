"""What a model does with one image, and what it would do with another threshold, number of experts or offsets.

Letters: T tokens of the image, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ermoe.errors import UserError
from ermoe.models.backbones import SparseBlock
from ermoe.nn import Routing, moe_layers
from ermoe.nn.balance import OffsetBalance
from ermoe.nn.layer import MixtureLayer
from ermoe.nn.routers import TopKRouter


@dataclass(frozen=True, slots=True)
class Change:
    """What is to differ from the model as it is; None and an empty mapping change nothing.

    ``threshold`` and ``top_k`` are those of all layers; ``offsets`` are added to a layer's own, by its name.
    """

    threshold: float | None = None
    top_k: int | None = None
    offsets: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    def key(self) -> tuple[object, ...]:
        """Equal for equal changes."""
        return self.threshold, self.top_k, tuple(sorted(self.offsets.items()))


@dataclass(frozen=True, slots=True)
class LayerLook:
    """One layer's decision about every token: scores and fallback where its router has them, mixing weights.

    ``alpha_TT`` says where each token looked in the attention before the layer, the mean over heads.
    """

    weight_TE: Tensor
    score_TE: Tensor | None
    fell_back_T: Tensor | None
    alpha_TT: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Look:
    """What a model says to an image, and what each of its layers did on the way."""

    output: Tensor
    layers: dict[str, LayerLook]


@torch.no_grad()
def look(
    model: nn.Module,
    image_1CHW: Tensor,
    change: Change | None = None,
    *,
    mask: Tensor | None = None,
    attention: bool = False,
) -> Look:
    """One pass of one image, or of a volume with its mask, in evaluation mode; the model is left as it was.

    >>> import timm, ermoe
    >>> dense = timm.create_model("test_vit", num_classes=5)
    >>> model = ermoe.upcycle(dense, num_experts=4, init="random", generator=torch.Generator().manual_seed(0))
    >>> seen = look(model, torch.randn(1, 3, 160, 160), Change(top_k=3))
    >>> {name: tuple(layer.weight_TE.gt(0).sum(1).unique().tolist()) for name, layer in seen.layers.items()}
    {'blocks.1.mlp': (3,), 'blocks.3.mlp': (3,), 'blocks.5.mlp': (3,)}
    """
    layers, was_training, seen = moe_layers(model), model.training, {}
    attended = _Attention()

    def keep(name: str, routing: Routing) -> None:
        seen[name] = _layer_look(routing, attended.latest_TT)

    observers = {name: partial(keep, name) for name in layers}
    with ExitStack() as undone:
        undone.callback(model.train, was_training)
        undone.enter_context(changed(model, Change() if change is None else change))
        for name, layer in layers.items():
            layer.observers.append(observers[name])
            undone.callback(layer.observers.remove, observers[name])
        if attention:
            undone.enter_context(attended.watching(model))
        output: Any = model.eval()(image_1CHW) if mask is None else model.eval()(image_1CHW, mask)
    return Look((output[0] if isinstance(output, tuple) else output)[0].float().cpu(), seen)


def _layer_look(routing: Routing, alpha_TT: Tensor | None) -> LayerLook:
    def kept(value: Tensor | None) -> Tensor | None:
        return None if value is None else value.detach().cpu()

    score_TE = None if routing.score_TE is None else routing.score_TE.detach().float().cpu()
    return LayerLook(routing.dense_weights().float().cpu(), score_TE, kept(routing.fell_back_T), kept(alpha_TT))


@contextmanager
def changed(model: nn.Module, change: Change) -> Iterator[None]:
    """Within it the routers of a model differ as asked; those without a threshold or a k have none to change."""
    layers = moe_layers(model)
    _check(change, layers)
    with ExitStack() as undone:
        for name, layer in layers.items():
            router = layer.router
            if change.top_k is not None and router is not None and router.top_k is not None:
                undone.callback(setattr, router, "top_k", router.top_k)
                router.top_k = min(change.top_k, router.num_experts)
            if change.threshold is not None and router is not None and router.threshold is not None:
                undone.callback(setattr, router, "threshold", router.threshold)
                router.threshold = change.threshold
            if any(change.offsets.get(name, ())) and isinstance(router, TopKRouter):
                undone.enter_context(_offsets_added(router, change.offsets[name]))
        yield


@contextmanager
def _offsets_added(router: TopKRouter, added: tuple[float, ...]) -> Iterator[None]:
    before = router.balance
    device = next(router.parameters(), torch.empty(0)).device if before is None else before.offset_E.device
    balance = OffsetBalance(router.num_experts, device=device)
    own_E = 0 if before is None else before.offset_E
    balance.offset_E.copy_(own_E + torch.tensor(added, device=device))
    router.balance = balance
    try:
        yield
    finally:
        router.balance = before


def _check(change: Change, layers: Mapping[str, MixtureLayer]) -> None:
    if change.threshold is not None and not 0 <= change.threshold < 1:
        raise UserError(f"T = {change.threshold}: need at least 0 and less than 1")
    if change.top_k is not None and change.top_k < 1:
        raise UserError(f"k = {change.top_k}: need at least 1")
    for name, added in change.offsets.items():
        if name not in layers:
            raise UserError(f"there is no layer {name!r} to add offsets to: there are {', '.join(layers)}")
        if len(added) != layers[name].experts.num_experts or not all(abs(value) <= 10 for value in added):
            raise UserError(f"offsets of {name}: need one number between -10 and 10 for each of its experts")


class _Attention(TorchFunctionMode):
    """Head-mean attention weights of the latest attention, (T, T): those of a context, or of the fused kernel."""

    latest_TT: Tensor | None = None

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        blocks = [module for module in model.modules() if isinstance(module, SparseBlock)]
        for block in blocks:
            block.__dict__["mix"] = partial(self._mix, block.mix)
        try:
            with self:
                yield
        finally:
            for block in blocks:
                del block.__dict__["mix"]

    def _mix(self, mix: Any, z_BND: Tensor, alpha_BNN: Tensor | None, *rest: Any) -> Tensor:
        if alpha_BNN is not None:
            self.latest_TT = alpha_BNN[0]
        mixed: Tensor = mix(z_BND, alpha_BNN, *rest)
        return mixed

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            self.latest_TT = _weights(*args, **kwargs)
        return func(*args, **kwargs)


def _weights(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *_: Any, **options: Any
) -> Tensor | None:
    """softmax(q kᵀ) of the first image, the mean over its heads; None where positions are hidden by a rule."""
    if options.get("is_causal") or query.dim() != 4:
        return None
    scale = options.get("scale")
    logits = (query[0].float() * (query.shape[-1] ** -0.5 if scale is None else scale)) @ key[0].float().mT
    if attn_mask is not None:
        mask = attn_mask[0] if attn_mask.dim() == 4 else attn_mask
        logits = logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask.float()
    return logits.softmax(-1).mean(0)
