"""Shards shared out by process: no image twice, none lost, whatever the shards and the number of processes."""

import os
from itertools import pairwise

import numpy as np
import pytest

from ermoe.data.augment import Transform
from ermoe.data.images import open_images, some_of
from ermoe.data.order import share
from ermoe.data.shard_order import ShardOrder, order_of
from ermoe.errors import UserError
from ermoe.images.run import LabelledImages
from ermoe.train.compute import Compute, Processes
from ermoe.train.loader import Loader
from support import pictures as make

EVEN = [100] * 8
UNEVEN = [1, 0, 170, 3, 0, 90, 41, 7, 300, 2, 188]
FEW = [500, 311]  # than processes
SIZES = {"even": EVEN, "uneven": UNEVEN, "few": FEW, "one": [97]}


def order(sizes, batch_size=16, **options):
    shard_N = np.repeat(np.arange(len(sizes)), sizes)
    return ShardOrder(len(shard_N), batch_size, seed=5, shard_N=shard_N, **options)


def own(batches, rank, num_processes):
    return np.concatenate([share(batch, rank=rank, num_processes=num_processes) for batch in batches])


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("num_processes", [1, 2, 4, 8])
def test_processes_share_the_images_of_an_epoch_and_hardly_any_shard(sizes, num_processes):
    chosen = order(sizes)
    batches = list(chosen.batches(3))
    assert sorted(chosen.epoch(3).tolist()) == list(range(sum(sizes)))
    assert len(batches) == sum(sizes) // 16
    parts = [own(batches, rank, num_processes) for rank in range(num_processes)]
    assert {len(part) for part in parts} == {len(batches) * 16 // num_processes}
    seen = np.concatenate(parts)
    assert len(np.unique(seen)) == len(seen)
    touched = sum(len(np.unique(chosen.shard_N[part])) for part in parts)
    assert touched <= np.count_nonzero(sizes) + num_processes - 1, "a neighbour shares at most one shard"


def test_streams_move_forward_through_their_shards():
    chosen = order([4000, 4000], batch_size=4, nearby=50)
    place_BL = np.stack(list(chosen.batches(0))).T % 4000
    for place_L in place_BL:
        block = [np.sort(place_L[start : start + 50]) for start in range(0, 2000, 50)]
        leaps = sum(int(later[0]) != int(earlier[-1]) + 1 for earlier, later in pairwise(block))
        assert leaps <= 4, "a block begins where the one before ended, but where a shard ends, or was begun"


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_images_meet_others_in_every_epoch(sizes):
    chosen = order(sizes, batch_size=8)
    first, second = ({frozenset(batch.tolist()) for batch in chosen.batches(epoch)} for epoch in (0, 1))
    assert not first & second
    beside = [{frozenset(pair) for batch in epoch for pair in pairwise(sorted(batch))} for epoch in (first, second)]
    assert len(beside[0] & beside[1]) < 0.2 * len(beside[0])


def test_shards_of_classes_are_mixed_in_every_batch():
    sizes = [200] * 10  # each a class of its own
    for batch in order(sizes, batch_size=50).batches(0):
        assert np.bincount(batch // 200, minlength=10).max() <= 7


@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 4), (4, 1), (1, 2)])
def test_a_run_goes_on_in_the_middle_of_an_epoch_with_any_number_of_processes(tmp_path, before, after):
    images = open_images(make.uneven_shards(tmp_path, [5, 0, 1, 14, 9]))
    chosen = order_of(images, 8, seed=1, shuffle="shards")

    def seen(num_processes, first_step, steps):
        groups = [Compute(Processes(rank, num_processes)) for rank in range(num_processes)]
        loaders = [Loader(Transform(8).of(images), chosen, compute=group) for group in groups]
        epochs = [list(loader.epoch(2, first_step=first_step))[:steps] for loader in loaders]
        return [parts[0].image for step in zip(*epochs, strict=True) for parts in step]

    undisturbed = np.concatenate(seen(before, 0, 3))
    resumed = np.concatenate([*seen(before, 0, 2), *seen(after, 2, 1)])
    assert np.array_equal(undisturbed, resumed)
    assert len(np.unique(undisturbed.reshape(24, -1), axis=0)) == 24


@pytest.mark.parametrize("num_processes", [1, 2, 3, 5])
def test_an_evaluation_counts_every_image_of_uneven_shards_once(tmp_path, num_processes):
    images = open_images(make.uneven_shards(tmp_path, [5, 0, 1, 14, 9]))
    groups = [Compute(Processes(rank, num_processes)) for rank in range(num_processes)]
    loaders = [list(Loader(Transform(8).of(images), batch_size=4, compute=group)) for group in groups]
    assert len({len(batches) for batches in loaders}) == 1, "forward passes may be collective"
    found = np.concatenate([batch.image for batches in loaders for batch in batches])
    assert len(np.unique(found.reshape(len(found), -1), axis=0)) == len(found) == 29


def test_images_held_out_belong_to_no_process(tmp_path):
    data = LabelledImages.open(make.uneven_shards(tmp_path, UNEVEN[:5]))
    train, held_out = data.without_validation(0.2)
    assert train.shard_of_each.tolist() == data.train.shard_of_each[train.index_N].tolist()
    chosen = order_of(train, 10, seed=0, shuffle="shards", steps=3)
    assert chosen.steps_per_epoch == 3
    drawn = {int(train.index_N[index]) for epoch in range(5) for batch in chosen.batches(epoch) for index in batch}
    assert not drawn & set(held_out.index_N.tolist())


def test_what_cannot_be_shared_out_by_shards_is_refused(tmp_path):
    with pytest.raises(UserError, match="not tar shards; use --shuffle all"):
        order_of(open_images("digits"), 8, seed=0, shuffle="shards")
    images = open_images(make.uneven_shards(tmp_path, [6, 6]))
    with pytest.raises(UserError, match="use 'all' or 'shards'"):
        order_of(some_of(images, np.arange(8)), 8, seed=0, shuffle="files")
    os.truncate(tmp_path / "train-001.tar", 3000)  # while it is read
    with pytest.raises(UserError, match=r"train-001\.tar is truncated"):
        list(Loader(Transform(8).of(images), order_of(images, 4, seed=0, shuffle="shards")).epoch())
