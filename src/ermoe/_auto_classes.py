"""Hugging Face's Auto classes learn of sparse models, in whatever order transformers and ermoe are imported.

Neither library waits for the other: a name stands in for a configuration until a file asks for it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

PREFIX = "ermoe_"
"""What the type of a sparse model begins with, in the config.json of transformers: "ermoe_vit" for "vit"."""

NAME = "Sparse"
"""What the name of its class begins with."""

NOTICE = "transformers_weights"
"""An entry of config.json that transformers takes for the name of the file with the weights: where it is a sentence
instead, classes that would build a dense model stop, and show it."""

DENSE_TYPES = (
    "beit", "clip", "clip_vision_model", "deit", "dinov2", "dinov2_with_registers", "dinov3_vit", "siglip",
    "siglip_vision_model", "siglip2", "siglip2_vision_model", "timm_wrapper", "vit", "vit_mae",
)  # fmt: skip
"""Types of models of transformers, as their configurations call them, that `ermoe.upcycle` makes sparse."""

_AUTO = "transformers.models.auto.configuration_auto"


def tell_auto_classes() -> None:
    """From now on ``AutoModel….from_pretrained`` finds sparse models, whenever transformers is imported."""
    if _AUTO in sys.modules:
        _register(sys.modules[_AUTO])
    elif not any(isinstance(finder, _Waiting) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Waiting())


class _Waiting(MetaPathFinder):
    """Waits for the module of transformers that knows the types of models, and then goes."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _AUTO:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                _register(module)

            loader.exec_module = execute_and_register
        return spec


def _register(auto: Any) -> None:
    for dense_type in DENSE_TYPES:
        auto.AutoConfig.register(PREFIX + dense_type, _stand_in(dense_type), exist_ok=True)


def _stand_in(dense_type: str) -> type:
    """A class that makes configurations as that of sparse models of ``dense_type`` does, which is then registered."""

    def real() -> Any:
        return import_module("ermoe.models.hugging_face").sparse_config(dense_type)

    class StandIn:
        model_type = PREFIX + dense_type

        def __new__(cls, **options: Any) -> Any:
            return real()(**options)

        @classmethod
        def from_dict(cls, config_dict: dict[str, Any], **options: Any) -> Any:
            return real().from_dict(config_dict, **options)

        @classmethod
        def from_pretrained(cls, name_or_path: Any, **options: Any) -> Any:
            return real().from_pretrained(name_or_path, **options)

    return StandIn
