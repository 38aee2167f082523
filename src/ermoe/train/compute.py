"""Where a run computes: which processes take part, on which device, and who speaks for them."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor

from ermoe.console import say
from ermoe.errors import UserError
from ermoe.train.callbacks import Callback, TensorBoard

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


@dataclass(frozen=True, slots=True)
class Compute:
    """The means of a run; what comes out of it does not depend on them, beyond rounding.

    Args:
        group: the processes that take part.
        parallel: how several of them share a model, "ddp", "fsdp", "ep" or "fsdp+ep"; see `ermoe.nn.parallel`.
        expert_processes: with "ep" and "fsdp+ep", processes that share the experts of a layer; 0 for as many as can.
        background_saves: with all but "ddp", go on training while a checkpoint is written; costs a copy of each shard.
        compile: run training steps through `torch.compile`.
        workers: processes that read files ahead; what is in memory needs none.
        console: for what a person wants to know. None says nothing; the progress bar is then on standard error.
        callbacks: who is told the figures of a run, see `ermoe.train.callbacks`; TensorBoard alone by default.
    """

    group: Processes = field(default_factory=Processes)
    parallel: str = "ddp"
    expert_processes: int = 0
    background_saves: bool = False
    compile: bool = False
    workers: int = 0
    console: Console | None = None
    callbacks: Sequence[Callback] = field(default_factory=lambda: (TensorBoard(),))

    @property
    def device(self) -> torch.device:
        """Of this process."""
        return self.group.device

    def say(self, text: object) -> None:
        """A sentence to the person who waits, from one process only."""
        if self.group.is_main:
            say(self.console, text)


def device_named(name: str | None = "auto") -> torch.device:
    """ "auto" is the accelerator if there is one, else the CPU; "cpu", "cuda" and "mps" are themselves.

    >>> device_named("cpu")
    device(type='cpu')
    """
    there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name in (None, "auto"):
        return torch.device(next(kind for kind in ("cuda", "mps", "cpu") if there[kind]))
    kind = str(name).partition(":")[0]
    if kind not in there:
        raise UserError(f"device={name}: use auto, cpu, cuda or mps")
    if not there[kind]:
        raise UserError(f"device={name}: torch sees no such device here; use --device cpu, or auto")
    return torch.device(str(name))


@contextmanager
def processes(device: str | None = "auto") -> Iterator[Processes]:
    """Joins the processes that torchrun or SLURM's srun started; without either, this process is alone.

    With "cuda", each process has the GPU with its number on its machine.

    >>> with processes("cpu") as alone:
    ...     alone.rank, alone.num
    (0, 1)
    """
    environment = _from_slurm(os.environ) if "RANK" not in os.environ else os.environ
    own = device_named(device)
    if own.type == "cuda":
        own = torch.device("cuda", int(environment.get("LOCAL_RANK", own.index or 0)))
        torch.cuda.set_device(own)
    if "RANK" not in environment:
        yield Processes(device=own)
        return
    os.environ.update(environment)
    _meet("nccl" if own.type == "cuda" else "gloo")
    try:
        yield Processes(dist.get_rank(), dist.get_world_size(), own)
    finally:
        dist.destroy_process_group()


def _meet(backend: str) -> None:
    """Starts the process group, apart from earlier lives of a run that torchrun restarted.

    torchrun by default keeps one store over restarts, where a process would find the addresses of its dead
    predecessors; there, lives are told apart by their number. Hosts that came back have counted fewer than those that
    stayed, so several hosts need a store for every life: TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1.
    """
    store, rank, num_processes = next(dist.rendezvous("env://"))
    is_kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if is_kept else "0"
    dist.init_process_group(backend, store=dist.PrefixStore(f"life-{life}", store), rank=rank, world_size=num_processes)
    if is_kept and rank == 0 and int(os.environ.get("GROUP_WORLD_SIZE", 1)) > 1:
        logging.getLogger("ermoe").warning(
            "a host that is lost cannot come back into this run: set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on all hosts"
        )


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


def sum_over_processes(values: Tensor) -> Tensor:
    """The sum, on every process."""
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(values)
    return values


def wait_for_all() -> None:
    """Goes on when every process has come here."""
    if dist.is_available() and dist.is_initialized():
        dist.barrier()
