"""In which order images are seen: a function of (seed, epoch), the same for any number of processes.

A step is one global batch. Processes and accumulation steps share it out in consecutive pieces, so that resuming at a
step, or on other hardware, goes on with exactly the images that were next.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ermoe.data.randomness import hashed
from ermoe.errors import UserError

Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Order:
    """The batches of every epoch. A last batch that would not be full is left out, another one each epoch.

    >>> order = Order(num_images=10, batch_size=4, seed=0)
    >>> order.steps_per_epoch, [batch.tolist() == order.epoch(0)[4:8].tolist() for batch in order.batches(0)]
    (2, [False, True])
    """

    num_images: int
    batch_size: int
    seed: int

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise UserError(f"batch size {self.batch_size}: need at least 1")
        if self.num_images < self.batch_size:
            raise UserError(
                f"the training set has {self.num_images} images, fewer than one batch: use a batch size of at most "
                f"{self.num_images}"
            )

    @property
    def steps_per_epoch(self) -> int:
        """Full batches in an epoch."""
        return self.num_images // self.batch_size

    def epoch(self, epoch: int) -> Indices:
        """All images in the order of one epoch."""
        return np.argsort(hashed(self.seed, epoch, np.arange(self.num_images)), kind="stable")

    def batches(self, epoch: int, *, first_step: int = 0) -> Iterator[Indices]:
        """The batches of an epoch from ``first_step`` on."""
        order = self.epoch(epoch)
        for step in range(first_step, self.steps_per_epoch):
            yield order[step * self.batch_size : (step + 1) * self.batch_size]


def share(batch_B: Indices, *, rank: int = 0, num_processes: int = 1) -> Indices:
    """The consecutive piece of a batch that one process works on.

    >>> share(np.arange(6), rank=1, num_processes=2).tolist()
    [3, 4, 5]
    """
    if len(batch_B) % num_processes:
        raise UserError(
            f"a batch of {len(batch_B)} cannot be shared equally by {num_processes} processes or accumulation steps: "
            f"use a multiple of {num_processes}"
        )
    size = len(batch_B) // num_processes
    return batch_B[rank * size : (rank + 1) * size]


def evaluation_batches(num_images: int, batch_size: int, *, rank: int = 0, num_processes: int = 1) -> Iterator[Indices]:
    """Every image exactly once over all processes, in batches that may differ in size.

    Every process gets the same number of batches, because under FSDP a forward pass needs all of them; where there is
    nothing left, the batch is empty.

    >>> [batch.tolist() for batch in evaluation_batches(5, 2, rank=1, num_processes=2)]
    [[2, 3], []]
    """
    if batch_size < 1:
        raise UserError(f"batch_size={batch_size}: need at least 1")
    for start in range(0, num_images, batch_size * num_processes):
        begin = start + rank * batch_size
        yield np.arange(min(begin, num_images), min(begin + batch_size, num_images))
