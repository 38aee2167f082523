"""Backbones inside other modules: found, named, and shown through an adapter that knows where they are.

What only runs a model in another way (compiled, in parallel) is taken off first: it would keep hold of parameters that
are no longer there.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ermoe.errors import UserError
from ermoe.files import Json
from ermoe.models.backbones import Family, SparseBlock, family_name, family_named, family_of, known_family
from ermoe.nn.ffn import FFN

_log = logging.getLogger("ermoe")


class Around(Family):
    """The adapter of a library's models around a backbone of another: where that is, and how the whole is written down.

    All else is asked of the adapter for one such model, which knows what it holds.
    """

    @abstractmethod
    def inside(self, model: Any) -> str:
        """The dotted name of the backbone in the model."""

    def bound_to(self, model: Any) -> Family:
        path = self.inside(model)
        return Inside(path, family_of(model.get_submodule(path)), around=self)

    def ffn(self, block: Any) -> FFN:
        raise AssertionError("asked of all models around a backbone, and not of one")

    def num_tokens(self, model: Any) -> int:
        return self.bound_to(model).num_tokens(model)

    def image_size(self, model: Any) -> tuple[int, ...]:
        return self.bound_to(model).image_size(model)


class Inside(Family):
    """The adapter of a module that holds one backbone, at ``path``; ``around`` knows the whole where a library does."""

    def __init__(self, path: str, family: Family, around: Family | None = None) -> None:
        self.path, self.family, self.around = path, family, around

    def _held(self, model: Any) -> nn.Module:
        held: nn.Module = model.get_submodule(self.path)
        return held

    def backbone(self, model: Any) -> nn.Module:
        return self.family.backbone(self._held(model)) if self.around is None else self.around.backbone(model)

    def blocks(self, model: Any) -> list[tuple[str, nn.Module]]:
        return [(f"{self.path}.{name}", block) for name, block in self.family.blocks(self._held(model))]

    def sparse_class(self, block: Any) -> type[SparseBlock]:
        return self.family.sparse_class(block)

    def attention(self, block: Any) -> nn.Module | None:
        return self.family.attention(block)

    def refusal(self, block: Any) -> str | None:
        return self.family.refusal(block)

    def no_context(self, block: Any) -> str | None:
        return self.family.no_context(block)

    def ffn(self, block: Any) -> FFN:
        return self.family.ffn(block)

    def num_tokens(self, model: Any) -> int:
        return self.family.num_tokens(self._held(model))

    def image_size(self, model: Any) -> tuple[int, ...]:
        return self.family.image_size(self._held(model))

    def channels(self, model: Any) -> int:
        return self.family.channels(self._held(model))

    def unsavable(self, model: Any) -> str | None:
        if self.around is not None:
            return self.around.unsavable(model)
        held = self._held(model)
        place = f"experts go into {self.path}, the {type(held).__name__} of this {type(model).__name__}"
        return self.family.unsavable(held) or f"{place}: {self._how_to_save(model)}"

    def describe(self, model: Any) -> Json:
        if self.around is not None:
            return self.around.describe(model)
        raise UserError(
            f"only a part of this {type(model).__name__} is a backbone, {self.path}: {self._how_to_save(model)}"
        )

    def _how_to_save(self, model: Any) -> str:
        kind, part = type(model).__name__, f"ermoe.save writes that part, ermoe.save({address(self.path)}, folder)"
        if self.family.is_built_by(model, self._held(model)):
            return f"{part}; save_pretrained and from_pretrained of {kind} keep the whole"
        return f"{part}; the rest of a {kind} is yours to save, as its state_dict"

    def mark(self, model: Any, sparsity: Any, whole: nn.Module) -> None:
        if self.around is not None:
            self.around.mark(model, sparsity, whole)

    def build(self, description: Json, *, device: str = "cpu") -> nn.Module:
        if self.around is not None:
            return self.around.build(description, device=device)
        raise AssertionError("a module around a backbone was described, which `describe` does not do")


def inside(model: nn.Module) -> Inside:
    """The adapter for a module that holds one backbone; none or several are an error.

    >>> import timm
    >>> wrapped = nn.Sequential(timm.create_model("test_vit"), nn.Linear(1000, 2))
    >>> inside(wrapped).blocks(wrapped)[1][0]
    '0.blocks.1'
    """
    found: dict[nn.Module, str] = {}
    for path, held in _backbones(model):
        found.setdefault(held, path)
    if len(found) == 1:
        ((held, path),) = found.items()
        return Inside(path, _family(held))
    if not found:
        family_name(model)  # says which backbones there are
    listed = ", ".join(f"{path} ({type(held).__name__})" for held, path in found.items())
    raise UserError(
        f"this {type(model).__name__} holds several backbones, {listed}: pass the one you mean, for example "
        f"ermoe.upcycle({address(next(iter(found.values())))}, inplace=True)"
    )


def address(path: str) -> str:
    """How one would write down a part of ``model``.

    >>> address("tower.vit"), address("0.vit")
    ('model.tower.vit', 'model.get_submodule("0.vit")')
    """
    is_attribute = all(part.isidentifier() for part in path.split("."))
    return f"model.{path}" if is_attribute else f'model.get_submodule("{path}")'


def _backbones(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The outermost modules that are backbones, under all their names."""
    for name, child in module.named_children():
        if _is_backbone(child):
            yield f"{prefix}{name}", child
        else:
            yield from _backbones(child, f"{prefix}{name}.")


def _family(module: nn.Module) -> Family:
    return family_named(family_name(module)).bound_to(module)


def _is_backbone(module: nn.Module) -> bool:
    """Whether it is a whole model: the classes of its parts are of the same family."""
    if known_family(module) is None:
        return False
    try:
        return bool(_family(module).blocks(module))
    except (AttributeError, UserError):  # there are no blocks where a model would have them
        return False


def bare(model: nn.Module, *, inplace: bool) -> nn.Module:
    """The model without what runs it in another way: compiled, or on several devices."""
    kind = type(model).__name__
    for path, module in model.named_modules():
        way = _way_to_run(module)
        if way is None:
            continue
        held_at, again = way
        keeps_hold = not isinstance(module, DataParallel)  # which looks at its module anew in every pass
        if path or held_at is None or (inplace and keeps_hold):
            what = f"{path}, a part of this {kind}," if path else f"this {type(module).__name__}"
            raise UserError(
                f"{what} keeps hold of weights that experts would replace: convert the model first, and {again} "
                "afterwards"
            )
        _log.warning("the sparse model comes without the %s that was around it: %s", kind, again)
        return bare(module.get_submodule(held_at), inplace=inplace)
    return model


def _way_to_run(module: nn.Module) -> tuple[str | None, str] | None:
    """Where a module that only runs another one holds it, and how to have it so again; None for any other module."""
    kind = type(module)
    if kind.__name__ == "OptimizedModule" and "_orig_mod" in module._modules:
        return "_orig_mod", "compile it"
    if isinstance(module, DataParallel | DistributedDataParallel):
        return "module", "wrap it"
    if kind.__module__.startswith("torch.distributed.fsdp") or kind.__name__.startswith("FSDP"):
        return None, "shard it"
    return None
