"""Where parameters begin: the three keywords that every constructor of this package takes and hands on."""

from __future__ import annotations

from typing import TypedDict

import torch
from torch import nn


class Start(TypedDict, total=False):
    """Source of the random numbers of the initialisation, and where and in which precision parameters are kept."""

    generator: torch.Generator | None
    device: torch.device | str | None
    dtype: torch.dtype | None


def parameter(
    *shape: int,
    generator: torch.Generator | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Parameter:
    """A parameter that is yet to be drawn; ``generator`` is for whoever draws it."""
    return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
