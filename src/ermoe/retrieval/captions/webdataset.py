"""Tar shards as webdataset writes them: ``KEY.jpg`` beside ``KEY.txt``, one caption a line."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch

from ermoe.data import shards as tar_shards
from ermoe.data.shard_index import Rows, each, kept
from ermoe.data.shards import ImagesInShards, Pair, kept_pairs, read_part
from ermoe.errors import UserError
from ermoe.retrieval.captions.schema import Annotation, bytes_id, checked_caption, named_id

_SPLITS = {"train": ("train",), "dev": ("dev", "val", "validation"), "test": ("test",)}


def find(folder: Path, split: str) -> list[Path]:
    """The shards of a split, as `ermoe.data.shards.find` knows them by their names; "all" takes those of all splits."""
    if folder.is_file():
        return [folder] if folder.suffix == ".tar" else []
    shards = tar_shards.find(folder, _SPLITS)
    if split == "all":
        return sorted(file for files in shards.values() for file in files)
    if shards and split not in shards:
        raise UserError(
            f"{folder} has shards, but none for {split}: their names or folders must have the word "
            f"{' or '.join(_SPLITS[split])}"
        )
    return shards.get(split, [])


def read(shards: list[Path], split: str) -> tuple[list[Annotation], list[str], ImagesInShards]:
    """What the shards hold, the ids of the images, and the images, read by offset."""
    annotations, ids, places = [], [], []
    for number, (found, named) in enumerate(each(shards, _pairs_with_ids)):
        for pair in found:
            annotations.append(Annotation(pair.key, _captions(pair, shards[number])))
            places.append((number, pair.start, pair.size))
        ids += named
    keys = [annotation.file for annotation in annotations]
    images = ImagesInShards(
        shards, np.array([os.fsencode(key) for key in keys], np.bytes_), np.array(places, np.int64).reshape(-1, 3),
        summary=f"{len(shards)} shards", split=split, classes=[*keys, ""], label_N=torch.arange(len(keys)),
    )  # fmt: skip
    return annotations, ids, images


def _pairs_with_ids(shard: Path) -> tuple[list[Pair], list[str]]:
    """Pairs, and the ids of their images; where a name does not tell, by the bytes of all images."""
    found = kept_pairs(shard, "txt")
    named = [named_id(pair.key) for pair in found]

    def rows() -> Rows:
        return [[bytes_id(read_part(shard, pair.start, pair.size))] for pair in found]

    digests = named if all(named) else [digest for (digest,) in kept(shard, "ids by bytes", rows, (str,))]
    return found, [name or str(digest) for name, digest in zip(named, digests, strict=True)]


def _captions(pair: Pair, shard: Path) -> tuple[str, ...]:
    where = f"{shard}: {pair.key}.txt"
    try:
        lines = pair.beside.decode("utf-8").splitlines()
    except UnicodeDecodeError as problem:
        raise UserError(f"{where} is not UTF-8 text ({problem}); write the shard anew") from problem
    return tuple(checked_caption(line, where) for line in lines or [""])
