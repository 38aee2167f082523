"""`ermoe bench scale`: what processes that share a model really hold and send, beside the formulas.

Bytes are those that the sockets of a process have sent, so they are the network's and not ours. Linux only.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import struct
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ermoe.models.layouts import Layout, needs, size_of
from ermoe.models.presets import preset
from ermoe.nn import moe_layers, orthogonality_loss, update_balance
from ermoe.nn.parallel import parallelise
from ermoe.nn.sharding import by_mesh, own_experts
from ermoe.studies.bench.measure import compare
from ermoe.studies.bench.result import Bar, Result

_MODEL = "tiny-ti16"
_WAYS = {1: ("ddp",), 2: ("ddp", "ep"), 4: ("ddp", "ep", "fsdp+ep")}
_EXPERT_PROCESSES = {"ep": 0, "fsdp+ep": 2}
_BYTES_SENT = 200  # where struct tcp_info of <linux/tcp.h> has tcpi_bytes_sent


@dataclass(frozen=True, slots=True)
class Seen:
    """Of one process and one way of sharing: bytes that it holds of experts, for training, and sends in a step."""

    way: str
    held: int
    sent: int
    seconds: list[float]


def run(*, images: int, rounds: int) -> Result:
    """One, two and four processes, one thread each, with ``images`` on every process."""
    settings = {"model": _MODEL, "images": images, "rounds": rounds, "threads": 1}
    result = Result("scale", settings, reference="ddp")
    size = size_of(preset(_MODEL).build(device="meta"))
    alone = 0
    for num_processes, ways in _WAYS.items():
        seen = _together(num_processes, ways, images, rounds)
        for way in ways:
            own = [each for each in seen if each.way == way]
            held, sent = (sum(getattr(each, name) for each in own) / len(own) for name in ("held", "sent"))
            name = f"{way}, {num_processes} processes"
            result.figures[f"{name}: MB of experts with gradients and moments"] = held / 1e6
            if num_processes == 1:
                alone = held
                continue
            among = (_EXPERT_PROCESSES[way] or num_processes) if way != "ddp" else 1
            by_part = needs(size, Layout(way, num_processes, among), images=images).sent
            # Over gloo a scattered sum is seen to send what a sum for everybody would.
            formula = sum(by_part.values()) + (by_part["gradients"] if way == "fsdp+ep" else 0)
            result.figures[f"{name}: MB sent in a step"] = sent / 1e6
            result.figures[f"{name}: MB by the formula"] = formula / 1e6
            if way != "ddp":
                share = held * num_processes / alone
                result.bars.append(Bar(f"{name}: experts held / (one process's / {num_processes})", share, 1.1))
                result.bars.append(Bar(f"{name}: |bytes sent / formula − 1|", abs(sent / formula - 1), 0.05))
        if num_processes == 2:
            table = "training step, two processes"
            result.tables[table] = compare({each.way: each.seconds for each in seen[: len(ways)]}, "ddp")
            result.bars.append(Bar("training step of two processes, ep / ddp", result.ratio(table, "ep"), 1.15))
    return result


def _together(num_processes: int, ways: tuple[str, ...], images: int, rounds: int) -> list[Seen]:
    """What all processes saw, in turns of their ways, the first process first."""
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder, "store"))
        given = (num_processes, ways, images, rounds, store, answers)
        workers = [context.Process(target=_work, args=(rank, *given)) for rank in range(num_processes)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    if any(worker.exitcode for worker in workers):
        raise RuntimeError(f"a process of the benchmark with {num_processes} ended early")
    found = sorted((answers.get() for _ in workers), key=lambda answer: answer[0])
    return [seen for _, own in found for seen in own]


def _work(
    rank: int,
    num_processes: int,
    ways: tuple[str, ...],
    images: int,
    rounds: int,
    store: str,
    answers: SimpleQueue[Any],
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_processes)
    candidates = {way: _candidate(way, num_processes, images, rank) for way in ways}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    sent = dict.fromkeys(ways, 0)
    for turn in range(2 + rounds):  # DDP settles its buckets in the second
        shift = turn % len(ways)
        for way in ways[shift:] + ways[:shift]:
            dist.barrier()
            before, start = bytes_sent(), time.perf_counter()
            candidates[way][0]()
            elapsed, after = time.perf_counter() - start, bytes_sent()
            if turn >= 2:
                seconds[way].append(elapsed)
                sent[way] += after - before
    answers.put((rank, [Seen(way, candidates[way][1](), sent[way] // rounds, seconds[way]) for way in ways]))
    dist.barrier()
    dist.destroy_process_group()


def _candidate(way: str, num_processes: int, images: int, rank: int) -> tuple[Callable[[], None], Callable[[], int]]:
    """A training step, and how many bytes this process then holds of experts."""
    model = preset(_MODEL).build(generator=torch.Generator().manual_seed(0))
    network = parallelise(model, way, num_processes, expert_processes=_EXPERT_PROCESSES.get(way, 0))
    optimizer = torch.optim.AdamW([{"params": group} for group in by_mesh(model.parameters())], fused=True)
    batch = torch.randn(images, 3, 224, 224, generator=torch.Generator().manual_seed(rank))

    def step() -> None:
        optimizer.zero_grad()  # first: what a step leaves is counted
        loss = network(batch).square().mean() + 5e-5 * orthogonality_loss(model)
        loss.backward()
        optimizer.step()
        update_balance(model)

    return step, lambda: _held(model, optimizer)


def _experts(model: nn.Module) -> list[nn.Module]:
    return [layer.experts for layer in moe_layers(model).values()]


def _held(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    storages = {}  # FSDP keeps the gradients of a module in one
    for parameter in (parameter for experts in _experts(model) for parameter in experts.parameters()):
        assert parameter.grad is not None
        for tensor in (parameter, parameter.grad, *optimizer.state[parameter].values()):
            storage = own_experts(tensor.detach()).untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def bytes_sent() -> int:
    """By all TCP connections of this process, over their lives."""
    total = 0
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if os.readlink(entry).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(entry.name))) as own:
                    info = own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_SENT + 8)
                total += struct.unpack_from("Q", info, _BYTES_SENT)[0]
    return total
