"""Tar shards as webdataset writes them: ``KEY.jpg`` beside ``KEY.cls``, many pairs to a file.

Shards are indexed once, by reading their headers, and from then on read at random like a folder: the order of the
images stays a function of the seed, which a stream through shuffle buffers cannot promise.
"""

from __future__ import annotations

import os
import re
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ermoe.data.decode import LARGEST_IMAGE, decode
from ermoe.data.folders import SPLIT_NAMES, SUFFIXES
from ermoe.data.images import Images
from ermoe.data.shard_index import Rows, each, kept
from ermoe.errors import UserError
from ermoe.files import file_size, read_text

_LARGEST_BESIDE = 2**20
_MOST_CLASSES = 2**20
_MEND = "mend or replace it"


class Pair(NamedTuple):
    """One image of a shard: its key, where its bytes begin and how many they are, and what the file beside it holds."""

    key: str
    start: int
    size: int
    beside: bytes


class _Index(NamedTuple):
    """A shard's keys (N,), labels (N,), and first byte and number of bytes of each image (N, 2)."""

    key_N: np.ndarray
    label_N: np.ndarray
    place_N2: np.ndarray


@dataclass(eq=False, repr=False)
class ImagesInShards(Images):
    """Images in tar files, read by offset; ``place_NP`` is (shard, first byte, number of bytes) of each."""

    shards: list[Path]
    key_N: np.ndarray
    place_NP: np.ndarray

    @property
    def shard_of_each(self) -> np.ndarray:
        return self.place_NP[:, 0]

    def name(self, index: int) -> str:
        return f"{self.key_N[index].decode(errors='backslashreplace')} in {self.shards[self.place_NP[index, 0]]}"

    def read(self, index: int) -> Tensor:
        shard, start, size = self.place_NP[index].tolist()
        return decode(read_part(self.shards[shard], start, size), self.name(index))


def find(data: Path, names: Mapping[str, tuple[str, ...]] = SPLIT_NAMES) -> dict[str, list[Path]]:
    """By split, the tar files of which the name, or that of their folder in ``data``, has the split as a word.

    Of a split's names the first one that occurs is taken. Other tar files are somebody's archives, not shards.
    """
    found: dict[str, list[Path]] = {}
    known = {name for own in names.values() for name in own}
    for path in sorted(data.glob("[!.]*")) if data.is_dir() else [data]:
        word = next((word for word in re.findall("[a-z]+", path.name.lower()) if word in known), None)
        if word is not None:
            files = sorted(path.glob("[!.]*.tar")) if path.is_dir() else [path] if path.suffix == ".tar" else []
            found.setdefault(word, []).extend(files)
    chosen = {split: next((found[name] for name in own if found.get(name)), []) for split, own in names.items()}
    return {split: files for split, files in chosen.items() if files}


def read(data: Path, shards: Mapping[str, list[Path]], split: str) -> ImagesInShards:
    """One split of what `find` found in ``data``."""
    chosen = _of_split(data, shards, split)
    indices = each(chosen, _indexed)
    place_NP = np.concatenate(
        [np.insert(index.place_N2, 0, number, axis=1) for number, index in enumerate(indices)], dtype=np.int64
    )
    classes = _classes(data, shards)
    summary = f"{len(chosen)} shards in {data}, {split}: {len(place_NP):,} images, {len(classes)} classes"
    return ImagesInShards(
        chosen, np.concatenate([index.key_N for index in indices]), place_NP, summary=summary, split=split,
        classes=classes, label_N=torch.from_numpy(np.concatenate([index.label_N for index in indices])),
    )  # fmt: skip


def pairs(shard: Path, suffix: str) -> list[Pair]:
    """Every image of a shard with the file of the same key that ends in ``suffix``; both halves must be there.

    As in webdataset, a key is the path up to the first dot of the file's name.
    """
    images: dict[str, tuple[int, int]] = {}
    beside: dict[str, bytes] = {}
    whole = file_size(shard, _MEND)
    try:
        with tarfile.open(shard, "r:") as tar:
            for member in _members(tar, shard, whole):
                folder, slash, name = member.name.removeprefix("./").rpartition("/")
                stem, _, ending = name.partition(".")
                key = f"{folder}{slash}{stem}"
                if not member.isfile() or not stem:
                    continue
                if f".{ending.lower()}" in SUFFIXES:
                    if key in images:
                        raise UserError(f"{shard}: {key} has two images; write the shard anew, with a key for each")
                    images[key] = (member.offset_data, member.size)
                elif f".{ending.rpartition('.')[2].lower()}" in SUFFIXES:
                    raise UserError(f"{shard}: {member.name} has a dot in its key; write the shard anew, without it")
                elif ending == suffix and (file := tar.extractfile(member)) is not None:
                    beside[key] = file.read()
            _check_end(tar, shard)
    except (tarfile.TarError, OSError, ValueError, RecursionError, OverflowError) as problem:
        if isinstance(problem, UserError):
            raise
        raise UserError(f"{shard} cannot be read as an uncompressed tar file: {problem}; copy it again") from problem
    if lonely := sorted(images.keys() ^ beside.keys()):
        raise UserError(
            f"{shard}: {lonely[0]} lacks its image or .{suffix} file ({len(lonely)} such); write it anew, or move it "
            "away if it is no shard"
        )
    return [Pair(key, *place, beside[key]) for key, place in images.items()]


def kept_pairs(shard: Path, suffix: str) -> list[Pair]:
    """`pairs`, from the index that is kept of a shard, if there is one."""

    def rows() -> Rows:
        return [[pair.key, pair.start, pair.size, pair.beside.decode("latin-1")] for pair in pairs(shard, suffix)]

    found = kept(shard, f"pairs with {suffix}", rows, (str, int, int, str))
    return [Pair(key, start, size, beside.encode("latin-1")) for key, start, size, beside in found]


def _members(tar: tarfile.TarFile, shard: Path, whole: int) -> Iterator[tarfile.TarInfo]:
    """The members, one after the other; sizes that no shard can hold, or that lead back, are refused."""
    place = -1
    for member in tar:
        limit = LARGEST_IMAGE if Path(member.name).suffix.lower() in SUFFIXES else _LARGEST_BESIDE
        end = member.offset_data + member.size
        is_odd = member.issparse() or member.size < 0 or member.offset <= place or end > whole
        if is_odd or (member.isfile() and member.size > limit):
            raise UserError(
                f"{shard} is truncated or damaged: {member.name} is said to have {member.size:,} bytes; copy it again"
            )
        place = member.offset
        yield member


def read_part(shard: Path, start: int, size: int) -> bytes:
    """``size`` bytes of a shard."""
    try:
        with open(shard, "rb") as file:
            data = os.pread(file.fileno(), size, start)
    except OSError as problem:
        raise UserError(f"{shard} cannot be read: {problem.strerror}; {_MEND}") from problem
    if len(data) < size:
        raise UserError(f"{shard} is truncated: copy it again")
    return data


def _check_end(tar: tarfile.TarFile, shard: Path) -> None:
    """Where the members end there must be a block of zeros; tarfile takes the end of a cut file for it."""
    assert tar.fileobj is not None
    tar.fileobj.seek(tar.offset)
    if tar.fileobj.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
        raise UserError(f"{shard} is truncated or damaged after {tar.offset:,} bytes: copy it again")


def _indexed(shard: Path) -> _Index:
    """Both splits need the training labels where there is no classes.txt, and reading headers takes its time."""
    file_size(shard, _MEND)
    state = shard.stat()
    return _index(shard, state.st_size, state.st_mtime_ns)


@cache
def _index(shard: Path, size: int, changed: int) -> _Index:
    found = kept_pairs(shard, "cls")
    return _Index(
        np.array([os.fsencode(pair.key) for pair in found], np.bytes_),
        np.array([_label(pair, shard) for pair in found], np.int64),
        np.array([(pair.start, pair.size) for pair in found], np.int64).reshape(-1, 2),
    )


def _label(pair: Pair, shard: Path) -> int:
    text = pair.beside.strip()
    if not text.isdigit() or len(text) > 9:
        raise UserError(f"{shard}: {pair.key}.cls holds {text[:20]!r}, not the number of a class; write the shard anew")
    return int(text)


def _of_split(data: Path, shards: Mapping[str, list[Path]], split: str) -> list[Path]:
    if split not in shards:
        raise UserError(
            f"{data} has shards, but none for {split}: their names or folders must have the word "
            f"{' or '.join(SPLIT_NAMES[split])}"
        )
    return shards[split]


def _classes(data: Path, shards: Mapping[str, list[Path]]) -> list[str]:
    """Names from classes.txt, one a line; without it, as many numbers as the training labels need."""
    names = (data if data.is_dir() else data.parent) / "classes.txt"
    if names.is_file():
        return [line for line in read_text(names).splitlines() if line.strip()]
    label_N = np.concatenate([index.label_N for index in each(_of_split(data, shards, "train"), _indexed)])
    if (last := int(label_N.max(initial=0))) >= _MOST_CLASSES:
        raise UserError(f"{data} has the class number {last:,}: number classes from 0, or name them in classes.txt")
    return [str(label) for label in range(last + 1)]
