"""Which parameters learn: freezing by the part of the model or by name."""

from __future__ import annotations

from fnmatch import fnmatchcase

from torch import nn

from ermoe.errors import UserError
from ermoe.nn import MixtureLayer
from ermoe.nn.experts import DenseLinear

CLASSIFIERS = ("head", "head_dist", "heads", "classifier", "cls_classifier", "distillation_classifier")
_HEADS = (*CLASSIFIERS, "fc_norm", "attn_pool")


def freeze(model: nn.Module, *parts: str) -> list[str]:
    """Stops parameters from learning; returns their names.

    A part is "experts" (with them goes the basis through which an eigen router looks), "shared" (the expert that every
    token meets), "router" (its own parameters), "head" (the classifier), "backbone" (all the rest), or a pattern for
    parameter names such as "blocks.0.*".

    >>> import timm
    >>> from ermoe.models.upcycle import upcycle
    >>> model = upcycle(timm.create_model("test_vit"), blocks=[5])
    >>> _ = freeze(model, "backbone", "head")
    >>> [name for name, p in model.named_parameters() if p.requires_grad][:2]
    ['blocks.5.mlp.experts.up.U', 'blocks.5.mlp.experts.up.s']
    """
    return _set(model, parts, learns=False)


def unfreeze(model: nn.Module, *parts: str) -> list[str]:
    """Lets parameters learn again; parts as in `freeze`."""
    return _set(model, parts, learns=True)


def lora_targets(model: nn.Module) -> list[str]:
    """The experts' weights by name, for ``target_parameters`` of peft's ``LoraConfig``; those of shared experts, where
    the others start silent.

    Plain weights are named as they are. Of W = U diag(s) Vᵀ it is one factor, V where tokens enter and U where they
    leave: at full rank a low-rank change of it is a low-rank change of W, and the basis that routes stays as it is.

    >>> import timm
    >>> from ermoe.models.upcycle import upcycle
    >>> lora_targets(upcycle(timm.create_model("test_vit"), blocks=[5]))
    ['blocks.5.mlp.experts.up.V', 'blocks.5.mlp.experts.down.U']
    """
    names = []
    for prefix, layer in model.named_modules():
        if isinstance(layer, MixtureLayer):
            part, experts = ("experts", layer.experts) if layer.shared is None else ("shared", layer.shared)
            for name in ("gate", "up", "down"):
                linear = getattr(experts, name)
                if linear is not None:
                    factor = "W" if isinstance(linear, DenseLinear) else "U" if name == "down" else "V"
                    names.append(f"{prefix}.{part}.{name}.{factor}".lstrip("."))
    if not names:
        raise UserError(f"this {type(model).__name__} has no layers of experts: make it sparse with ermoe.upcycle")
    return names


def _set(model: nn.Module, parts: tuple[str, ...], *, learns: bool) -> list[str]:
    part_of = _parts(model)
    if not parts:
        raise UserError(f"no part is named: use one of {', '.join(sorted(set(part_of.values())))}, or '*' for all")
    parameters = dict(model.named_parameters())
    chosen = []
    for part in parts:
        matches = [name for name in parameters if part_of[name] == part or fnmatchcase(name, part)]
        if not matches:
            known = ", ".join(sorted(set(part_of.values())))
            raise UserError(f"{part!r} names no parameter of this model: use one of {known}, or a pattern of names")
        chosen += matches
    for name in chosen:
        parameters[name].requires_grad_(learns)
    return sorted(set(chosen))


def _parts(model: nn.Module) -> dict[str, str]:
    """The part to which each parameter belongs."""
    part_of = {name: "head" if name.partition(".")[0] in _HEADS else "backbone" for name, _ in model.named_parameters()}
    for prefix, module in model.named_modules():
        if isinstance(module, MixtureLayer):
            for name, _ in module.named_parameters():
                full_name = f"{prefix}.{name}" if prefix else name
                inside = name.partition(".")[0]
                part_of[full_name] = inside if inside in ("experts", "shared") else "router"
    return part_of
