"""Layers that timm is given as classes, such as ``norm_layer`` or ``act_layer``, as plain data and back.

{"layer": "torch.nn.LayerNorm", "eps": 1e-05} stands for ``partial(nn.LayerNorm, eps=1e-05)``. Only classes of torch and
timm can be named: what a file says never runs anything else.
"""

from __future__ import annotations

import inspect
from functools import partial
from types import ModuleType
from typing import Any

import timm.layers
import timm.models.vision_transformer
from torch import nn

from ermoe.errors import UserError
from ermoe.files import Json

_HOMES: dict[str, ModuleType] = {
    "torch.nn": nn,
    "timm.layers": timm.layers,
    "timm.models.vision_transformer": timm.models.vision_transformer,
}
_NOT_OPTIONS = {"self", "device", "dtype", "inplace"}


def layer_of(module: nn.Module) -> Json:
    """The class of a module and the options, among those its constructor keeps, in which it is not as by default.

    >>> layer_of(nn.LayerNorm(8, eps=1e-6)), layer_of(nn.GELU())
    ({'layer': 'torch.nn.LayerNorm', 'eps': 1e-06}, {'layer': 'torch.nn.GELU'})
    """
    options = {
        name: getattr(module, name)
        for name, parameter in inspect.signature(type(module).__init__).parameters.items()
        if name not in _NOT_OPTIONS
        and parameter.default is not parameter.empty
        and isinstance(getattr(module, name, None), bool | int | float | str)
        and getattr(module, name) != parameter.default
    }
    return {"layer": _name_of(type(module)), **options}


def as_data(value: Any) -> Any:
    """An argument of timm as plain data, where it is a layer or a partial of one; anything else as it is."""
    if isinstance(value, partial):
        if value.args:
            raise UserError(f"{value} is given positional arguments, which ermoe does not write down: name them")
        return {**as_data(value.func), **{name: as_data(option) for name, option in value.keywords.items()}}
    if isinstance(value, type) and issubclass(value, nn.Module):
        return {"layer": _name_of(value)}
    return list(value) if isinstance(value, tuple) else value


def from_data(value: Any) -> Any:
    """The argument that `as_data` wrote down.

    >>> from_data({"layer": "torch.nn.LayerNorm", "eps": 1e-6})(8)
    LayerNorm((8,), eps=1e-06, elementwise_affine=True...)
    """
    if isinstance(value, list):
        return tuple(from_data(item) for item in value)
    if not isinstance(value, dict):
        return value
    options = {name: from_data(option) for name, option in value.items() if name != "layer"}
    layer = _class_of(value.get("layer"))
    return partial(layer, **options) if options else layer


def _name_of(layer: type[nn.Module]) -> str:
    for home, module in _HOMES.items():
        if getattr(module, layer.__name__, None) is layer:
            return f"{home}.{layer.__name__}"
    return f"{layer.__module__}.{layer.__qualname__}"  # of the user's own: refused when it is to be built


def _class_of(name: Any) -> type[nn.Module]:
    home, _, short = str(name).rpartition(".")
    layer = getattr(_HOMES.get(home), short, None)
    if not (isinstance(layer, type) and issubclass(layer, nn.Module)):
        raise UserError(
            f"the layer {name} is neither torch's nor timm's, and a saved model can name no other: save the state_dict "
            "of a model that has it"
        )
    return layer
