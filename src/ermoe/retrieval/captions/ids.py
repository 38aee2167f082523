"""What an image is called in all data sets at once, so that training images are recognised in any test pool.

COCO numbers its images once for 2014 and 2017; Flickr8k and Flickr30k name theirs by the photograph's number at Flickr,
and the smaller set is part of the larger. Any other image is known by its bytes.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from pathlib import PurePosixPath

import torch
from torch import Tensor

_NAMES = (
    (re.compile(r"^COCO_(?:train|val|test)2014_0*(\d+)$"), "coco"),
    (re.compile(r"^(?=\d{12}$)0+(\d+)$"), "coco"),
    (re.compile(r"^([1-9]\d{5,10})(?:_[0-9a-f]{8,12}(?:_[a-z])?)?$"), "flickr"),
)


def named_id(file: str) -> str | None:
    """The id that a file's name gives away, or None.

    >>> named_id("val2014/COCO_val2014_000000391895.jpg"), named_id("val2017/000000391895.jpg")
    ('coco:391895', 'coco:391895')
    >>> named_id("1000268201_693b08cb0e.jpg"), named_id("1000268201.jpg"), named_id("cat.jpg")
    ('flickr:1000268201', 'flickr:1000268201', None)
    """
    stem = PurePosixPath(file).stem
    for pattern, source in _NAMES:
        if match := pattern.match(stem):
            return f"{source}:{match[1]}"
    return None


def bytes_id(data: bytes) -> str:
    """The id of an image without a telling name: a digest of its file."""
    return f"bytes:{hashlib.blake2b(data, digest_size=16).hexdigest()}"


def id_hash(name: str) -> int:
    """63 well-mixed bits of an id.

    >>> id_hash("coco:1") == id_hash("coco:1") != id_hash("coco:2")
    True
    """
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") >> 1


def id_hashes(ids: Iterable[str]) -> Tensor:
    """Hashes of ids, sorted and without repetition, (N,) int64: what a checkpoint stores of its training images."""
    return torch.tensor(sorted({id_hash(name) for name in ids}), dtype=torch.int64)
