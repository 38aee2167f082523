"""What is matched with what in training: CLIP's pairs, and those of its rivals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ermoe.errors import UserError
from ermoe.retrieval.rivals import fix_clip, long_clip

Pairs = Callable[[Tensor, Tensor], list[tuple[Tensor, Tensor]]]


@dataclass(frozen=True, slots=True)
class Objective:
    """From the features of a batch to the pairs that are contrasted.

    With ``needs_long`` each image comes with a long text, all its captions joined, before a short one; with
    ``masked_share`` each image passes a second time with that share of its patches left out.
    """

    pairs: Pairs
    needs_long: bool = False
    masked_share: float = 0.0


def _plain(image_BD: Tensor, text_BD: Tensor) -> list[tuple[Tensor, Tensor]]:
    return [(image_BD, text_BD)]


OBJECTIVES = {
    "clip": Objective(_plain),
    "long-clip": Objective(long_clip.pairs, needs_long=True),
    "fix-clip-style": Objective(fix_clip.pairs, needs_long=True, masked_share=fix_clip.MASKED_SHARE),
}


def objective_of(name: str) -> Objective:
    """The objective called ``name``.

    >>> objective_of("fix-clip-style").masked_share
    0.5
    """
    if name not in OBJECTIVES:
        raise UserError(f"there is no objective {name!r}: use one of {', '.join(OBJECTIVES)}")
    return OBJECTIVES[name]
