"""`open_images`: one call for every layout, which says what it recognised."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from ermoe.data import cifar, folders, idx, shards
from ermoe.data.digits import digits
from ermoe.data.images import SPLITS, Images, ImagesInMemory
from ermoe.data.reading import naming_what_cannot_be_read
from ermoe.errors import UserError


def open_images(path: str | os.PathLike[str], split: str = "train") -> Images:
    """One split, "train" or "test", of the images at ``path``, a folder or a name.

    Recognised are CIFAR-10 and CIFAR-100 (binary release, or the pickled one if its published checksums match),
    Tiny-ImageNet-200, idx files (MNIST, Fashion-MNIST), folders of class folders with splits (ImageNet in torchvision's
    layout, any ImageFolder) or without, and tar shards in webdataset's layout. The names "digits" (scikit-learn's,
    always there) and "fashion-mnist" (Debian's package) need no path.

    >>> images = open_images("digits", "test")
    >>> images.found
    'scikit-learn digits, test: 599 images, 10 classes'
    >>> images.read(0).shape
    torch.Size([3, 8, 8])
    """
    split = "test" if split == "val" else split
    if split not in SPLITS:
        raise UserError(f"split={split!r}: use 'train' or 'test'")
    name = os.fspath(path)
    if name == "digits":
        return _digits(split)
    with naming_what_cannot_be_read():
        return _at(_place(name), split)


def _place(name: str) -> Path:
    candidates = [Path(name).expanduser(), *idx.PLACES.get(name, [])]
    place = next((candidate for candidate in candidates if candidate.exists()), None)
    if place is None:
        known = ", ".join(["digits", *idx.PLACES])
        raise UserError(f"{name} does not exist: give the folder of a data set, or one of the names {known}")
    return place


def _at(path: Path, split: str) -> Images:
    if (found := cifar.find(path)) is not None:
        return cifar.read(*found, split)
    if (folder := idx.find(path)) is not None:
        return idx.read(folder, split)
    for folder in (path, path / "tiny-imagenet-200"):
        if folders.is_tiny_imagenet(folder):
            return folders.read_tiny_imagenet(folder, split)
    # Tar files beside train/CLASS/ are the archives that were unpacked.
    if not folders.has_splits(path) and (by_split := shards.find(path)):
        return shards.read(path, by_split, split)
    if path.is_file():
        raise UserError(f"{path} is a file: unpack it and give the folder")
    return folders.read(path, split)


def _digits(split: str) -> Images:
    chosen = digits()[SPLITS.index(split)]
    return ImagesInMemory(
        (chosen.image * 255).round().to(torch.uint8),
        found=f"scikit-learn digits, {split}: {len(chosen)} images, 10 classes",
        split=split,
        classes=[str(digit) for digit in range(10)],
        label_N=chosen.label.long(),
    )
