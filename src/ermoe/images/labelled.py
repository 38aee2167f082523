"""Labelled images to learn from, to choose by and to judge by."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np

from ermoe.data.catalogue import open_images
from ermoe.data.images import Images, some_of
from ermoe.data.randomness import hashed
from ermoe.errors import UserError
from ermoe.plain import Json


@dataclass(frozen=True, slots=True)
class LabelledImages:
    """Both splits of a data set; see `ermoe.train.recipe.TrainingData`."""

    path: str
    train: Images
    test: Images

    def __post_init__(self) -> None:
        if self.train.classes != self.test.classes:
            raise UserError(f"{self.test.found}: its classes are not those of the training set; look at the path")

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> LabelledImages:
        """What `ermoe.open_images` finds at ``path``."""
        return cls(os.fspath(path), open_images(path, "train"), open_images(path, "test"))

    @property
    def classes(self) -> list[str]:
        """Their names."""
        return self.train.classes

    def identity(self) -> Json:
        """Where they are, and how many."""
        return {"data": self.path, "num_images": len(self.train), "num_classes": len(self.classes)}

    def beside(self) -> dict[str, list[str]]:
        """The names of the classes, which `ermoe image predict` shows."""
        return {"classes.json": self.classes}

    def without_validation(self, share: float) -> tuple[Images, Images | None]:
        """The training images less those held out to choose the best epoch, and those; the same for every seed.

        >>> train, validation = LabelledImages.open("digits").without_validation(0.1)
        >>> len(train), len(validation)
        (1078, 120)
        """
        count = round(share * len(self.train))
        if count == 0:
            return self.train, None
        order = np.argsort(hashed(_VALIDATION, np.arange(len(self.train))), kind="stable")
        return some_of(self.train, np.sort(order[count:])), some_of(self.train, np.sort(order[:count]))


_VALIDATION = 0x5EED  # a stream of numbers that no epoch draws from
