"""Labelled images, wherever they lie, and `open_images`: one call for every layout, which says what it recognised.

Letters: N images, C channels, H and W pixels.
"""

from __future__ import annotations

import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ermoe.data.decode import LARGEST_IMAGE, decode
from ermoe.errors import UserError
from ermoe.files import StrPath, naming_what_cannot_be_read, printable, read_bytes

SPLITS = ("train", "test")


@dataclass(eq=False, repr=False, kw_only=True)
class Images(ABC):
    """One split of a labelled set of images.

    ``summary`` is a sentence about what was recognised; ``label_N`` holds class ids (N,), which index ``classes``.
    """

    summary: str
    split: str
    classes: list[str]
    label_N: Tensor

    def __post_init__(self) -> None:
        self.classes = [printable(name) for name in self.classes]  # they are shown in terminals, plots and pages
        _check_labels(self.summary, self.classes, self.label_N)

    def __len__(self) -> int:
        return len(self.label_N)

    @abstractmethod
    def name(self, index: int) -> str:
        """Where one image is, for messages and lists."""

    @abstractmethod
    def read(self, index: int) -> Tensor:
        """One image, uint8 (3, H, W). Raises `UserError` if it cannot be read."""

    @property
    def shard_of_each(self) -> NDArray[np.int64] | None:
        """The number of the tar file that holds each image (N,); None for images that are not in such files."""
        return None

    def class_counts(self) -> dict[str, int]:
        """How many images each class has."""
        counts = torch.bincount(self.label_N, minlength=len(self.classes)).tolist()
        return dict(zip(self.classes, counts, strict=True))

    @property
    def about(self) -> dict[str, Any]:
        """The fields that every set of images has, for another one."""
        return {field.name: getattr(self, field.name) for field in fields(Images)}

    @property
    def found(self) -> str:
        """The summary, by the name it had before version 0.1."""
        warnings.warn("Images.found is Images.summary now", DeprecationWarning, stacklevel=2)
        return self.summary


@dataclass(eq=False, repr=False)
class ImagesInMemory(Images):
    """Images of one size as one tensor, uint8 (N, C, H, W) with one or three channels."""

    image_NCHW: Tensor

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.image_NCHW) != len(self):
            raise UserError(f"{self.summary}: {len(self.image_NCHW)} images and {len(self)} labels; the two must agree")

    def name(self, index: int) -> str:
        return f"image {index} of the {self.split} split"

    def read(self, index: int) -> Tensor:
        return self.image_NCHW[index].expand(3, -1, -1)


@dataclass(eq=False, repr=False)
class ImagesInFiles(Images):
    """One file an image, decoded when it is read; ``paths`` are relative to ``root``."""

    root: Path
    paths: InitVar[Sequence[str]]

    def __post_init__(self, paths: Sequence[str]) -> None:
        super().__post_init__()
        # One array instead of a million strings: worker processes share it without copying reference counts.
        self._path_N = np.array([os.fsencode(path) for path in paths])

    def name(self, index: int) -> str:
        return printable(self._path(index))

    def read(self, index: int) -> Tensor:
        return decode(read_bytes(self._path(index), "mend or remove it", limit=LARGEST_IMAGE), self.name(index))

    def _path(self, index: int) -> str:
        return os.path.join(self.root, os.fsdecode(self._path_N[index]))


@dataclass(eq=False, repr=False)
class _SomeImages(Images):
    """Some of the images of another set that is not in memory."""

    images: Images
    index_N: NDArray[np.int64]

    @property
    def shard_of_each(self) -> NDArray[np.int64] | None:
        whole_N = self.images.shard_of_each
        return None if whole_N is None else whole_N[self.index_N]

    def name(self, index: int) -> str:
        return self.images.name(int(self.index_N[index]))

    def read(self, index: int) -> Tensor:
        return self.images.read(int(self.index_N[index]))


def some_of(images: Images, index_N: NDArray[np.int64], **anew: Any) -> Images:
    """The images at some places of a set, in that order; ``anew`` are fields of `Images` that are to differ."""
    rows = torch.from_numpy(index_N)
    about = {**images.about, "label_N": images.label_N[rows], **anew}
    if isinstance(images, ImagesInMemory):
        return ImagesInMemory(images.image_NCHW[rows], **about)
    return _SomeImages(images, index_N, **about)


def _check_labels(summary: str, classes: list[str], label_N: Tensor) -> None:
    if len(label_N) == 0:
        raise UserError(f"{summary}: there are no images in it; look at the path")
    if len(classes) < 2:
        only = f"only one class, {classes[0]!r}" if classes else "no class"
        raise UserError(f"{summary}: there is {only}; classification needs at least two")
    low, high = int(label_N.min()), int(label_N.max())
    if low < 0 or high >= len(classes):
        bad = high if high >= len(classes) else low
        first = int((label_N == bad).nonzero()[0])
        raise UserError(
            f"{summary}: image {first} has label {bad}, outside of the classes 0 to {len(classes) - 1}; the file is "
            "damaged or of another data set"
        )


@dataclass(frozen=True, slots=True)
class Prediction:
    """The most probable classes of one image, best first; of an image that cannot be read none, and the reason."""

    image: str
    classes: list[str]
    probabilities: list[float]
    problem: str | None = None


def open_images(path: StrPath, split: str = "train") -> Images:
    """One split, "train" or "test", of the images at ``path``, a folder or a name.

    Recognised are CIFAR-10 and CIFAR-100 (binary release, or the pickled one if its published checksums match),
    Tiny-ImageNet-200, idx files (MNIST, Fashion-MNIST), folders of class folders with splits (ImageNet in torchvision's
    layout, any ImageFolder) or without, and tar shards in webdataset's layout. The names "digits" (scikit-learn's,
    always there) and "fashion-mnist" (Debian's package) need no path.

    >>> images = open_images("digits", "test")
    >>> images.summary
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
    from ermoe.data import idx

    candidates = [Path(os.path.expanduser(name)), *idx.PLACES.get(name, [])]
    place = next((candidate for candidate in candidates if candidate.exists()), None)
    if place is None:
        known = ", ".join(["digits", *idx.PLACES])
        raise UserError(f"{name} does not exist: give the folder of a data set, or one of the names {known}")
    return place


def _at(path: Path, split: str) -> Images:
    from ermoe.data import cifar, folders, idx, shards  # which are made of the classes above

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
        summary=f"scikit-learn digits, {split}: {len(chosen)} images, 10 classes",
        split=split,
        classes=[str(digit) for digit in range(10)],
        label_N=chosen.label.long(),
    )


@dataclass(slots=True, frozen=True)
class Split:
    """Images (B, 1, 8, 8) with ink as 1 and paper as 0, and their digits (B,)."""

    image: Tensor
    label: Tensor

    def __len__(self) -> int:
        return len(self.label)


@cache  # of a text file, slow to parse
def digits() -> tuple[Split, Split]:
    """Handwritten digits that come with scikit-learn, real images without a download: 1,797 of them, 8 × 8 pixels.

    They are in a training and a held-out part with the same mix of digits.

    >>> train, test = digits()
    >>> train.image.shape, len(test)
    (torch.Size([1198, 1, 8, 8]), 599)
    """
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    pixels, labels = load_digits(return_X_y=True)
    image = torch.from_numpy(pixels).float().view(-1, 1, 8, 8) / 16  # stored as counts from 0 to 16
    label = torch.from_numpy(labels)
    train, test = train_test_split(range(len(label)), test_size=1 / 3, stratify=label, random_state=0)
    return Split(image[train], label[train]), Split(image[test], label[test])
