"""Captioned images to learn from, and to choose the epoch by.

Letters: B pairs, I images, T texts, L tokens of a text, D width of the common space.
"""

from __future__ import annotations

import os
from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from ermoe.data.augment import ImageSource, in_memory
from ermoe.data.order import Indices
from ermoe.errors import UserError
from ermoe.files import Json, StrPath
from ermoe.retrieval.captions.catalogue import open_captions
from ermoe.retrieval.captions.schema import CaptionSet
from ermoe.retrieval.clip.towers import tokenise, trim
from ermoe.train.loop import TrainingData


@dataclass(frozen=True, slots=True)
class CaptionedImages(TrainingData):
    """The train and dev splits of a protocol. Test is no part of it; the weights themselves remember the images.

    With ``cache`` all images are decoded once and kept in memory.
    """

    path: str
    protocol: str
    train: CaptionSet
    dev: CaptionSet
    cache: bool = False

    def __post_init__(self) -> None:
        if shared := set(self.train.ids) & set(self.dev.ids):
            raise UserError(
                f"{len(shared)} images are in both train and dev, among them {min(shared)}: mend the splits"
            )

    @classmethod
    def open(
        cls, path: StrPath, protocol: str = "custom", *, images: StrPath | None = None, cache: bool = False
    ) -> CaptionedImages:
        """What `ermoe.open_captions` finds at ``path``."""
        train, dev = (open_captions(path, protocol, split, images=images) for split in ("train", "dev"))
        return cls(os.fspath(path), protocol, train, dev, cache)

    def identity(self) -> Json:
        """Where they are, under which protocol, and how many."""
        return {"data": self.path, "protocol": self.protocol, "num_images": len(self.train)}

    def splits(self, side: int) -> tuple[CaptionSet, CaptionSet]:
        """Train and dev for a model whose images have ``side`` pixels a side."""
        return (_held(self.train, side), _held(self.dev, side)) if self.cache else (self.train, self.dev)


def _held(captions: CaptionSet, side: int) -> CaptionSet:
    held = copy(captions)
    held.images = in_memory(captions.images, side)
    return held


@dataclass(slots=True)
class CaptionedBatch:
    """Images (B, 3, S, S) with the tokens of their texts, or with features of a frozen tower in their place.

    Where images have a long text beside a short one, all long texts come first.
    """

    image: Tensor
    text: Tensor | None
    feature: Tensor | None


class CaptionedSource:
    """Images with one caption each, another one every epoch; see `ermoe.train.loader.Source`.

    With ``needs_long`` each image also comes with a long text, all its captions joined.
    """

    def __init__(
        self, images: ImageSource, captions: CaptionSet, *, context_length: int, seed: int, needs_long: bool = False
    ) -> None:
        self.images = images
        self.captions = captions
        self.seed = seed
        self.needs_long = needs_long
        short, joined = tokenise(captions.texts, context_length), []
        if needs_long:
            joined = [" ".join(captions.texts_of(image)) for image in range(len(captions))]
        self.num_cut = short.num_cut
        # One row a text: all captions, then the long texts of all images.
        self.token_RL = torch.cat([short.id_TL, tokenise(joined, context_length).id_TL])
        self.feature_RD: Tensor | None = None
        """What a frozen text tower makes of the rows, where there is one."""

    @property
    def is_in_memory(self) -> bool:
        return self.images.is_in_memory

    def __len__(self) -> int:
        return len(self.images)

    def read(self, index_B: Indices, epoch: int) -> Tensor:
        """Bytes (B, 3, S, S)."""
        return self.images.read(index_B, epoch)

    def finish(self, read: Tensor, index_B: Indices, epoch: int, device: torch.device) -> CaptionedBatch:
        """Numbers, with the texts of this epoch."""
        image_BCSS = self.images.finish(read, index_B, epoch, device).image
        row_B = torch.from_numpy(self.captions.one_text_each(index_B, seed=self.seed, epoch=epoch))
        if self.needs_long:
            row_B = torch.cat([torch.from_numpy(index_B) + len(self.captions.texts), row_B])
        if self.feature_RD is not None:
            return CaptionedBatch(image_BCSS, None, self.feature_RD[row_B].to(device))
        return CaptionedBatch(image_BCSS, trim(self.token_RL[row_B]).long().to(device), None)
