"""Checkpoints in parts: every process writes what it holds, and reads what it needs, however many wrote it.

The parts are safetensors files that torch's distributed checkpoints read and write; nothing is unpickled. Tensors are
found by name, so that neither the number of processes nor their way of sharing a model is remembered.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter

from ermoe.errors import UserError
from ermoe.files import UnwritableError
from ermoe.models.weights.stored import declared
from ermoe.nn.sharding import is_sharded

_NAME = "parts-*"
_SMALLEST_FILE = 64 * 2**20
_FILES = 20
"""Of a process: each is put together in memory before it is written, so a save needs a twentieth of what it saves."""


def name_of(epoch: int, step: int) -> str:
    """The folder of the parts of one checkpoint."""
    return f"parts-{epoch}-{step}"


def forget(folder: Path, kept: str | None) -> None:
    """Removes all parts in a folder but those of the checkpoint that is kept."""
    for path in folder.glob(_NAME):
        if path.name != kept:
            shutil.rmtree(path, ignore_errors=True)


def write(folder: Path, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Writes this process's share of all tensors; called on every process."""
    folder.mkdir(parents=True, exist_ok=True)
    writer = HuggingFaceStorageWriter(str(folder), _files(tensors), save_distributed=True)
    try:
        with _perhaps_alone() as is_alone:
            dcp.save(dict(tensors), storage_writer=writer, process_group=group, no_dist=is_alone)
    except (Exception, CheckpointException) as problem:  # the second is none of the first
        cause = _disk_error(problem)
        if cause is None:
            raise
        raise UnwritableError(folder, cause) from problem


def read(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fills tensors, whole or sharded, with what was written by their names; called on every process."""
    try:
        with _perhaps_alone() as is_alone:
            dcp.load(dict(tensors), storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=is_alone)
    except (Exception, CheckpointException) as problem:  # what is raised of damaged parts is anybody's guess
        raise UserError(
            f"{folder} is damaged or holds parts of another run: remove {folder.parent}/last.pt to start anew"
        ) from problem


@contextmanager
def _perhaps_alone() -> Iterator[bool]:
    """Whether this process has no others, of which torch would warn although it was told."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield not dist.is_initialized()


def stored_names(folder: Path) -> set[str]:
    """The names of all tensors in a checkpoint's parts."""
    return {name for file in folder.glob("*.safetensors") for name in declared(file).tensors}


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """What both remember, by name, without copies; sharded tensors stay so."""
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        tensors |= {f"optimizer.{name}.{key}": value for key, value in optimizer.state.get(parameter, {}).items()}
    return tensors


def prepare(model: nn.Module, optimizer: torch.optim.Optimizer, names: set[str]) -> None:
    """Gives a fresh optimiser room for what the checkpoint with those names remembers of every parameter."""
    for name, parameter in model.named_parameters():
        prefix = f"optimizer.{name}."
        for key in (stored.removeprefix(prefix) for stored in names if stored.startswith(prefix)):
            is_count = key == "step"
            room = torch.zeros((), device=parameter.device) if is_count else torch.zeros_like(parameter.detach())
            optimizer.state[parameter][key] = room


def _files(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """In which of a process's files, counted from 1, each tensor goes."""
    sizes = {name: _own(tensor).numel() * tensor.element_size() for name, tensor in tensors.items()}
    limit = max(_SMALLEST_FILE, sum(sizes.values()) // _FILES)
    files, number, used = {}, 1, 0
    for name, size in sizes.items():
        if used and used + size > limit:
            number, used = number + 1, 0
        files[name], used = number, used + size
    return files


def _own(tensor: Tensor) -> Tensor:
    return tensor.to_local() if is_sharded(tensor) else tensor


def _disk_error(problem: Any) -> OSError | None:
    """The first refusal of the disk among what the processes of a save report."""
    failures = getattr(problem, "failures", {0: (problem, None)})
    return next((each[0] for each in failures.values() if isinstance(each[0], OSError)), None)
