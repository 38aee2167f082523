"""`ermoe bench data`: whether reading and augmenting images holds up the training of a small model."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from ermoe.data.augment import Transform
from ermoe.data.images import Images, ImagesInMemory, open_images
from ermoe.data.order import Order
from ermoe.images.presets import recipe
from ermoe.studies.bench.measure import compare, take_turns
from ermoe.studies.bench.result import Bar, Result
from ermoe.studies.bench.step import training_step_of
from ermoe.train.loader import Loader
from ermoe.train.settings import Augmentation

_BATCH = 100
_PRELOADED, _LOADER, _FULL = "preloaded tensors", "loader, miniature preset", "loader, all augmentations of the paper"
_AUGMENTATIONS = {
    _LOADER: Augmentation(),
    _FULL: Augmentation(rand_ops=2, erase=0.25, mixup=0.8, cutmix=1.0),
}


def _generated() -> ImagesInMemory:
    """Random images of CIFAR's shape."""
    num_images = 5_000
    generator = torch.Generator().manual_seed(0)
    return ImagesInMemory(
        torch.randint(0, 256, (num_images, 3, 32, 32), dtype=torch.uint8, generator=generator),
        summary=f"{num_images} generated images",
        split="train",
        classes=[str(c) for c in range(10)],
        label_N=torch.randint(0, 10, (num_images,), generator=generator),
    )


def endless(loader: Loader) -> Iterator[tuple[Tensor, Tensor]]:
    """Images and labels of one epoch after the other."""
    for epoch in itertools.count():
        for parts in loader.epoch(epoch):
            yield from ((part.image, part.label) for part in parts)


def step(batches: Iterator[tuple[Tensor, Tensor]]) -> Callable[[], object]:
    """A training step of the sparse miniature that takes its batch from ``batches``."""
    return training_step_of(recipe("cifar-ermoe").build(num_classes=10), batches)


def run(data: Path | None, *, rounds: int, threads: int) -> Result:
    """Steps on batches from the loader beside steps on batches that are ready in memory."""
    torch.set_num_threads(threads)
    images: Images = _generated() if data is None else open_images(data, "train")
    settings = {"data": images.summary, "batch": _BATCH, "rounds": rounds, "threads": threads}
    result = Result("data", settings, reference=_PRELOADED)
    order = Order(len(images), _BATCH, seed=0)
    loaders = {name: Loader(Transform(32, own).of(images), order) for name, own in _AUGMENTATIONS.items()}
    ready = list(itertools.islice(endless(loaders[_LOADER]), 8))
    work = {_PRELOADED: step(itertools.cycle(ready))}
    work |= {name: step(endless(loader)) for name, loader in loaders.items()}
    table = "CIFAR miniature, training step of 100 images"
    result.tables[table] = compare(take_turns(work, rounds=3 * rounds), _PRELOADED)
    ratio = result.ratio(table, _LOADER)
    result.figures["throughput from the loader / preloaded"] = 1 / ratio
    result.figures["the same with all augmentations of the paper"] = 1 / result.ratio(table, _FULL)
    result.bars = [Bar("throughput from the loader / preloaded, as a ratio of times", ratio, 1 / 0.9)]
    return result
