"""Which parameters learn: freezing by the part of the model or by name."""

from __future__ import annotations

from fnmatch import fnmatchcase

from torch import nn

from ermoe.errors import UserError
from ermoe.nn import MixtureLayer

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
