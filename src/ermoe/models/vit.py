"""Sparse vision transformers that timm can create by name: ``timm.create_model("ermoe_vit_base_patch16_224")``.

Importing this module registers them. They have timm's full protocol, because they are timm's VisionTransformer with
expert layers in some of its blocks. Besides timm's arguments they take those of `ermoe.upcycle`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.vision_transformer import VisionTransformer, _cfg
from torch import Tensor, nn

from ermoe.errors import UserError
from ermoe.models.io import Description, rebuild
from ermoe.models.upcycle import upcycle

__all__ = ["SparseVisionTransformer"]

_OF_TIMM = set(inspect.signature(VisionTransformer.__init__).parameters)
_TEST_SIZE = {
    "patch_size": 16, "embed_dim": 64, "num_heads": 2, "mlp_ratio": 3, "dynamic_img_size": True, "num_experts": 4,
}  # fmt: skip


class SparseVisionTransformer(VisionTransformer):
    """timm's VisionTransformer with experts in some blocks, everything freshly initialised.

    >>> model = SparseVisionTransformer(img_size=32, patch_size=8, embed_dim=64, depth=2, num_heads=2, num_experts=4)
    >>> model.sparsity.blocks, model.blocks[1].mlp.experts.num_experts
    ((1,), 4)
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{name: value for name, value in options.items() if name in _OF_TIMM})
        sparse = {name: value for name, value in options.items() if name not in _OF_TIMM}
        for name in ("init", "inplace", "is_new"):
            if name in sparse:
                raise UserError(
                    f"{name}={sparse[name]!r}: a model created by name starts afresh; to start from dense weights, use "
                    "ermoe.upcycle on a dense timm model"
                )
        upcycle(self, init="random", inplace=True, is_new=True, **sparse)


default_cfgs = generate_default_cfgs(
    {
        "ermoe_vit_tiny_patch16_224": _cfg(),
        "ermoe_vit_small_patch16_224": _cfg(),
        "ermoe_vit_base_patch16_224": _cfg(),
        "ermoe_upcycled": _cfg(),
        "test_ermoe_vit": _cfg(input_size=(3, 160, 160), crop_pct=0.95),
        "test_ermoe_vit2": _cfg(input_size=(3, 160, 160), crop_pct=0.95),
    }
)


def _create(
    variant: str,
    pretrained: bool,
    size: dict[str, Any],
    options: dict[str, Any],
    build: Callable[..., nn.Module] = SparseVisionTransformer,
) -> nn.Module:
    return build_model_with_cfg(
        build,
        variant,
        pretrained,
        pretrained_filter_fn=_fitted,
        feature_cfg={"out_indices": options.pop("out_indices", 3), "feature_cls": "getter"},
        **{**size, **options},
    )


def _fitted(state: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """The weights as timm fits them to another size of images: each of its files has a function for its own models."""
    for base in type(model).__mro__:
        fit = getattr(sys.modules[base.__module__], "checkpoint_filter_fn", None)
        if fit is not None:
            fitted: dict[str, Tensor] = fit(state, model)
            return fitted
    return state


@register_model
def ermoe_vit_tiny_patch16_224(pretrained: bool = False, **options: Any) -> nn.Module:
    """ViT-Ti/16 with 8 experts in every second block, 2 a token."""
    size = {"patch_size": 16, "embed_dim": 192, "depth": 12, "num_heads": 3}
    return _create("ermoe_vit_tiny_patch16_224", pretrained, size, options)


@register_model
def ermoe_vit_small_patch16_224(pretrained: bool = False, **options: Any) -> nn.Module:
    """ViT-S/16 with 8 experts in every second block, 2 a token."""
    size = {"patch_size": 16, "embed_dim": 384, "depth": 12, "num_heads": 6}
    return _create("ermoe_vit_small_patch16_224", pretrained, size, options)


@register_model
def ermoe_vit_base_patch16_224(pretrained: bool = False, **options: Any) -> nn.Module:
    """ViT-B/16 with 8 experts in every second block, 2 a token; ``rank=504, route_rank=56`` is the paper's size."""
    size = {"patch_size": 16, "embed_dim": 768, "depth": 12, "num_heads": 12}
    return _create("ermoe_vit_base_patch16_224", pretrained, size, options)


@register_model
def test_ermoe_vit(pretrained: bool = False, **options: Any) -> nn.Module:  # noqa: PT028 (timm calls its small models so)
    """A very small model for tests: 6 blocks of width 64, 4 experts."""
    return _create("test_ermoe_vit", pretrained, {**_TEST_SIZE, "depth": 6}, options)


@register_model
def test_ermoe_vit2(pretrained: bool = False, **options: Any) -> nn.Module:  # noqa: PT028
    """A very small model for tests: no class token, a register, LayerScale, mean pooling."""
    size = {"depth": 8, "class_token": False, "reg_tokens": 1, "global_pool": "avg", "init_values": 1e-5}
    return _create("test_ermoe_vit2", pretrained, {**_TEST_SIZE, **size}, options)


_EXAMPLE: Description = {
    "family": "timm_vit",
    "dense": {"architecture": "test_vit", "args": {}},
    "sparsity": {"num_experts": 4},
    "merged": False,
}


@register_model
def ermoe_upcycled(pretrained: bool = False, *, description: Description = _EXAMPLE, **options: Any) -> nn.Module:
    """Any timm model that was made sparse, as `ermoe.save` describes it: the target of timm's ``local-dir:``.

    Without a description it is a very small one, because timm promises that every name it lists can be created.
    """

    def build(**args: Any) -> nn.Module:
        dense = {**description["dense"], "args": {**description["dense"]["args"], **args}}
        return rebuild({**description, "dense": dense}, init="empty" if pretrained else "random")

    model = _create("ermoe_upcycled", pretrained, {}, options, build)
    # The model, or what a module of features holds, says what it is, not how it was found: so it can be written down.
    modules: list[Any] = [module for module in model.modules() if hasattr(module, "pretrained_cfg")]
    for module in modules:
        module.pretrained_cfg["architecture"] = description["dense"]["architecture"]
    return model
