"""The noise that some rivals add to their logits, made repeatable."""

from __future__ import annotations

import torch
from torch import Tensor

from ermoe.nn.recompute import is_recomputing

_REMEMBERED_DRAWS = 64


class Noise:
    """Standard-normal draws that repeat themselves when activation checkpointing repeats a forward.

    Without a generator they come from torch's own, whose state checkpointing restores by itself. A generator of the
    user's is unknown to it, so the states from which the last draws were made are remembered here, by the values
    they were drawn for; a repeated forward sees the same values and so finds its own state.
    """

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self.generator = generator
        self._state: dict[tuple[float, ...], Tensor] = {}

    def like(self, values: Tensor) -> Tensor:
        """A draw in the shape of ``values``."""
        if self.generator is None:
            return torch.randn_like(values)
        key = (float(values.numel()), *_fingerprint(values))
        if not is_recomputing():
            self._remember(key, self.generator.get_state())
            return self._draw(values)
        if key not in self._state:
            raise RuntimeError(
                "activation checkpointing repeats a forward whose noise is no longer known: leave noise_generator "
                f"unset, or run the backward pass within {_REMEMBERED_DRAWS} forwards"
            )
        now = self.generator.get_state()
        self.generator.set_state(self._state[key])
        repeated = self._draw(values)
        self.generator.set_state(now)
        return repeated

    def _draw(self, values: Tensor) -> Tensor:
        assert self.generator is not None
        draw = torch.randn(values.shape, generator=self.generator, device=self.generator.device, dtype=values.dtype)
        return draw.to(values.device)

    def _remember(self, key: tuple[float, ...], state: Tensor) -> None:
        self._state[key] = state
        if len(self._state) > _REMEMBERED_DRAWS:
            del self._state[next(iter(self._state))]


def _fingerprint(values: Tensor) -> list[float]:
    values = values.detach().double()
    fingerprint: list[float] = torch.stack([values.sum(), values.square().sum()]).tolist()
    return fingerprint
