"""The size of a text tower: numbers alone, which a command line reads without waiting for torch."""

from __future__ import annotations

from dataclasses import dataclass

from ermoe.errors import UserError


@dataclass(frozen=True, slots=True)
class TextShape:
    """The size of a text tower; defaults are those of CLIP ViT-B.

    OpenAI's weights need ``quick_gelu``, most others do not, and a mistake costs accuracy without any error.
    """

    context_length: int = 77
    vocab_size: int = 49408
    width: int = 512
    heads: int = 8
    layers: int = 12
    quick_gelu: bool = False

    def __post_init__(self) -> None:
        for name in ("context_length", "vocab_size", "width", "heads", "layers"):
            if getattr(self, name) < 1:
                raise UserError(f"text tower: {name}={getattr(self, name)}; need at least 1")
        if self.width % self.heads:
            raise UserError(f"text tower: heads={self.heads} do not divide width={self.width}")
