"""Models around a backbone of another library: their blocks, and all there is to know of them, are that backbone's."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from torch import nn

from ermoe.models.backbones import FFN, Family, SparseBlock, family_of


class Around(Family):
    """What is left to say is where the backbone is, and how the whole is written down."""

    @abstractmethod
    def inside(self, model: Any) -> str:
        """The dotted name of the backbone in the model."""

    def _backbone(self, model: Any) -> tuple[Family, nn.Module]:
        backbone = model.get_submodule(self.inside(model))
        return family_of(backbone), backbone

    def blocks(self, model: Any) -> list[tuple[str, nn.Module]]:
        family, backbone = self._backbone(model)
        return [(f"{self.inside(model)}.{name}", block) for name, block in family.blocks(backbone)]

    def num_tokens(self, model: Any) -> int:
        family, backbone = self._backbone(model)
        return family.num_tokens(backbone)

    def image_size(self, model: Any) -> tuple[int, ...]:
        family, backbone = self._backbone(model)
        return family.image_size(backbone)

    # A block belongs to the family of the module that defines its class.

    def sparse_class(self, block: Any) -> type[SparseBlock]:
        return family_of(block).sparse_class(block)

    def refusal(self, block: Any) -> str | None:
        return family_of(block).refusal(block)

    def no_context(self, block: Any) -> str | None:
        return family_of(block).no_context(block)

    def ffn(self, block: Any) -> FFN:
        return family_of(block).ffn(block)
