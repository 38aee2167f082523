"""Batches for training and evaluation, from memory or through worker processes, from any step on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from ermoe.data.order import Indices, Order, evaluation_batches, share
from ermoe.errors import UserError
from ermoe.train.compute import Compute, Processes

Batch = TypeVar("Batch")
_Batch_co = TypeVar("_Batch_co", covariant=True)
_Answer = TypeVar("_Answer")
Request = tuple[int, Indices]
"""An epoch, and which samples of it make a batch."""


class Source(Protocol[_Batch_co]):
    """Items that are read many at a time: images through a transform, scans, images with captions."""

    @property
    def is_in_memory(self) -> bool:
        """Whether there is nothing to read ahead."""

    def __len__(self) -> int: ...

    def read(self, index_B: Indices, epoch: int) -> Any:
        """Some items as they are in an epoch, on the CPU; in a worker process if there are any."""

    def finish(self, read: Any, index_B: Indices, epoch: int, device: torch.device) -> _Batch_co:
        """The batch for the model, on its device."""


@dataclass(slots=True)
class Loader(Generic[Batch]):
    """The batches of one process.

    Args:
        source: where they come from.
        order: of a training set; None to go through the items once, for evaluation.
        batch_size: for evaluation; in training it is the order's, shared by processes and accumulation steps.
        num_parts: accumulation steps into which a process cuts its share of a training batch.
        compute: the processes that share a batch, the workers that read ahead, the device where batches are left.
    """

    source: Source[Batch]
    order: Order | None = None
    batch_size: int = 100
    num_parts: int = 1
    compute: Compute = field(default_factory=Compute)

    def __post_init__(self) -> None:
        if self.order is not None and not isinstance(self.order, Order):
            raise UserError(
                "Loader takes one source: Loader(transform.of(images)) instead of Loader(images, transform)"
            )

    @property
    def steps_per_epoch(self) -> int:
        """Of a training set."""
        assert self.order is not None
        return self.order.steps_per_epoch

    def __len__(self) -> int:
        """Batches that iterating over it gives."""
        if self.order is not None:
            return self.steps_per_epoch * self.num_parts
        return sum(1 for _ in self._requests(0, 0))

    def __iter__(self) -> Iterator[Batch]:
        """The batches of an evaluation, or of the first epoch of training; later ones are those of `epoch`."""
        return (part for parts in self.epoch() for part in parts)

    def epoch(self, epoch: int = 0, *, first_step: int = 0) -> Iterator[list[Batch]]:
        """For every step from ``first_step`` on, the parts to accumulate; an evaluation has one part a step."""
        num_parts = self.num_parts if self.order is not None else 1
        workers = 0 if self.source.is_in_memory else self.compute.workers
        pin_memory = self.compute.device.type == "cuda"
        parts: list[Batch] = []
        requests = list(self._requests(epoch, first_step))
        for index_B, read in prepared(self._prepare, requests, workers=workers, pin_memory=pin_memory):
            parts.append(self.source.finish(read, index_B, epoch, self.compute.device))
            if len(parts) == num_parts:
                yield parts
                parts = []

    def _requests(self, epoch: int, first_step: int) -> Iterator[Request]:
        rank, num_processes = self.compute.group.rank, self.compute.group.num
        if self.order is None:
            whole = evaluation_batches(len(self.source), self.batch_size, rank=rank, num_processes=num_processes)
            yield from ((epoch, index_B) for index_B in whole)
            return
        for batch_B in self.order.batches(epoch, first_step=first_step):
            own_B = share(batch_B, rank=rank, num_processes=num_processes)
            for part in range(self.num_parts):
                yield epoch, share(own_B, rank=part, num_processes=self.num_parts)

    def _prepare(self, request: Request) -> tuple[Indices, Any]:
        epoch, index_B = request
        return index_B, self.source.read(index_B, epoch)


def some_batches(
    source: Source[Batch], device: torch.device, *, num_items: int = 1024, batch_size: int = 64, seed: int = 0
) -> Iterator[Batch]:
    """About so many items, drawn by a hash: the same ones on every process."""
    order = Order(len(source), min(batch_size, len(source)), seed=seed)
    drawn = Loader(source, order, compute=Compute(Processes(device=device)))
    return islice(drawn, -(-num_items // order.batch_size))


def prepared(
    prepare: Callable[[Request], _Answer], requests: list[Request], *, workers: int = 0, pin_memory: bool = False
) -> Iterator[_Answer]:
    """What ``prepare`` makes of every request, in order; in this process without ``workers``."""
    if workers < 0:
        raise UserError(f"workers={workers}: need 0 (none) or more")
    reader = _Reader(prepare)
    answers: Iterable[Any] = (reader[request] for request in requests)
    if workers:
        # The sampler names whole batches, so a worker returns them finished and in order.
        settings: dict[str, Any] = {"batch_size": None, "num_workers": workers, "collate_fn": _as_it_is}
        answers = DataLoader(reader, sampler=requests, pin_memory=pin_memory, **settings)
    for answer in answers:
        if isinstance(answer, UserError):
            raise answer
        yield answer


class _Reader(Dataset[Any]):
    """What a worker runs. It hands mistakes over as answers: raised there, they would arrive as tracebacks."""

    def __init__(self, prepare: Callable[[Request], Any]) -> None:
        self.prepare = prepare

    def __getitem__(self, request: Request) -> Any:
        try:
            return self.prepare(request)
        except UserError as mistake:
            return mistake


def _as_it_is(answer: Any) -> Any:
    return answer
