"""Augmentation is a lookup: the same for the same (seed, epoch, index), and it leaves the normalisation alone."""

import numpy as np
import pytest
import torch

pytest.importorskip("monai")

from ermoe.brain.batches import augmented
from ermoe.brain.data.preprocess import normalise
from ermoe.brain.recipes import VolumeAugmentation
from ermoe.errors import UserError
from support.scans import head

ALWAYS = VolumeAugmentation(probability=1.0)


@pytest.fixture(scope="module")
def brain():
    t1, labels, _ = head()
    return torch.from_numpy(normalise(t1.astype(np.float32), labels > 0)), torch.from_numpy(labels > 0)


def changed(augmentation, brain, index=0, epoch=0, seed=0):
    return augmented(augmentation, *brain, (seed, epoch, index), 4.0)


def test_it_is_a_function_of_seed_epoch_and_index(brain):
    first, _ = changed(ALWAYS, brain)
    torch.manual_seed(5)
    np.random.default_rng(5)
    assert torch.equal(first, changed(ALWAYS, brain)[0])
    for other in ({"index": 1}, {"epoch": 1}, {"seed": 1}):
        assert not torch.equal(first, changed(ALWAYS, brain, **other)[0])


def test_mean_and_deviation_stay(brain):
    for index in range(4):
        t1, mask = changed(ALWAYS, brain, index)
        assert abs(float(t1[mask].mean())) < 1e-3
        assert abs(float(t1[mask].std()) - 1) < 1e-3
        assert (t1[~mask] == 0).all()
        assert 0.7 < float(mask.sum() / brain[1].sum()) < 1.3


def test_brains_move_along_and_about_every_axis(brain):
    shifts = VolumeAugmentation(0, 0, 20.0, 0, 0, 0, probability=1.0)
    where = np.array([_centre(changed(shifts, brain, index)[1]) for index in range(8)])
    assert (np.abs(where - _centre(brain[1])).max(axis=0) > 1).all()
    turns = VolumeAugmentation(25.0, 0, 0, 0, 0, 0, probability=1.0)
    for axis in range(3):  # a rod along an axis leans towards both others
        rod = torch.zeros_like(brain[1])
        rod[tuple(slice(4, -4) if other == axis else slice(20, 24) for other in range(3))] = True
        widths = [
            np.ptp(np.argwhere(changed(turns, (torch.rand(rod.shape) * rod, rod), index)[1].numpy()), axis=0)
            for index in range(6)
        ]
        assert (np.max(widths, axis=0) > 6).all()


def _centre(mask):
    return np.argwhere(mask.numpy()).mean(axis=0)


def test_the_brain_is_still_that_brain(brain):
    t1, _ = changed(VolumeAugmentation(rotate_degrees=0, scale=0, shift_mm=0, probability=1.0), brain)
    assert float(torch.corrcoef(torch.stack([t1.ravel(), brain[0].ravel()]))[0, 1]) > 0.8


def test_nothing_asked_for_is_nothing_done(brain):
    still = VolumeAugmentation(0, 0, 0, 0, 0, 0, probability=1.0)
    t1, mask = changed(still, brain)
    torch.testing.assert_close(t1, brain[0], atol=1e-4, rtol=0)
    assert torch.equal(mask, brain[1])


def test_flips_only_if_asked(brain):
    mirrored = brain[0].flip(0)
    for flip in (False, True):
        still = VolumeAugmentation(0, 0, 0, 0, 0, 0, flip=flip)
        found = [torch.allclose(changed(still, brain, index)[0], mirrored, atol=1e-4) for index in range(12)]
        assert any(found) == flip
        assert not all(found)


def test_nonsense_is_refused():
    with pytest.raises(UserError, match="probability=2"):
        VolumeAugmentation(probability=2)
    with pytest.raises(UserError, match="amounts of 0 or more"):
        VolumeAugmentation(noise=-1)
