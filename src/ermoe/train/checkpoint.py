"""Everything a run needs to go on, in one file that is replaced in one step.

Where every process holds the whole model, the file holds it too. Otherwise model, optimiser and averages are in parts
beside it (`ermoe.train.parts`), which are complete before the file names them. State is keyed by parameter names, so
that a checkpoint does not remember how many processes wrote it, nor how they shared the model. There are no
random-number states in it: those are a function of the step.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, NotRequired, TypedDict, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)

from ermoe.errors import UserError
from ermoe.files import is_plain_name, replacing
from ermoe.models.weights.stored import check_archive
from ermoe.nn.sharding import sharded_as

State = dict[str, Any]
"""What a module, an optimiser or a task remembers: tensors and plain values, by name."""
_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
_WHOLE_FORMAT, _PARTS_FORMAT = 1, 2


class Checkpoint(TypedDict):
    """All that a run goes on from; ``position`` has the fields of `ermoe.train.trainer.Position`.

    ``parts`` names the folder beside the file that holds the tensors of model, optimiser and averages, if they are not
    here.
    """

    parts: NotRequired[str]
    model: State
    optimizer: State
    position: State
    scaler: State
    task: State
    average: State | None


def gather(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[State, State]:
    """Model and optimiser of a process that holds them whole, on the CPU."""
    return get_model_state_dict(model, options=_WHOLE), get_optimizer_state_dict(model, optimizer, options=_WHOLE)


def scatter(model: nn.Module, optimizer: torch.optim.Optimizer, state: Checkpoint) -> None:
    """Gives ``model`` and ``optimizer`` what `gather` took of them, however they are sharded now.

    Of the optimiser, that is what it remembers of parameters; their learning rates follow from settings and step.
    """
    set_model_state_dict(model, state["model"], options=StateDictOptions(full_state_dict=True))
    remembered = state["optimizer"]["state"]
    for name, parameter in model.named_parameters():
        for key, value in remembered.get(name, {}).items():
            optimizer.state[parameter][key] = _like(parameter, value)


def _like(parameter: Tensor, value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    own = value.to(parameter.device, copy=True)
    return own if own.shape != parameter.shape else sharded_as(parameter, own)


def write(path: Path, state: Checkpoint) -> None:
    """Replaces the checkpoint at ``path``; whatever goes wrong, the one that was there stays."""
    with replacing(path) as draft:
        torch.save({"format": _PARTS_FORMAT if "parts" in state else _WHOLE_FORMAT, **state}, draft)


def read(path: Path) -> Checkpoint:
    """The checkpoint at ``path``; nothing but tensors and plain values is ever unpickled."""
    try:
        check_archive(path)
        with warnings.catch_warnings():  # about what is refused anyway
            warnings.simplefilter("ignore")
            state = torch.load(path, map_location="cpu", weights_only=True)
        written = state["format"]
    except Exception as problem:  # what unpickling damaged bytes raises is anybody's guess
        raise UserError(f"{path} is damaged or no checkpoint of a run: remove it to start anew") from problem
    if written not in (_WHOLE_FORMAT, _PARTS_FORMAT):
        raise UserError(f"{path} has format {written}, this version reads 1 and 2: start a new run")
    if written == _PARTS_FORMAT and not is_plain_name(state.get("parts")):
        raise UserError(f"{path} is damaged or no checkpoint of a run: remove it to start anew")
    return cast(Checkpoint, state)
