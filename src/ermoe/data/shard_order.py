"""The order of images in shards when every process is to read shards of its own.

A pass over all images at random asks every process for pieces of every shard, which storage far away answers slowly.
Here the shards are laid end to end, in another order every epoch, and cut into as many streams as a batch has places:
stream b gives place b of every batch. A process works on consecutive places (`ermoe.data.order.share`), so on
consecutive streams, so on shards of its own: it shares at most the first and the last of them with its neighbours, and
no image. All streams move forward together, and a batch has images from everywhere.

Batches stay a function of (seed, epoch) alone, the same for any number of processes that can share them.

Letters: N images, B places of a batch, L steps of a pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ermoe.data.images import Images
from ermoe.data.order import Indices, Order, hashed
from ermoe.errors import UserError

_NEARBY = 256
"""Images of a stream that are mixed with each other."""
_SHARDS, _TURNS, _PLACES = range(3)  # what a random number is for


@dataclass(frozen=True, slots=True, eq=False)
class ShardOrder(Order):
    """`Order`, for images of which ``shard_N`` says the shard.

    Images that are together in a shard are not together in every epoch: each shard is begun at another place, and
    ``nearby`` images of a stream are shuffled.

    >>> order = ShardOrder(num_images=8, batch_size=4, seed=0, shard_N=np.array([0, 0, 0, 0, 1, 1, 1, 1]))
    >>> first, second = order.batches(0)  # of two processes, each has two places and one shard
    >>> [len({int(index) // 4 for index in (*first[own], *second[own])}) for own in (slice(2), slice(2, 4))]
    [1, 1]
    """

    shard_N: Indices | None = None
    nearby: int = _NEARBY

    def epoch(self, epoch: int) -> Indices:
        """All images in the order of one pass; those that no full batch has come last."""
        end_to_end_N = self._end_to_end(epoch)
        steps = self.num_images // self.batch_size
        used = steps * self.batch_size
        stream_BL = end_to_end_N[:used].reshape(self.batch_size, steps)
        chance_BL = hashed(self.seed, epoch, _PLACES, stream_BL)
        block_BL = np.broadcast_to(np.arange(steps) // self.nearby, stream_BL.shape)
        stream_BL = np.take_along_axis(stream_BL, np.lexsort((chance_BL, block_BL)), axis=1)
        return np.concatenate([stream_BL.T.reshape(-1), end_to_end_N[used:]])

    def _end_to_end(self, epoch: int) -> Indices:
        """All images, shard by shard in the order of an epoch, each shard from some place on and round to it."""
        assert self.shard_N is not None
        by_shard_N = np.argsort(self.shard_N, kind="stable")
        count_S = np.bincount(self.shard_N)
        start_S = np.cumsum(count_S) - count_S
        shard_N = self.shard_N[by_shard_N]
        shard_S = np.arange(len(count_S))
        turn_S = hashed(self.seed, epoch, _TURNS, shard_S) % np.maximum(count_S, 1).astype(np.uint64)
        place_N = (np.arange(self.num_images) - start_S[shard_N] + turn_S.astype(np.int64)[shard_N]) % count_S[shard_N]
        chance_S = hashed(self.seed, epoch, _SHARDS, shard_S)
        return by_shard_N[np.lexsort((place_N, chance_S[shard_N]))]


def order_of(images: Images, batch_size: int, seed: int, *, shuffle: str = "all", steps: int = 0) -> Order:
    """The order in which to learn from ``images``: "all" of them mixed, or "shards" shared out by process."""
    if shuffle == "all":
        return Order(len(images), batch_size, seed, steps)
    if shuffle != "shards":
        raise UserError(f"shuffle={shuffle!r}: use 'all' or 'shards'")
    if images.shard_of_each is None:
        raise UserError(f"shuffle=shards: {images.summary}, which are not tar shards; use --shuffle all")
    return ShardOrder(len(images), batch_size, seed, steps, images.shard_of_each)
