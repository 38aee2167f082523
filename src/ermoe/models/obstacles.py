"""What a feed-forward network does beside its weights, and would no longer do once experts stand in its place.

Experts take over weights. A hook, a forward of a single module's own, an adapter or a parametrization would be lost
without a word, and outputs with it: so each is refused, by name and with what to do first.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from ermoe.errors import UserError
from ermoe.models.backbones import dense_network

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_HUGGING_FACE_LISTENS = "transformers.utils.output_capturing"
_LEAVE = "use score='prototype' or score='energy', which leave attention to itself"
# Whose attention, norms and dropout a sparse block does itself, and knows.
_LIBRARIES = ("torch", "timm", "torchvision", "transformers", "open_clip", "ermoe")
_REPLACED = (nn.Dropout, nn.Identity, nn.LayerNorm, nn.RMSNorm)  # parts of a network that experts have of their own
_REWRITTEN = ("weight_g", "weight_orig")  # of torch's weight_norm, spectral_norm and prune


def refuse_adapters(model: nn.Module) -> None:
    """Refuses a model whose weights are not what it computes with, because adapters of peft add to them."""
    adapted = next((path for path, module in model.named_modules() if _is_of_peft(module)), None)
    if adapted is not None:
        raise UserError(
            f"{adapted} has an adapter of peft, which is not a part of the weights yet: merge it first, with the "
            "merge_and_unload() of the PeftModel"
        )


def refuse_to_copy(model: nn.Module) -> None:
    """Refuses a model one of whose modules has a method of its own: in a copy it would still run the original."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, FunctionType) and callable(getattr(type(module), name, None)):
                raise UserError(
                    f"{path or f'this {type(module).__name__}'} has a {name} of its own, which would run the dense "
                    "model also in a sparse copy: delete it and set it again afterwards, or use inplace=True"
                )


def _is_of_peft(module: nn.Module) -> bool:
    return type(module).__module__.startswith("peft.") and hasattr(module, "base_layer")


def obstacle(block: Any) -> str | None:
    """Why experts would change what the block does, as the end of a sentence about it; None if they would not."""
    if "forward" in vars(block):
        return "it has a forward of its own, which knows nothing of experts; del block.forward first"
    if _is_foreign(block):
        return f"it has {_put_in(block)}, which knows nothing of experts; undo that first"
    for path, module in dense_network(block).named_modules():
        found = _own_ways(module, is_part=bool(path))
        if found is not None:
            return f"{f'mlp.{path}' if path else 'its mlp'} {found}"
    return None


def bypassed(attention: nn.Module) -> str | None:
    """What would no longer be called, because a block whose router needs a context computes attention itself."""
    kind = type(attention).__name__
    if _is_foreign(attention):
        return f"its {kind} computes attention in a way of its own, which would no longer be asked; {_LEAVE}"
    if _has_hook(attention):
        return f"its {kind} has a hook, which would no longer be called; remove it, or {_LEAVE}"
    if "forward" in vars(attention):
        return f"its {kind} has a forward of its own, which would no longer be called; delete that first, or {_LEAVE}"
    return None


def packed(attention: Any) -> Any:
    """An attention module whose packed weights a sparse block may read itself: what adapts them would be left out."""
    if hasattr(attention, "base_layer"):
        raise UserError(
            "an adapter around attention with packed weights would be left out where a block needs a context: leave it "
            "out of target_modules, or use score='prototype' or score='energy' in ermoe.upcycle"
        )
    return attention


def _own_ways(module: nn.Module, *, is_part: bool) -> str | None:
    """What the module does beside its weights, and what to do about it."""
    if is_parametrized(module):
        return "is parametrized; merge that first with torch.nn.utils.parametrize.remove_parametrizations"
    if any(name in {**module._parameters, **module._buffers} for name in _REWRITTEN):
        return (
            "computes its weight anew in each pass; merge that first with torch.nn.utils.remove_weight_norm, "
            "remove_spectral_norm or prune.remove"
        )
    if _has_hook(module):
        return "has a hook, which would be lost; remove it, and register it again on the expert layer afterwards"
    if "forward" in vars(module):
        return "has a forward of its own, which would be lost; delete that first"
    if is_part and _is_adapted(module):
        return not_linear(module)
    if _is_foreign(module) and (not is_part or isinstance(module, nn.Linear)):
        return f"has {_put_in(module)}, which would be lost; undo that first"
    if isinstance(module, _REPLACED) and _is_foreign(module):
        kind = next(base.__name__ for base in type(module).__mro__ if base in _REPLACED)
        return f"is a {type(module).__module__}.{type(module).__qualname__}, which experts do not have; use {kind}"
    if any(parameter._backward_hooks for parameter in module.parameters(recurse=False)):
        return "has a hook on the gradient of a weight, which would be lost; remove it"
    strange = next((p for p in module.parameters(recurse=False) if not _is_plain(p)), None)
    if strange is not None:
        return (
            f"holds its weights as {type(strange).__name__} in {str(strange.dtype).removeprefix('torch.')}; convert "
            "the model before it is sharded or quantised"
        )
    return None


def _has_hook(module: nn.Module) -> bool:
    """Whether anybody but Hugging Face listens, which itself puts hooks on models that were asked for hidden states."""
    hooks = [hook for kind in _HOOKS for hook in (getattr(module, kind, None) or {}).values()]
    return any(getattr(hook, "__module__", None) != _HUGGING_FACE_LISTENS for hook in hooks)


def _is_foreign(module: nn.Module) -> bool:
    """Whether its class, or one of its bases, has a forward that none of the known libraries wrote."""
    return str(type(module).forward.__module__).partition(".")[0] not in _LIBRARIES


def _put_in(module: nn.Module) -> str:
    """A forward that somebody else has put into a library's class."""
    return f"a forward that {type(module).forward.__module__} has put into the class {type(module).__name__}"


def not_linear(module: nn.Module) -> str:
    """What is wrong with a module that is in the place of a linear layer."""
    kind = type(module)
    return (
        f"is a {kind.__module__}.{kind.__qualname__} and no plain linear layer; merge what was added to it, or convert "
        "the model before it is adapted or quantised"
    )


def _is_adapted(module: nn.Module) -> bool:
    """Whether it stands for a linear layer and does something else, or is a network of its own."""
    kind = type(module)
    is_linear = isinstance(module, nn.Linear) and kind.forward is nn.Linear.forward
    is_linear = is_linear and kind.__call__ is nn.Linear.__call__
    has_parts = any(True for child in module.children() for _ in child.parameters())
    return has_parts or (hasattr(module, "in_features") and not is_linear)


def _is_plain(parameter: Tensor) -> bool:
    return type(parameter) in (nn.Parameter, Tensor) and parameter.is_floating_point()
