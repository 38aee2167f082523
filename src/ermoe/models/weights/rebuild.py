"""A model written down as plain data, and built again from it, without its weights."""

from __future__ import annotations

from typing import TypedDict

from torch import nn

from ermoe.errors import UserError
from ermoe.models.families import family_name, family_named, family_of
from ermoe.models.merge import merge
from ermoe.models.sparsity import Options
from ermoe.models.upcycle import upcycle
from ermoe.models.weights.compare import difference
from ermoe.nn import Balance
from ermoe.plain import Json


class Description(TypedDict):
    """A model as plain data: its family, its dense form, and the options that made it sparse (None if it is dense)."""

    family: str
    dense: Json
    sparsity: Options | None
    merged: bool


def describe(model: nn.Module) -> Description:
    """The backbone's family, its dense form, and the options that made it sparse (None if it is dense).

    What is written is built at once, and compared: what a description cannot say is an error now, not a wrong model
    when it is loaded.
    """
    sparsity = getattr(model, "sparsity", None)
    description: Description = {
        "family": family_name(model),
        "dense": family_of(model).describe(model),
        "sparsity": None if sparsity is None else sparsity.as_options(),
        "merged": sparsity is not None and sparsity.merged,
    }
    rebuilt = rebuild(description, device="meta").to(next(model.parameters()).dtype)
    lost = difference(model, rebuilt)
    if lost is not None:
        raise UserError(
            f"this {type(model).__name__} cannot be written down: {lost}; create it with timm.create_model, by "
            "torchvision's or by transformers' own functions, make it sparse with ermoe.upcycle, and change only "
            "arguments of these"
        )
    return description


def rebuild(description: Description, *, device: str = "cpu", init: str = "empty") -> nn.Module:
    """The model a description means: freshly initialised (``init="random"``), or about to be given its weights."""
    dense, sparsity = description["dense"], description["sparsity"]
    family = family_named(description["family"])
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


def is_registered(dense: Json) -> bool:
    """Whether timm itself creates the sparse model by its name."""
    if "ermoe" not in dense.get("architecture", ""):
        return False
    import timm  # seconds, which models of other families need not wait for

    return timm.is_model(dense["architecture"])


def _clear_balances(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, Balance):
            module.reset_parameters()
