"""The one form in which captioned images reach the rest: images in a fixed order, and a flat list of texts.

Which text belongs to which image is always said by ``text_to_image_T``, never by position: images may have one caption
or six. An image has one name in all data sets at once, so that training images are recognised in any test pool: COCO
numbers its images once for 2014 and 2017; Flickr8k and Flickr30k name theirs by the photograph's number at Flickr, and
the smaller set is part of the larger. Any other image is known by its bytes.

Letters: I images, T texts.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ermoe.data.images import Images
from ermoe.data.order import Indices, hashed
from ermoe.errors import UserError

_CAPTIONS = 101  # a stream of numbers of its own, beside those of augmentation
_NAMES = (
    (re.compile(r"^COCO_(?:train|val|test)2014_0*(\d+)$"), "coco"),
    (re.compile(r"^(?=\d{12}$)0+(\d+)$"), "coco"),
    (re.compile(r"^([1-9]\d{5,10})(?:_[0-9a-f]{8,12}(?:_[a-z])?)?$"), "flickr"),
)


@dataclass(frozen=True, slots=True)
class Annotation:
    """One image as a caption file knows it: the path written there, its captions, and its split ("" if none)."""

    file: str
    captions: tuple[str, ...]
    split: str = ""


def is_broken(text: str) -> bool:
    """Whether a text holds a lone surrogate, half of a character, which JSON may and no file can."""
    return any("\ud800" <= letter <= "\udfff" for letter in text)


def checked_caption(text: Any, where: str) -> str:
    """A caption without surrounding white space; ``where`` says whose it is."""
    if not isinstance(text, str):
        raise UserError(f"{where}: a caption is {text!r}, not text; mend the file")
    if not text.strip():
        raise UserError(f"{where}: a caption is empty; write one, or remove its entry")
    if is_broken(text):
        raise UserError(f"{where}: a caption holds half of a character ({text!r}); mend the file")
    return " ".join(text.split())


class CaptionSet:
    """One split of a protocol.

    ``summary`` is a sentence about what was read; ``fingerprint`` tells pools apart; ``ids`` name the images across
    data sets and releases (see `named_id`). Texts are listed image by image.

    >>> from ermoe.data.images import ImagesInMemory
    >>> pixels = torch.zeros(2, 3, 4, 4, dtype=torch.uint8)
    >>> images = ImagesInMemory(pixels, summary="two", split="all", classes=["a", "b"], label_N=torch.arange(2))
    >>> captions = [("one", "two"), ("three",)]
    >>> pair = CaptionSet(["a", "b"], captions, images, protocol="custom", split="all", summary="two images")
    >>> pair.texts, pair.text_to_image_T.tolist(), pair.texts_of(1)
    (['one', 'two', 'three'], [0, 0, 1], ['three'])
    """

    def __init__(
        self,
        ids: Sequence[str],
        captions: Sequence[Sequence[str]],
        images: Images,
        *,
        protocol: str,
        split: str,
        summary: str,
    ) -> None:
        assert len(ids) == len(captions) == len(images), "one id and one list of captions for each image"
        self.ids = list(ids)
        self.images = images
        self.protocol = protocol
        self.split = split
        self.summary = summary
        self.texts = [text for own in captions for text in own]
        self.num_texts_I = np.array([len(own) for own in captions], np.int64)
        self.first_text_I = np.cumsum(self.num_texts_I) - self.num_texts_I
        named = "\n".join([*self.ids, "", *self.texts, "", *map(str, self.num_texts_I)])
        self.fingerprint = hashlib.blake2b(named.encode(), digest_size=6).hexdigest()
        self.text_to_image_T: Tensor = torch.arange(len(ids)).repeat_interleave(torch.from_numpy(self.num_texts_I))

    def __len__(self) -> int:
        return len(self.ids)

    def texts_of(self, image: int) -> list[str]:
        """The captions of one image."""
        first = int(self.first_text_I[image])
        return self.texts[first : first + int(self.num_texts_I[image])]

    def one_text_each(self, image_B: Indices, *, seed: int, epoch: int) -> Indices:
        """For each image one of its texts, looked up by (seed, epoch, image): one caption an image and epoch.

        Several captions of an image in one batch would be each other's false negatives.
        """
        draw_B = hashed(seed, epoch, image_B, _CAPTIONS) % self.num_texts_I[image_B].astype(np.uint64)
        return self.first_text_I[image_B] + draw_B.astype(np.int64)


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
