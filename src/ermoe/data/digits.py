"""Handwritten digits that come with scikit-learn: real images, no download. 1,797 of them, 8 × 8 pixels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

NUM_CLASSES = 10
SIDE = 8
"""Pixels."""


@dataclass(slots=True, frozen=True)
class Split:
    """Images (B, 1, 8, 8) with ink as 1 and paper as 0, and their digits (B,)."""

    image: Tensor
    label: Tensor

    def __len__(self) -> int:
        return len(self.label)


def digits(held_out: float = 1 / 3, *, seed: int = 0) -> tuple[Split, Split]:
    """A training and a held-out part with the same mix of digits.

    >>> train, test = digits()
    >>> train.image.shape, len(test)
    (torch.Size([1198, 1, 8, 8]), 599)
    """
    from sklearn.model_selection import train_test_split

    image, label = _all_digits()
    train, test = train_test_split(range(len(label)), test_size=held_out, stratify=label, random_state=seed)
    return Split(image[train], label[train]), Split(image[test], label[test])


@cache  # a text file, slow to parse
def _all_digits() -> tuple[Tensor, Tensor]:
    """Images and digits in scikit-learn's order."""
    from sklearn.datasets import load_digits

    pixels, label = load_digits(return_X_y=True)
    image = torch.from_numpy(pixels).float().view(-1, 1, SIDE, SIDE) / 16  # stored as counts from 0 to 16
    return image, torch.from_numpy(label)
