"""Checkpoints in parts: every process writes what it holds, and reads what it needs, however many wrote it.

The parts are safetensors files that torch's distributed checkpoints read and write; nothing is unpickled. Tensors are
found by name, so that neither the number of processes nor their way of sharing a model is remembered.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint._hf_utils import CUSTOM_METADATA_KEY, SAVED_OFFSETS_KEY
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ermoe.errors import UserError
from ermoe.files import replacing
from ermoe.models.weights.stored import declared

_NAME = "parts-*"
_LARGEST_FILE = 2**30
"""Tensors of a GPU come into the host's memory a file at a time; those of the CPU are written from where they are."""


class _Writer(HuggingFaceStorageWriter):
    """Writes tensors from where they are; torch's own puts every file together in memory first."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        for number, items in enumerate(_by_file(plan.items)):
            own = {item.index.fqn: _tensor(planner, item) for item in items}
            starts = {item.index.fqn: {SAVED_OFFSETS_KEY: list(_described(item).chunk.offsets)} for item in items}
            with replacing(Path(self.path, f"{plan.storage_data['shard_index']}-{number}.safetensors")) as draft:
                save_file(own, draft, metadata={CUSTOM_METADATA_KEY: json.dumps(starts)})
        written: Future[list[WriteResult]] = Future()
        written.set_result([WriteResult(item.index, _size(item), None) for item in plan.items])
        return written


def _by_file(items: list[WriteItem]) -> list[list[WriteItem]]:
    files: list[list[WriteItem]] = [[]]
    used = 0
    for item in items:
        if files[-1] and used + _size(item) > _LARGEST_FILE:
            files.append([])
            used = 0
        files[-1].append(item)
        used += _size(item)
    return files if items else []


def _tensor(planner: SavePlanner, item: WriteItem) -> Tensor:
    tensor = planner.resolve_data(item)
    assert isinstance(tensor, Tensor)
    return tensor.detach().contiguous()


def _described(item: WriteItem) -> TensorWriteData:
    assert item.tensor_data is not None
    return item.tensor_data


def _size(item: WriteItem) -> int:
    described = _described(item)
    return described.chunk.sizes.numel() * described.properties.dtype.itemsize


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
    writer = _Writer(str(folder), save_distributed=True)
    try:
        with _perhaps_alone() as is_alone:
            dcp.save(dict(tensors), storage_writer=writer, process_group=group, no_dist=is_alone)
    except CheckpointException as problem:
        refusals = [each for each, _ in problem.failures.values() if isinstance(each, UserError)]
        if not refusals:
            raise
        raise refusals[0] from problem


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
