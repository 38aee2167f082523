"""Texts as numbers, by the byte-pair vocabulary that open_clip brings along.

Letters: T texts, L tokens of a text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from open_clip import SimpleTokenizer
from torch import Tensor

END = 49407
_PORTION = 4096


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
