"""Tar shards as webdataset writes them: ``KEY.jpg`` beside ``KEY.txt``, one caption a line."""

from __future__ import annotations

import tarfile
from pathlib import Path

import numpy as np
import torch

from ermoe.data.captions.ids import bytes_id, named_id
from ermoe.data.captions.schema import Annotation
from ermoe.data.captions.text_files import checked_caption
from ermoe.data.folders import SUFFIXES
from ermoe.data.shards import ImagesInShards
from ermoe.errors import UserError

SPLITS = {"train": ("train",), "dev": ("dev", "val", "validation"), "test": ("test",)}


def find(place: Path, split: str) -> list[Path]:
    """The shards of a split: tar files whose name, or whose folder's name, begins with it; "all" takes those of all.

    Other tar files are somebody's archives, not shards.
    """
    if place.is_file():
        return [place] if place.suffix == ".tar" else []
    beginnings = tuple(name for names in SPLITS.values() for name in names)
    files = sorted([*place.glob("*.tar"), *place.glob("*/*.tar")])
    shards = [file for file in files if file.relative_to(place).as_posix().startswith(beginnings)]
    if split == "all":
        return shards
    named = [shard for shard in shards if shard.relative_to(place).as_posix().startswith(SPLITS[split])]
    if shards and not named:
        raise UserError(
            f"{place} has shards, but none for {split}: their names or folders must begin with "
            f"{' or '.join(SPLITS[split])}"
        )
    return named


def read(shards: list[Path], split: str) -> tuple[list[Annotation], list[str], ImagesInShards]:
    """What the shards hold, the ids of the images, and the images, read by offset."""
    annotations, ids, places = [], [], []
    for number, shard in enumerate(shards):
        for annotation, name, start, size in _pairs(shard):
            annotations.append(annotation)
            ids.append(name)
            places.append((number, start, size))
    keys = [annotation.file for annotation in annotations]
    images = ImagesInShards(
        shards, keys, np.array(places, np.int64).reshape(-1, 3), found=f"{len(shards)} shards", split=split,
        classes=[*keys, ""], label_N=torch.arange(len(keys)),
    )  # fmt: skip
    return annotations, ids, images


def _pairs(shard: Path) -> list[tuple[Annotation, str, int, int]]:
    """(annotation, id, first byte, number of bytes) of every image; both halves of a pair must be there."""
    images: dict[str, tuple[str, int, int]] = {}
    captions: dict[str, tuple[str, ...]] = {}
    try:
        with tarfile.open(shard, "r:") as tar:
            for member in tar:
                key, dot, suffix = member.name.partition(".")
                if not member.isfile():
                    continue
                if f"{dot}{suffix}".lower() in SUFFIXES:
                    images[key] = (_id(tar, member), member.offset_data, member.size)
                elif suffix == "txt":
                    captions[key] = _captions(tar, member, shard)
    except (tarfile.TarError, OSError) as problem:
        raise UserError(f"{shard} cannot be read as an uncompressed tar file: {problem}; copy it again") from problem
    if lonely := sorted(images.keys() ^ captions.keys()):
        raise UserError(f"{shard}: {lonely[0]} lacks its image or .txt file ({len(lonely)} such); write it anew")
    return [(Annotation(key, captions[key]), *place) for key, place in images.items()]


def _id(tar: tarfile.TarFile, member: tarfile.TarInfo) -> str:
    file = tar.extractfile(member)
    assert file is not None
    return named_id(member.name) or bytes_id(file.read())


def _captions(tar: tarfile.TarFile, member: tarfile.TarInfo, shard: Path) -> tuple[str, ...]:
    file = tar.extractfile(member)
    assert file is not None
    try:
        lines = file.read().decode("utf-8").splitlines()
    except UnicodeDecodeError as problem:
        raise UserError(f"{shard}: {member.name} is not UTF-8 text ({problem}); write the shard anew") from problem
    return tuple(checked_caption(line, f"{shard}: {member.name}") for line in lines or [""])
