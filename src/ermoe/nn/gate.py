"""The learned gate of the logit score and of most rivals.

Letters: D width, E experts.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ermoe.nn.precision import full_precision, widen


class Gate(nn.Module):
    """Logits x W, (..., E), with a learned W (D, E) and no bias, in at least float32."""

    def __init__(
        self,
        dim: int,
        num_experts: int,
        *,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.empty(dim, num_experts, device=device, dtype=dtype))
        self.reset_parameters(generator)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Gaussian with the variance that keeps logits of unit-variance tokens at unit variance."""
        if not self.W.is_meta:
            with torch.no_grad():
                self.W.normal_(std=self.W.shape[0] ** -0.5, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        with full_precision(x):
            return widen(x) @ widen(self.W)
