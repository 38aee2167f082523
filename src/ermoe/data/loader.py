"""Batches for training and evaluation, from memory or through worker processes, from any step on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from ermoe.data.ahead import Request, prepared
from ermoe.data.augment import Batch, Transform
from ermoe.data.images import Images, ImagesInMemory
from ermoe.data.order import Indices, Order, evaluation_batches, share


def some_batches(loader: Loader, transform: Transform, *, num_images: int = 1024) -> Iterator[Batch]:
    """About so many images of a loader with another transform, drawn by a hash: the same ones on every process."""
    order = Order(len(loader.images), min(64, len(loader.images)), seed=0)
    drawn = Loader(loader.images, transform, order, device=loader.device)
    return (batch for (batch,) in islice(drawn.epoch(), -(-num_images // order.batch_size)))


@dataclass(slots=True)
class Loader:
    """The batches of one process.

    Args:
        images: where they come from.
        transform: what is done to them.
        order: of a training set; None to go through the images once, for evaluation.
        batch_size: for evaluation; in training it is the order's, shared by processes and accumulation steps.
        rank, num_processes: which share is this process's.
        num_parts: accumulation steps into which a process cuts its share.
        workers: processes that read ahead; 0 reads in this one, which is best for images in memory.
        device: where batches are finished and left.
    """

    images: Images
    transform: Transform
    order: Order | None = None
    batch_size: int = 100
    rank: int = 0
    num_processes: int = 1
    num_parts: int = 1
    workers: int = 0
    device: torch.device | str = "cpu"

    def epoch(self, epoch: int = 0, *, first_step: int = 0) -> Iterator[list[Batch]]:
        """For every step from ``first_step`` on, the parts to accumulate; an evaluation has one part a step."""
        num_parts = self.num_parts if self.order is not None else 1
        parts: list[Batch] = []
        for index_B, image_BCSS in self._read(list(self._requests(epoch, first_step))):
            parts.append(self._finish(index_B, image_BCSS, epoch))
            if len(parts) == num_parts:
                yield parts
                parts = []

    def _requests(self, epoch: int, first_step: int) -> Iterator[Request]:
        if self.order is None:
            whole = evaluation_batches(
                len(self.images), self.batch_size, rank=self.rank, num_processes=self.num_processes
            )
            yield from ((epoch, index_B) for index_B in whole)
            return
        for batch_B in self.order.batches(epoch, first_step=first_step):
            own_B = share(batch_B, rank=self.rank, num_processes=self.num_processes)
            for part in range(self.num_parts):
                yield epoch, share(own_B, rank=part, num_processes=self.num_parts)

    def _read(self, requests: list[Request]) -> Iterator[tuple[Indices, Tensor]]:
        workers = 0 if isinstance(self.images, ImagesInMemory) else self.workers
        pin_memory = torch.device(self.device).type == "cuda"
        return prepared(self._prepare, requests, workers=workers, pin_memory=pin_memory)

    def _prepare(self, request: Request) -> tuple[Indices, Tensor]:
        epoch, index_B = request
        return index_B, self.transform.host(self.images, index_B, epoch)

    def _finish(self, index_B: Indices, image_BCSS: Tensor, epoch: int) -> Batch:
        label_B = self.images.label_N[torch.from_numpy(index_B)]
        image_BCSS, label_B = (tensor.to(self.device, non_blocking=True) for tensor in (image_BCSS, label_B))
        return self.transform.device(image_BCSS, label_B, index_B, epoch)
