"""The two towers of a CLIP, with open_clip's parameter names, so that weights go both ways; and texts as numbers.

The byte-pair vocabulary is the one that open_clip brings along.

Letters: B images or texts, T texts, L tokens of a text.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from open_clip import SimpleTokenizer
from open_clip.timm_model import TimmModel
from open_clip.transformer import QuickGELU, TextTransformer
from timm.layers import PatchDropout
from torch import Tensor, nn

from ermoe.errors import UserError
from ermoe.retrieval.presets import TextShape

END = 49407
_PORTION = 4096


class TextTower(TextTransformer):
    """open_clip's causal transformer, which also takes texts that are cut to the longest of a batch."""

    def __init__(self, shape: TextShape, embed_dim: int) -> None:
        super().__init__(
            context_length=shape.context_length,
            vocab_size=shape.vocab_size,
            width=shape.width,
            heads=shape.heads,
            layers=shape.layers,
            output_dim=embed_dim,
            act_layer=QuickGELU if shape.quick_gelu else nn.GELU,
        )
        self.shape = shape
        self.attn_mask = None  # made anew for every length: as a buffer, its infinities would enter weight averages

    def _embeds(self, text_BL: Tensor) -> tuple[Tensor, Tensor]:
        length = text_BL.shape[1]
        if length > self.context_length:
            raise UserError(f"a text of {length} tokens does not fit the {self.context_length} of this text tower")
        token_BLD = self.token_embedding(text_BL) + self.positional_embedding[:length]
        return token_BLD, token_BLD.new_full((length, length), -math.inf).triu(1)


class ImageTower(TimmModel):
    """A timm trunk and a linear projection without bias."""

    def __init__(self, trunk: Any, embed_dim: int) -> None:
        nn.Module.__init__(self)  # TimmModel's own would create the trunk by name, without arguments
        self.image_size = tuple(trunk.patch_embed.img_size)
        self.trunk = trunk
        projection = nn.Linear(trunk.num_features, embed_dim, bias=False)
        self.head = nn.Sequential(OrderedDict(drop=nn.Dropout(0.0), proj=projection))

    def no_weight_decay(self) -> set[str]:
        """The trunk's exceptions under their names here."""
        return {f"trunk.{name}" for name in self.trunk.no_weight_decay()}

    @contextmanager
    def dropping_patches(self, share: float) -> Iterator[None]:
        """Within the block a random ``share`` of each image's patches is left out, in training mode only."""
        if not 0 < share < 1:
            raise UserError(f"patches to drop: {share}; need a share between 0 and 1")
        before = self.trunk.patch_drop
        self.trunk.patch_drop = PatchDropout(share, num_prefix_tokens=self.trunk.num_prefix_tokens).train(self.training)
        try:
            yield
        finally:
            self.trunk.patch_drop = before


def trim(text_BL: Tensor) -> Tensor:
    """Texts without the padding that all of them share: a causal tower does not see what follows a text's end.

    >>> trim(torch.tensor([[5, 9, 0, 0], [5, 7, 9, 0]])).shape
    torch.Size([2, 3])
    """
    return text_BL[:, : max(1, int((text_BL != 0).any(0).sum()))]


@dataclass(frozen=True, slots=True)
class Tokens:
    """Ids (T, L) between a start and an end token, padded with zeros, and how many texts were too long."""

    id_TL: Tensor
    num_cut: int


@cache
def _tokenizer() -> SimpleTokenizer:
    return SimpleTokenizer()


def tokenise(texts: Sequence[str], context_length: int) -> Tokens:
    """The tokens of texts. One that is too long loses its last tokens, never its end token.

    >>> tokens = tokenise(["a dog", "a dog runs after a red ball"], 5)
    >>> tokens.id_TL.tolist(), tokens.num_cut
    ([[49406, 320, 1929, 49407, 0], [49406, 320, 1929, 5586, 49407]], 1)
    """
    parts = [torch.empty(0, context_length, dtype=torch.int32)]
    num_cut = 0
    for start in range(0, len(texts), _PORTION):
        # One place more than there is shows which texts do not fit.
        id_TL = _tokenizer()(list(texts[start : start + _PORTION]), context_length + 1)
        cut_T = id_TL[:, -1] != 0
        id_TL[cut_T, -2] = END
        num_cut += int(cut_T.sum())
        parts.append(id_TL[:, :-1].to(torch.int32))
    return Tokens(torch.cat(parts), num_cut)
