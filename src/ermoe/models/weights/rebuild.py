"""A model written down as plain data, and built again from it, without its weights."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import timm
from torch import nn

from ermoe.errors import UserError
from ermoe.models.families import FAMILIES, Family, family_of
from ermoe.models.merge import merge
from ermoe.models.sparse_block import SparseBlock
from ermoe.models.upcycle import upcycle
from ermoe.nn import Balance


def describe(model: nn.Module) -> dict[str, Any]:
    """The backbone's family, its dense form, and the options that made it sparse (None if it is dense).

    What is written is built at once, and compared: what a description cannot say is an error now, not a wrong model
    when it is loaded.
    """
    sparsity = getattr(model, "sparsity", None)
    family = family_of(model)
    description = {
        "family": family.__name__.rpartition(".")[2],  # type: ignore[attr-defined]
        "dense": family.describe(model),
        "sparsity": None if sparsity is None else sparsity.as_options(),
        "merged": sparsity is not None and sparsity.merged,
    }
    difference = _difference(model, rebuild(description, device="meta"))
    if difference is not None:
        raise UserError(
            f"this {type(model).__name__} cannot be written down: {difference}; create it with timm.create_model, by "
            "torchvision's or by transformers' own functions, and change only arguments that change it as a whole"
        )
    return description


def rebuild(description: dict[str, Any], *, device: str = "cpu", init: str = "empty") -> nn.Module:
    """The model a description means: freshly initialised (``init="random"``), or about to be given its weights."""
    dense, sparsity = description["dense"], description["sparsity"]
    family = _family(description["family"])
    if sparsity is None:
        return family.build(dense, device=device)
    if is_registered(dense):
        dense = {**dense, "args": {**dense["args"], **sparsity}}
        model = family.build(dense, device="meta" if init == "empty" else device)
        if init == "empty" and device != "meta":
            model.to_empty(device=device)
            _clear_balances(model)
    else:
        model = upcycle(family.build(dense, device=device), init=init, inplace=True, **sparsity)
    return merge(model, inplace=True) if description["merged"] else model


def is_registered(dense: dict[str, Any]) -> bool:
    """Whether timm itself creates the sparse model by its name."""
    return "ermoe" in dense.get("architecture", "") and timm.is_model(dense["architecture"])


def _family(name: str) -> Family:
    adapters = {path.rpartition(".")[2]: path for path in FAMILIES.values()}
    if name not in adapters:
        raise UserError(f"config.json names the unknown backbone family {name!r}: ermoe knows {', '.join(adapters)}")
    adapter: Any = import_module(adapters[name])
    return adapter


def _clear_balances(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, Balance):
            module.reset_parameters()


def _difference(model: nn.Module, rebuilt: nn.Module) -> str | None:
    """The first module in which two models differ, outside of expert layers, whose settings are written down whole."""
    mine, theirs = _layout(model), _layout(rebuilt)
    for name in sorted(mine.keys() | theirs.keys()):
        if mine.get(name) != theirs.get(name):
            before, after = mine.get(name, "absent"), theirs.get(name, "absent")
            return f"{name or 'the model'} is {before}, and would come back as {after}"
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for name, tensor in rebuilt.state_dict().items():
        if shapes.get(name) != tuple(tensor.shape):
            return f"{name} has shape {shapes.get(name)}, and would come back with {tuple(tensor.shape)}"
    return None


def _layout(model: nn.Module) -> dict[str, str]:
    expert_layers = tuple(f"{name}.mlp" for name, module in model.named_modules() if isinstance(module, SparseBlock))
    return {
        name: f"{type(module).__name__}({module.extra_repr()})"
        for name, module in model.named_modules()
        if not any(name == layer or name.startswith(f"{layer}.") for layer in expert_layers)
    }
