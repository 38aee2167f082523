"""One process or many: who takes part, and how a model is shared among them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from ermoe.errors import UserError

PARALLEL = ("ddp", "fsdp")
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Processes:
    """This process among all of a run."""

    rank: int = 0
    num: int = 1
    device: torch.device = _CPU

    @property
    def is_main(self) -> bool:
        """Whether this is the one that writes files and talks."""
        return self.rank == 0


@contextmanager
def processes(device: str | None = None) -> Iterator[Processes]:
    """Joins the processes that torchrun or SLURM's srun started; without either, this process is alone.

    ``device`` is "cpu" or "cuda"; by default the GPU with this process's number on its machine, if there is one.

    >>> with processes("cpu") as alone:
    ...     alone.rank, alone.num
    (0, 1)
    """
    environment = _from_slurm(os.environ) if "RANK" not in os.environ else os.environ
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cuda" and not torch.cuda.is_available():
        raise UserError("device=cuda: torch sees no GPU here; use --device cpu")
    own = torch.device(kind, int(environment.get("LOCAL_RANK", 0))) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(own)
    if "RANK" not in environment:
        yield Processes(device=own)
        return
    os.environ.update(environment)
    _meet("nccl" if kind == "cuda" else "gloo")
    try:
        yield Processes(dist.get_rank(), dist.get_world_size(), own)
    finally:
        dist.destroy_process_group()


def _meet(backend: str) -> None:
    """Starts the process group, apart from earlier lives of a run that torchrun restarted.

    torchrun may keep one store over restarts, where a process would find the addresses of its dead predecessors.
    """
    store, rank, num_processes = next(dist.rendezvous("env://"))
    life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    dist.init_process_group(backend, store=dist.PrefixStore(f"life-{life}", store), rank=rank, world_size=num_processes)


def _from_slurm(environment: Mapping[str, str]) -> dict[str, str]:
    """torchrun's variables from srun's; nothing when srun did not start several tasks.

    Those of a step count: a batch script has SLURM_NTASKS and SLURM_PROCID too, although it runs alone.
    """
    if int(environment.get("SLURM_STEP_NUM_TASKS", 1)) < 2:
        return {}
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": environment["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": environment.get("SLURM_LOCALID", "0"),
        "MASTER_ADDR": environment.get("MASTER_ADDR", _first_host(environment["SLURM_STEP_NODELIST"])),
        # Jobs that share a node must not share a port.
        "MASTER_PORT": environment.get("MASTER_PORT", str(20_000 + int(environment.get("SLURM_JOB_ID", 0)) % 20_000)),
    }


def _first_host(hosts: str) -> str:
    """The host of task 0 in a list as SLURM writes it.

    >>> _first_host("gpu[07-09,12],login"), _first_host("rack[1-2]n[3,5]-ib"), _first_host("a,b")
    ('gpu07', 'rack1n3-ib', 'a')
    """
    first = re.split(r",(?![^\[]*\])", hosts)[0]  # at a comma outside of brackets
    return re.sub(r"\[([^],-]+)[^]]*\]", r"\1", first)


def parallelise(model: nn.Module, group: Processes, how: str) -> nn.Module:
    """The model wrapped for training: copies that average their gradients ("ddp"), or shards ("fsdp").

    FSDP2 shards every parameter on its first axis, which is the axis of experts, so that a process holds whole bases.
    """
    if how not in PARALLEL:
        raise UserError(f"parallel={how!r}: use 'ddp' or 'fsdp'")
    if group.num == 1:
        return model
    if how == "ddp":
        return DistributedDataParallel(model, device_ids=[group.device] if group.device.type == "cuda" else None)
    mesh = init_device_mesh(group.device.type, (group.num,))
    for block in _blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _blocks(model: nn.Module) -> Iterable[nn.Module]:
    """The longest list of modules in a model: its transformer blocks."""
    lists = [list(m.children()) for m in model.modules() if isinstance(m, nn.ModuleList | nn.Sequential)]
    return max(lists, key=len, default=[])


@contextmanager
def without_sync(network: nn.Module, *, unless: bool) -> Iterator[None]:
    """Keeps gradients in this process for a part of a batch that is not the last; ``unless`` it is."""
    network = getattr(network, "_orig_mod", network)  # what torch.compile wrapped
    if unless or not isinstance(network, DistributedDataParallel | FSDPModule):
        yield
    elif isinstance(network, DistributedDataParallel):
        with network.no_sync():
            yield
    else:
        network.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            network.set_requires_gradient_sync(True)


def reshard(model: nn.Module) -> None:
    """Frees the whole parameters that FSDP keeps after a forward pass in expectation of a backward pass."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def sum_over_processes(values: Tensor) -> Tensor:
    """The sum, on every process."""
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(values)
    return values


def wait_for_all() -> None:
    """Goes on when every process has come here."""
    if dist.is_available() and dist.is_initialized():
        dist.barrier()
