"""MNIST, Fashion-MNIST and their kin: idx files, compressed or not."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch

from ermoe.data.images import ImagesInMemory
from ermoe.errors import UserError
from ermoe.files import LARGEST_DATA, read_start

_PARTS = {"train": "train", "test": "t10k"}
_FASHION = ["t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot"]
PLACES = {"fashion-mnist": [Path("/usr/share/datasets/fashion-mnist")]}  # Debian's package dataset-fashion-mnist


def find(path: Path) -> Path | None:
    """The folder with idx files at or directly below ``path``, where MNIST/raw is torchvision's."""
    folders = (path, path / "raw", path / "MNIST" / "raw", path / "FashionMNIST" / "raw")
    return next((folder for folder in folders if _file(folder, "test", "images") is not None), None)


def read(folder: Path, split: str) -> ImagesInMemory:
    """One split."""
    images, labels = (_required(folder, split, kind) for kind in ("images", "labels"))
    image_NHW, label_N = _array(images, 3), _array(labels, 1)
    is_fashion = "fashion" in str(folder).lower()
    classes = _FASHION if is_fashion else [str(digit) for digit in range(10)]
    title = "Fashion-MNIST" if is_fashion else "idx files"
    return ImagesInMemory(
        torch.from_numpy(image_NHW).unsqueeze(1),
        summary=f"{title} in {folder}, {split}: {len(label_N):,} images, {len(classes)} classes",
        split=split,
        classes=classes,
        label_N=torch.from_numpy(label_N.astype(np.int64)),
    )


def _file(folder: Path, split: str, kind: str) -> Path | None:
    dims = {"images": 3, "labels": 1}[kind]
    stems = (f"{_PARTS[split]}-{kind}-idx{dims}-ubyte", f"{_PARTS[split]}-{kind}.idx{dims}-ubyte")
    candidates = (folder / f"{stem}{suffix}" for stem in stems for suffix in ("", ".gz"))
    return next((file for file in candidates if file.is_file()), None)


def _required(folder: Path, split: str, kind: str) -> Path:
    file = _file(folder, split, kind)
    if file is None:
        raise UserError(f"{folder} has no {_PARTS[split]}-{kind} file: download all four files of the set")
    return file


def _array(file: Path, dims: int) -> np.ndarray:
    """Two zero bytes, the type (8: bytes), the number of axes; the axes' lengths, big-endian; the values."""
    head = 4 + 4 * dims
    start = read_start(file, head, "download it again")
    if start[:4] != bytes([0, 0, 8, dims]):
        raise UserError(f"{file} is no idx file of bytes with {dims} axes: download it again")
    if len(start) < head:
        raise UserError(f"{file} is truncated, {len(start)} of the {head} bytes of its header: download it again")
    shape = np.frombuffer(start, ">u4", dims, offset=4).tolist()
    expected = head + math.prod(shape)
    if expected > LARGEST_DATA:
        raise UserError(f"{file} says it has {expected:,} bytes, more than fit into the memory: download it again")
    data = read_start(file, expected + 1, "download it again")
    if len(data) != expected:
        raise UserError(f"{file} is truncated, {len(data):,} of {expected:,} bytes: download it again")
    return np.frombuffer(data, np.uint8, offset=head).reshape(shape).copy()
