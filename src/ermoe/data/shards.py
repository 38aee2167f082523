"""Tar shards as webdataset writes them: ``KEY.jpg`` beside ``KEY.cls``, many pairs to a file.

Shards are indexed once, by reading their headers, and from then on read at random like a folder: the order of the
images stays a function of the seed, which a stream through shuffle buffers cannot promise.
"""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ermoe.data.decode import decode
from ermoe.data.folders import SUFFIXES
from ermoe.data.images import Images
from ermoe.errors import UserError

_NAMES = {"train": ("train",), "test": ("val", "validation", "test")}


def find(path: Path) -> list[Path]:
    """The shards at ``path``, a folder or a single tar file."""
    return sorted(path.glob("*.tar")) if path.is_dir() else [path] if path.suffix == ".tar" else []


class ImagesInShards(Images):
    """Images in tar files, read by offset; ``place_NP`` is (shard, first byte, number of bytes) of each."""

    def __init__(
        self, shards: list[Path], keys: list[str], place_NP: np.ndarray, *, found: str, split: str, classes: list[str],
        label_N: Tensor,
    ) -> None:  # fmt: skip
        super().__init__(found=found, split=split, classes=classes, label_N=label_N)
        self.shards = shards
        self._key_N = np.array([os.fsencode(key) for key in keys])
        self._place_NP = place_NP

    def name(self, index: int) -> str:
        return f"{os.fsdecode(self._key_N[index])} in {self.shards[self._place_NP[index, 0]]}"

    def read(self, index: int) -> Tensor:
        shard, start, size = self._place_NP[index]
        try:
            with open(self.shards[shard], "rb") as file:
                data = os.pread(file.fileno(), int(size), int(start))
        except OSError as problem:
            raise UserError(f"{self.name(index)} cannot be read: {problem.strerror}; mend or replace it") from problem
        if len(data) < size:
            raise UserError(f"{self.shards[shard]} is truncated: copy it again")
        return decode(data, self.name(index))


def read(shards: list[Path], split: str) -> ImagesInShards:
    """The shards whose names begin with the split's ("train-000.tar", "val-000.tar")."""
    chosen = _of_split(shards, split)
    keys, labels, places = [], [], []
    for number, shard in enumerate(chosen):
        for key, label, start, size in _pairs(shard):
            keys.append(key)
            labels.append(label)
            places.append((number, start, size))
    classes = _classes(shards)
    found = f"{len(chosen)} shards in {shards[0].parent}, {split}: {len(keys):,} images, {len(classes)} classes"
    return ImagesInShards(
        chosen, keys, np.array(places, np.int64).reshape(-1, 3), found=found, split=split, classes=classes,
        label_N=torch.tensor(labels).long(),
    )  # fmt: skip


def _pairs(shard: Path) -> list[tuple[str, int, int, int]]:
    """(key, label, first byte, number of bytes) of every image; both halves of a pair must be there."""
    images: dict[str, tuple[int, int]] = {}
    labels: dict[str, int] = {}
    try:
        with tarfile.open(shard, "r:") as tar:
            for member in tar:
                key, dot, suffix = member.name.partition(".")
                if member.isfile() and f"{dot}{suffix}".lower() in SUFFIXES:
                    images[key] = (member.offset_data, member.size)
                elif member.isfile() and suffix == "cls":
                    labels[key] = _label(tar, member, shard)
    except (tarfile.TarError, OSError) as problem:
        raise UserError(f"{shard} cannot be read as an uncompressed tar file: {problem}; copy it again") from problem
    if lonely := sorted(images.keys() ^ labels.keys()):
        raise UserError(f"{shard}: {lonely[0]} lacks its image or .cls file ({len(lonely)} such); write it anew")
    return [(key, labels[key], *place) for key, place in images.items()]


def _label(tar: tarfile.TarFile, member: tarfile.TarInfo, shard: Path) -> int:
    file = tar.extractfile(member)
    text = b"" if file is None else file.read(20)
    if not text.strip().isdigit():
        raise UserError(f"{shard}: {member.name} holds {text!r}, not the number of a class; write the shard anew")
    return int(text)


def _of_split(shards: list[Path], split: str) -> list[Path]:
    chosen = [shard for shard in shards if shard.name.startswith(_NAMES[split])]
    if not chosen:
        raise UserError(
            f"{shards[0].parent} has no shards for {split}: their names must begin with {' or '.join(_NAMES[split])}"
        )
    return chosen


def _classes(shards: list[Path]) -> list[str]:
    """Names from classes.txt, one a line; without it, as many numbers as the training labels need."""
    names = shards[0].parent / "classes.txt"
    if names.is_file():
        return names.read_text().splitlines()
    labels = (label for shard in _of_split(shards, "train") for _, label, *_ in _pairs(shard))
    return [str(label) for label in range(max(labels, default=0) + 1)]
