"""What Hugging Face's Trainer does for experts after its steps: equal load, orthonormal bases."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import TrainerCallback

from ermoe.errors import UserError
from ermoe.nn import retract, update_balance


class ExpertUpkeep(TrainerCallback):
    """A callback for ``Trainer(callbacks=[ExpertUpkeep()])``: moves the offsets after every step, and retracts bases.

    Both happen before the Trainer saves, and bases are retracted after the steps that the number of the step names, so
    that a run which is killed and resumed ends as one that was not.

    ``retract_every`` counts optimiser steps; None stands for the end of each epoch.

    >>> from transformers import TrainerControl, TrainerState, TrainingArguments
    >>> from ermoe.nn import EigenMoE
    >>> layer, state = EigenMoE(16, num_experts=4), TrainerState(epoch=0.5, global_step=10)
    >>> ExpertUpkeep().on_step_end(None, state, TrainerControl(), model=layer)
    """

    def __init__(self, *, retract_every: int | None = None) -> None:
        if retract_every is not None and retract_every < 1:
            raise UserError(f"retract_every={retract_every}: need a number of steps, or None for once an epoch")
        self.retract_every = retract_every

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Called by the Trainer after an optimiser step, of which ``others`` has the model."""
        model: nn.Module = others["model"]
        update_balance(model)
        # At the last step of an epoch, state.epoch is a whole number.
        every = self.retract_every
        if state.epoch == int(state.epoch) if every is None else state.global_step % every == 0:
            retract(model, report=False)
