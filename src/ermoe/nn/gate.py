"""The learned gate of the logit score and of most rivals.

Letters: D width, E experts.
"""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor, nn

from ermoe.nn.precision import full_precision, widen
from ermoe.nn.start import Start, parameter


class Gate(nn.Module):
    """Logits x W, (..., E), with a learned W (D, E) and no bias, in at least float32."""

    def __init__(self, dim: int, num_experts: int, **start: Unpack[Start]) -> None:
        super().__init__()
        self.W = parameter(dim, num_experts, **start)
        self.reset_parameters(start.get("generator"))

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Gaussian with the variance that keeps logits of unit-variance tokens at unit variance."""
        if not self.W.is_meta:
            with torch.no_grad():
                self.W.normal_(std=self.W.shape[0] ** -0.5, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        with full_precision(x):
            return widen(x) @ widen(self.W)
