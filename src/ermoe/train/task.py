"""What the loop asks of a task. Whatever has these names can be trained."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from torch import Tensor, nn


class Task(Protocol):
    """A model, its data and what is wanted of it.

    ``goal`` names the figure of `evaluate` by which the best epoch is chosen; larger is better.
    """

    model: nn.Module
    goal: str

    @property
    def steps_per_epoch(self) -> int:
        """Optimiser steps in an epoch."""

    def batches(self, epoch: int, first_step: int) -> Iterator[list[Any]]:
        """This process's share of every step from ``first_step`` on, in parts to accumulate."""

    def loss(self, network: nn.Module, batch: Any) -> Tensor:
        """The mean loss of a batch; ``network`` is the model, wrapped for training."""

    def settle(self) -> str | None:
        """Fits what is not learned by gradients, such as offsets, to the weights that are about to be judged and kept.

        Says on what, for the record; None if nothing was settled. Training goes on from the offsets it had.
        """

    def evaluate(self) -> dict[str, float]:
        """Figures of the model as it is, over all processes; called on every one of them."""

    def state_dict(self) -> dict[str, Any]:
        """What the task itself must remember: tensors and plain values."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes that back."""
