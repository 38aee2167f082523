"""Labelled images, wherever they lie: in memory, in files, or in tar shards.

Letters: N images, C channels, H and W pixels.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ermoe.data.decode import decode
from ermoe.data.reading import printable, read_bytes
from ermoe.errors import UserError

SPLITS = ("train", "test")


class Images(ABC):
    """One split of a labelled set of images.

    ``found`` is a sentence about what was recognised; ``label_N`` holds class ids (N,), which index ``classes``.
    """

    def __init__(self, *, found: str, split: str, classes: Sequence[str], label_N: Tensor) -> None:
        self.found = found
        self.split = split
        self.classes = list(classes)
        self.label_N = label_N
        _check_labels(found, self.classes, label_N)

    def __len__(self) -> int:
        return len(self.label_N)

    @abstractmethod
    def name(self, index: int) -> str:
        """Where one image is, for messages and lists."""

    @abstractmethod
    def read(self, index: int) -> Tensor:
        """One image, uint8 (3, H, W). Raises `UserError` if it cannot be read."""

    def class_counts(self) -> dict[str, int]:
        """How many images each class has."""
        counts = torch.bincount(self.label_N, minlength=len(self.classes)).tolist()
        return dict(zip(self.classes, counts, strict=True))


class ImagesInMemory(Images):
    """Images of one size as one tensor, uint8 (N, C, H, W) with one or three channels."""

    def __init__(self, image_NCHW: Tensor, *, found: str, split: str, classes: Sequence[str], label_N: Tensor) -> None:
        super().__init__(found=found, split=split, classes=classes, label_N=label_N)
        if len(image_NCHW) != len(label_N):
            raise UserError(f"{found}: {len(image_NCHW)} images and {len(label_N)} labels; the two must agree")
        self.image_NCHW = image_NCHW

    def name(self, index: int) -> str:
        return f"image {index} of the {self.split} split"

    def read(self, index: int) -> Tensor:
        return self.image_NCHW[index].expand(3, -1, -1)


class ImagesInFiles(Images):
    """One file an image, decoded when it is read; ``paths`` are relative to ``root``."""

    def __init__(
        self, root: Path, paths: Sequence[str], *, found: str, split: str, classes: Sequence[str], label_N: Tensor
    ) -> None:
        super().__init__(found=found, split=split, classes=classes, label_N=label_N)
        self.root = root
        # One array instead of a million strings: worker processes share it without copying reference counts.
        self._path_N = np.array([os.fsencode(path) for path in paths])

    def name(self, index: int) -> str:
        return printable(self._path(index))

    def read(self, index: int) -> Tensor:
        return decode(read_bytes(self._path(index), "mend or remove it"), self.name(index))

    def _path(self, index: int) -> str:
        return os.path.join(self.root, os.fsdecode(self._path_N[index]))


class _SomeImages(Images):
    """Some of the images of another set that is not in memory."""

    def __init__(self, images: Images, index_N: NDArray[np.int64], **about: Any) -> None:
        super().__init__(**about)
        self.images = images
        self.index_N = index_N

    def name(self, index: int) -> str:
        return self.images.name(int(self.index_N[index]))

    def read(self, index: int) -> Tensor:
        return self.images.read(int(self.index_N[index]))


def some_of(
    images: Images,
    index_N: NDArray[np.int64],
    *,
    found: str | None = None,
    classes: Sequence[str] | None = None,
    label_N: Tensor | None = None,
) -> Images:
    """The images at some places of a set, in that order; with ``classes`` and ``label_N``, named anew."""
    rows = torch.from_numpy(index_N)
    about: dict[str, Any] = {
        "found": images.found if found is None else found,
        "split": images.split,
        "classes": images.classes if classes is None else classes,
        "label_N": images.label_N[rows] if label_N is None else label_N,
    }
    if isinstance(images, ImagesInMemory):
        return ImagesInMemory(images.image_NCHW[rows], **about)
    return _SomeImages(images, index_N, **about)


def _check_labels(found: str, classes: list[str], label_N: Tensor) -> None:
    if len(label_N) == 0:
        raise UserError(f"{found}: there are no images in it; look at the path")
    if len(classes) < 2:
        raise UserError(f"{found}: there is only one class, {classes[0]!r}; classification needs at least two")
    low, high = int(label_N.min()), int(label_N.max())
    if low < 0 or high >= len(classes):
        bad = high if high >= len(classes) else low
        first = int((label_N == bad).nonzero()[0])
        raise UserError(
            f"{found}: image {first} has label {bad}, outside of the classes 0 to {len(classes) - 1}; the file is "
            "damaged or of another data set"
        )
