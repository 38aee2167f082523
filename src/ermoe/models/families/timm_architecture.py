"""Writing down which timm model a model is, so that it can be built again.

timm remembers the name of an architecture and not the arguments it was created with. They are read off the model: every
argument in which it differs from the plain architecture, beside those that a user passes.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import timm
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import ermoe.models.vit  # noqa: F401 (its import tells timm of the sparse models)
from ermoe.errors import UserError
from ermoe.files import Json
from ermoe.models.families.timm_arguments import arguments_of
from ermoe.models.families.timm_layers import as_data, from_data
from ermoe.models.weights.compare import difference

_FORBIDDEN = {"pretrained", "checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir"}
_FEATURE_NETS = {"FeatureGetterNet": "getter", "FeatureHookNet": "hook"}


def describe(model: Any, args: Json | None = None) -> Json:
    """The architecture's name and the arguments in which this model differs from it; ``args`` count as they are."""
    given = {name: as_data(value) for name, value in (args or {}).items()}
    wrapped = _features(model)
    backbone = _backbone(model)
    architecture = (getattr(backbone, "pretrained_cfg", None) or {}).get("architecture")
    if not architecture:
        raise UserError(
            f"this {type(backbone).__name__} does not say which timm architecture it is: create it with "
            "timm.create_model"
        )
    read = {name: value for name, value in arguments_of(backbone).items() if value is not None}
    description: Json = {"architecture": architecture, "args": {**_kind(backbone), **wrapped}}
    for _ in range(2):  # an argument may change what another one is by default
        built = _built_arguments(json.dumps(description))
        differing = {name: value for name, value in read.items() if value != built.get(name)}
        description["args"] = {**description["args"], **differing, **given}
        if not differing:
            break
    return description


def unsavable(model: Any) -> str | None:
    """What `ermoe.save` would have to say against a dense model, once it is sparse; None if nothing."""
    not_written = f"ermoe.save will not write this {type(model).__name__}"
    try:
        lost = difference(model, _skeleton(json.dumps(describe(model))).to(next(model.parameters()).dtype))
    except UserError as problem:
        return f"{not_written}: {problem}"
    except Exception as problem:  # whatever timm makes of arguments that were read wrongly
        lost = f"timm does not build it again ({str(problem).partition(chr(10))[0][:120]})"
    given = "unless you pass what you gave to timm.create_model, ermoe.save(model, folder, args={…})"
    return None if lost is None else f"{not_written} {given}: {lost}"


def _backbone(model: Any) -> Any:
    """What timm's modules of features hold, or the model itself."""
    name = type(model).__name__
    return (model["body"] if name == "FeatureHookNet" else model.model) if name in _FEATURE_NETS else model


def _features(model: Any) -> Json:
    """The arguments that make timm return features, if it does."""
    kind = _FEATURE_NETS.get(type(model).__name__)
    if kind is None:
        return {}
    chosen = getattr(model, "out_indices", model.feature_info.out_indices)  # some of timm's keep a number: the last n
    args: Json = {"features_only": True, "out_indices": chosen if isinstance(chosen, int) else list(chosen)}
    return args if kind == "getter" else {**args, "feature_cls": kind}


def _kind(backbone: Any) -> Json:
    """The argument that makes timm choose another class for the same name."""
    is_flexible = type(backbone).__name__ == "NaFlexVit" and "naflex" not in backbone.pretrained_cfg["architecture"]
    return {"use_naflex": True} if is_flexible else {}


@lru_cache(maxsize=64)
def _built_arguments(description: str) -> Json:
    """What can be read off the model that a description means; nothing if timm does not build it."""
    try:
        return arguments_of(_backbone(_skeleton(description)))
    except UserError:
        raise
    except Exception:  # whoever builds the whole model is told why
        return {}


@lru_cache(maxsize=8)
def _skeleton(description: str) -> nn.Module:
    """The dense model on the meta device; only to be looked at."""
    return build(json.loads(description), device="meta")


def build(description: Json, *, device: str = "cpu") -> nn.Module:
    """The model a description means, freshly initialised."""
    architecture = description["architecture"]
    if ":" in architecture:
        raise UserError(f"{architecture!r} is the address of another model: name an architecture in config.json")
    forbidden = _FORBIDDEN & set(description["args"])
    if forbidden:
        raise UserError(f"a saved model may not set {', '.join(sorted(forbidden))}: remove it from config.json")
    args = {name: from_data(value) for name, value in description["args"].items()}
    with torch.device(device), _NothingDrawn() if device == "meta" else nullcontext():
        return timm.create_model(architecture, **args)


class _NothingDrawn(TorchFunctionMode):
    """Skips what would be written into tensors without memory: it takes ten times as long as to build the model."""

    _WRITING = frozenset(
        ("add_", "clamp_", "copy_", "div_", "erfinv_", "fill_", "mul_", "normal_", "uniform_", "zero_")
    )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in self._WRITING and args and args[0].is_meta:
            return args[0]
        return func(*args, **(kwargs or {}))
