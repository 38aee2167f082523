"""Order and augmentation are functions of (seed, epoch, image), whoever asks, in whatever order."""

import numpy as np
import pytest
import torch
from torchvision.transforms import v2

from ermoe.data.augment import Batch, Transform, rand_augment, resized_crop
from ermoe.data.images import ImagesInMemory, open_images
from ermoe.data.order import Order, evaluation_batches, share, uniform
from ermoe.errors import UserError
from ermoe.train.compute import Compute, Processes
from ermoe.train.loader import Loader
from ermoe.train.settings import Augmentation
from support import pictures as make

EVERYTHING = Augmentation(rand_ops=2, erase=0.5, mixup=0.8, cutmix=1.0)


def together(batches):
    return Batch(
        *(torch.cat([getattr(b, name) for b in batches]) for name in ("image", "label", "other_label", "share"))
    )


def test_an_epoch_has_every_image_once_and_each_epoch_another_order():
    order = Order(1000, 100, seed=3)
    epochs = [order.epoch(e) for e in range(3)]
    assert all(sorted(e.tolist()) == list(range(1000)) for e in epochs)
    assert len({tuple(e[:5]) for e in epochs}) == 3
    assert order.epoch(1).tolist() == Order(1000, 7, seed=3).epoch(1).tolist()
    assert abs(np.corrcoef(epochs[0], epochs[1])[0, 1]) < 0.1


@pytest.mark.parametrize("num_processes", [1, 2, 4])
def test_shares_put_together_are_the_batch(num_processes):
    batch = list(Order(100, 16, seed=0).batches(0))[2]
    parts = [share(batch, rank=r, num_processes=num_processes) for r in range(num_processes)]
    assert np.concatenate(parts).tolist() == batch.tolist()


def test_batches_that_cannot_be_had_are_refused():
    with pytest.raises(UserError, match="use a multiple of 3"):
        share(np.arange(4), num_processes=3)
    with pytest.raises(UserError, match="fewer than one batch"):
        Order(10, 11, seed=0)
    with pytest.raises(UserError, match="at least 1"):
        Order(10, 0, seed=0)
    loader = Loader(Transform(8, EVERYTHING).of(open_images("digits")), Order(50, 5, seed=0))
    with pytest.raises(UserError, match="even batch size"):
        next(loader.epoch(0))


def test_loaders_are_iterated_over():
    images = open_images("digits", "test")
    loader = Loader(Transform(8).of(images), batch_size=100)
    sizes = [len(batch) for batch in loader]
    assert (len(loader), sum(sizes), sizes[0]) == (len(sizes), len(images), 100)
    training = Loader(Transform(8).of(images), Order(len(images), 50, seed=0), num_parts=2)
    assert [len(batch) for batch in training] == [25] * len(training)
    assert len(training) == 2 * training.steps_per_epoch


@pytest.mark.parametrize("num_processes", [1, 2, 3])
def test_an_evaluation_sees_every_image_once(num_processes):
    shares = [list(evaluation_batches(23, 4, rank=r, num_processes=num_processes)) for r in range(num_processes)]
    assert len({len(batches) for batches in shares}) == 1
    assert sorted(i for batches in shares for b in batches for i in b.tolist()) == list(range(23))


@pytest.mark.parametrize("layout", ["memory", "files"])
def test_augmentation_does_not_depend_on_processes_parts_workers_or_where_it_begins(tmp_path, layout):
    if layout == "memory":
        images = open_images("digits")
    else:
        make.image_folder(tmp_path, per_class=16)
        images = open_images(tmp_path)
    augmentation = EVERYTHING if layout == "memory" else Augmentation(crop="resized", rand_ops=2, erase=0.5, mixup=0.8)
    options = (Transform(8, augmentation, seed=5).of(images), Order(48, 8, seed=1))
    whole = [parts[0] for parts in Loader(*options).epoch(2)]
    late = [parts[0] for parts in Loader(*options, compute=Compute(workers=2)).epoch(2, first_step=4)]
    assert torch.equal(late[0].image, whole[4].image)
    assert len(late) == 2
    shared = [list(Loader(*options, compute=Compute(Processes(r, 2)), num_parts=2).epoch(2)) for r in range(2)]
    for step, expected in enumerate(whole):
        found = together([part for rank in shared for part in rank[step]])
        assert torch.equal(found.image, expected.image)
        assert torch.equal(found.share, expected.share)
        assert torch.equal(found.other_label, expected.other_label)
    other = next(Loader(*options).epoch(3))[0]
    assert not torch.equal(other.image, whole[0].image)


def test_shift_and_flip_equal_torchvision_image_by_image():
    images = open_images("digits")
    index = np.arange(20)
    found = Transform(8, Augmentation(), seed=2).host(images, index, epoch=4)
    number_BK = uniform(6, 2, 4, index, 0)
    for row, number_K in enumerate(number_BK):
        padded = v2.functional.pad(images.read(row), [1])
        top, left = (int(n * 3) for n in number_K[:2])
        expected = v2.functional.crop(padded, top, left, 8, 8)
        expected = v2.functional.horizontal_flip(expected) if number_K[5] < 0.5 else expected
        # A mirrored window is the window mirrored: columns are looked up from right to left.
        assert torch.equal(found[row], expected)


def test_rand_augment_of_a_batch_equals_one_image_at_a_time():
    image = torch.randint(0, 256, (60, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    choice, sign = uniform(2, 1, np.arange(60)), uniform(2, 2, np.arange(60))
    whole = rand_augment(image, choice, sign, 9)
    alone = [rand_augment(image[i : i + 1], choice[i : i + 1], sign[i : i + 1], 9) for i in range(60)]
    assert torch.equal(whole, torch.cat(alone))
    assert (whole != image).flatten(1).any(1).float().mean() > 0.6


def test_without_augmentation_images_are_only_normalised():
    images = open_images("digits")
    transform = Transform(8, mean=(0.1, 0.2, 0.3), std=(0.5, 0.6, 0.7))
    (batch,) = next(Loader(transform.of(images), batch_size=4).epoch())
    expected = v2.functional.normalize(
        images.image_NCHW[:4].expand(-1, 3, -1, -1) / 255, [0.1, 0.2, 0.3], [0.5, 0.6, 0.7]
    )
    torch.testing.assert_close(batch.image, expected)


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("crop", ["none", "pad", "resized"])
@pytest.mark.parametrize("size", [8, 12, 30])
def test_a_picture_in_memory_and_as_a_file_is_the_same_input(tmp_path, mode, crop, size):
    for number, name in enumerate(make.CLASSES):
        (tmp_path / "train" / name).mkdir(parents=True)
        (tmp_path / "train" / name / "0.png").write_bytes(make.picture(number, (12, 12), mode))
    files = open_images(tmp_path)
    pixels = torch.stack([files.read(i) for i in range(3)])[:, : len(mode)]
    memory = ImagesInMemory(pixels, summary="", split="train", classes=files.classes, label_N=files.label_N)
    transform = Transform(size, Augmentation(crop=crop), seed=1, crop_share=0.875)
    assert torch.equal(transform.host(memory, np.arange(3), 0), transform.host(files, np.arange(3), 0))


def test_evaluation_cuts_the_middle_of_images_in_memory():
    pixels = torch.randint(0, 256, (3, 1, 20, 28), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    images = ImagesInMemory(pixels, summary="", split="test", classes=["a", "b"], label_N=torch.zeros(3).long())
    found = Transform(16, crop_share=0.64).host(images, np.arange(3), 0)
    for row in range(3):
        resized = v2.functional.resize(images.read(row), [25, 35], interpolation=v2.InterpolationMode.BICUBIC)
        assert torch.equal(found[row], v2.functional.center_crop(resized, [16, 16]))
    assert Transform(16).host(images, np.arange(0), 0).shape == (0, 3, 16, 16)


def test_mixing_keeps_pairs_and_shares_honest():
    images = open_images("digits")
    plain = Transform(8, Augmentation(crop="none", flip=False), seed=0)
    mixed = Transform(8, Augmentation(crop="none", flip=False, mixup=0.8, cutmix=1.0), seed=0)
    order = Order(len(images), 64, seed=0)
    before, after = (next(Loader(t.of(images), order).epoch(0))[0] for t in (plain, mixed))
    swapped = before.image.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)
    assert torch.equal(after.other_label.unflatten(0, (-1, 2)).flip(1).flatten(), after.label)
    share_B = after.share.view(-1, 1, 1, 1)
    blended = share_B * before.image + (1 - share_B) * swapped
    is_mixup = (after.image - blended).abs().flatten(1).amax(1) < 1e-5
    from_either = ((after.image == before.image) | (after.image == swapped)).flatten(1).all(1)
    assert (is_mixup | from_either).all()
    assert is_mixup.any()
    assert (~is_mixup).any()


def test_uniform_numbers_are_uniform_and_independent_of_company():
    number = uniform(4, 0, 0, np.arange(20_000))
    assert abs(number.mean() - 0.5) < 0.01
    assert abs(number.var() - 1 / 12) < 0.002
    assert abs(np.corrcoef(number.T) - np.eye(4)).max() < 0.03


def test_resized_crops_stay_inside():
    for number_K in uniform(6, 0, np.arange(500)):
        top, left, height, width = resized_crop(30, 50, number_K)
        assert 0 <= top <= 30 - height
        assert 0 <= left <= 50 - width
        assert height >= 1
        assert width >= 1


def test_crops_take_at_least_the_share_that_is_asked_for():
    boxes = [resized_crop(100, 100, number_K, 0.5) for number_K in uniform(6, 0, np.arange(500))]
    shares = [height * width / 10_000 for _, _, height, width in boxes]
    assert 0.48 < min(shares) < 0.55  # where a box sticks out it is shrunk
    assert max(shares) > 0.9


@pytest.mark.parametrize(
    "bad",
    [{"crop": "middle"}, {"least_area": 0}, {"rand_magnitude": 31}, {"rand_ops": -1}, {"erase": 2}, {"mixup": -1}],
)
def test_augmentations_that_make_no_sense_are_refused(bad):
    with pytest.raises(UserError, match=next(iter(bad))):
        Augmentation(**bad)
