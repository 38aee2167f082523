"""Random numbers that are looked up instead of drawn, and the order of images that follows from them.

A generator has a history, so what it yields depends on who asked before. A hash has none: it is a pure function of
(seed, epoch, image, …), and an image is augmented the same way whichever process, worker or restart meets it. The hash
is SplitMix64's finaliser, chained over the keys.

The order of images is a function of (seed, epoch), the same for any number of processes. A step is one global batch.
Processes and accumulation steps share it out in consecutive pieces, so that resuming at a step, or on other hardware,
goes on with exactly the images that were next.

Letters: B images.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from ermoe.errors import UserError

Indices = NDArray[np.int64]
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def hashed(*keys: int | NDArray[np.integer]) -> NDArray[np.uint64]:
    """64 well-mixed bits for every combination of keys, which broadcast against each other.

    >>> len(set(hashed(0, np.arange(1000)).tolist()))
    1000
    """
    state = np.zeros(1, np.uint64)
    for key in keys:
        state = _mixed(state ^ _mixed(np.atleast_1d(np.asarray(key)).astype(np.uint64)))
    return state


def uniform(num: int, *keys: int | NDArray[np.integer]) -> NDArray[np.float64]:
    """``num`` numbers in [0, 1) for every combination of keys, (B, num).

    >>> alone, together = uniform(3, 0, 7, np.array([5])), uniform(3, 0, 7, np.array([4, 5]))
    >>> bool((alone[0] == together[1]).all())
    True
    """
    bits = hashed(*(np.expand_dims(np.atleast_1d(np.asarray(key)), -1) for key in keys), np.arange(num))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mixed(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    bits = bits + _GOLDEN
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


@dataclass(frozen=True, slots=True)
class Order:
    """The batches of every epoch, by default a pass over the images each. A last batch of a pass that would not be full
    is left out, another one each time.

    With ``steps`` an epoch has so many batches, and the next one goes on where it ended.

    >>> order = Order(num_images=10, batch_size=4, seed=0)
    >>> order.steps_per_epoch, [batch.tolist() == order.epoch(0)[4:8].tolist() for batch in order.batches(0)]
    (2, [False, True])
    >>> [batch.tolist() for batch in Order(10, 4, seed=0, steps=1).batches(1)] == [order.epoch(0)[4:8].tolist()]
    True
    """

    num_images: int
    batch_size: int
    seed: int
    steps: int = 0

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
        """Batches of an epoch."""
        return self.steps or self.num_images // self.batch_size

    def epoch(self, epoch: int) -> Indices:
        """All images in the order of one pass."""
        return np.argsort(hashed(self.seed, epoch, np.arange(self.num_images)), kind="stable")

    def batches(self, epoch: int, *, first_step: int = 0) -> Iterator[Indices]:
        """The batches of an epoch from ``first_step`` on."""
        start = epoch * self.steps_per_epoch
        steps = range(start + first_step, start + self.steps_per_epoch)
        for number, own in groupby(steps, lambda step: step // (self.num_images // self.batch_size)):
            order = self.epoch(number)
            for step in own:
                place = step % (self.num_images // self.batch_size) * self.batch_size
                yield order[place : place + self.batch_size]


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
