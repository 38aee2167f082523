"""Everything a run needs to go on, in one file that is replaced in one step.

State is gathered to whole tensors and keyed by parameter names, so that a checkpoint does not remember how many
processes wrote it. There are no random-number states in it: those are a function of the step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypedDict, cast

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from ermoe.errors import UserError
from ermoe.files import replacing
from ermoe.models.weights.stored import check_archive

State = dict[str, Any]
"""What a module, an optimiser or a task remembers: tensors and plain values, by name."""
_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
_FORMAT = 1


class Checkpoint(TypedDict):
    """All that a run goes on from; ``position`` has the fields of `ermoe.train.trainer.Position`."""

    model: State
    optimizer: State
    position: State
    scaler: State
    task: State
    average: State | None


def gather(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[State, State]:
    """Model and optimiser as whole tensors on the CPU; under FSDP complete on the main process, called on all."""
    return whole_model(model), get_optimizer_state_dict(model, optimizer, options=_WHOLE)


def whole_model(model: nn.Module) -> State:
    """The model alone, in the same way."""
    return get_model_state_dict(model, options=_WHOLE)


def scatter(model: nn.Module, optimizer: torch.optim.Optimizer, state: Checkpoint) -> None:
    """Gives ``model`` and ``optimizer`` what `gather` took of them, however they are sharded now."""
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, state["model"], options=options)
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)


def write(path: Path, state: Checkpoint) -> None:
    """Replaces the checkpoint at ``path``; whatever goes wrong, the one that was there stays."""
    with replacing(path) as draft:
        torch.save({"format": _FORMAT, **state}, draft)


def read(path: Path) -> Checkpoint:
    """The checkpoint at ``path``; nothing but tensors and plain values is ever unpickled."""
    try:
        check_archive(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
        written = state["format"]
    except Exception as problem:  # what unpickling damaged bytes raises is anybody's guess
        raise UserError(f"{path} is damaged or no checkpoint of a run: remove it to start anew") from problem
    if written != _FORMAT:
        raise UserError(f"{path} has format {written}, this version reads {_FORMAT}: start a new run")
    return cast(Checkpoint, state)
