"""Recall, median rank and RSUM in both directions, with intervals by image.

I2T finds a caption for an image: a hit when any of the image's captions is among the first k, a mean over images.
T2I finds the image of a caption: a mean over captions. Figures are shares from 0 to 1; RSUM is the sum of the six
recalls in per cent.

Letters: I images, T texts, F figures.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ermoe.retrieval.ranking import Ranks, rank

CUTS = (1, 5, 10)
RECALLS = tuple(f"{direction}_r{k}" for direction in ("i2t", "t2i") for k in CUTS)


@dataclass(frozen=True, slots=True)
class Retrieval:
    """The ranks of a pool of images and texts in both directions."""

    image_to_text: Ranks
    text_to_image: Ranks
    text_to_image_T: Tensor

    def figures(self, ties: str = "against") -> dict[str, float]:
        """Recalls at 1, 5 and 10, median ranks (from 1) and RSUM."""
        directions = {"i2t": self.image_to_text, "t2i": self.text_to_image}
        recalls = {
            f"{direction}_r{k}": float(ranks.found_within(k, ties).double().mean())
            for direction, ranks in directions.items()
            for k in CUTS
        }
        medians = {
            f"{direction}_median_rank": float(np.median(ranks.zero_based(ties).numpy())) + 1
            for direction, ranks in directions.items()
        }
        return {**recalls, **medians, "rsum": 100 * sum(recalls.values())}

    @property
    def num_tied(self) -> int:
        """Queries whose best right candidate has exactly the score of a wrong one."""
        return int((self.image_to_text.tied_Q > 0).sum() + (self.text_to_image.tied_Q > 0).sum())

    def other_ties(self) -> dict[str, dict[str, float]]:
        """The same figures with ties counted half and in favour, where they differ from `figures`."""
        strict = self.figures()
        variants = {ties: self.figures(ties) for ties in ("middle", "for")}
        return {ties: figures for ties, figures in variants.items() if figures != strict}

    def intervals(self, *, draws: int = 1000, seed: int = 0, level: float = 0.95) -> dict[str, tuple[float, float]]:
        """Percentile intervals of the recalls and of RSUM, drawing images with their captions, with replacement.

        Captions of one image are not independent, so they are drawn together. The pool of candidates stays as it is.
        """
        hits_IF, count_I = self._hits_by_image()
        generator = np.random.default_rng(seed)
        drawn = np.empty((draws, len(RECALLS) + 1))
        for row in drawn:
            weight_I = np.bincount(generator.integers(len(count_I), size=len(count_I)), minlength=len(count_I))
            texts = weight_I @ count_I
            row[:-1] = (weight_I @ hits_IF) / np.repeat([len(count_I), texts], len(CUTS))
            row[-1] = 100 * row[:-1].sum()
        tail = (1 - level) / 2
        low_F, high_F = np.quantile(drawn, (tail, 1 - tail), axis=0)
        return {
            name: (float(low), float(high)) for name, low, high in zip((*RECALLS, "rsum"), low_F, high_F, strict=True)
        }

    def _hits_by_image(self) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """I2T hits of each image beside the sums of its captions' T2I hits (I, 6), and its captions (I,)."""
        num_images = len(self.image_to_text)
        owner_T = self.text_to_image_T.numpy()
        hits = [self.image_to_text.found_within(k).double().numpy() for k in CUTS]
        hits += [
            np.bincount(owner_T, self.text_to_image.found_within(k).double().numpy(), minlength=num_images)
            for k in CUTS
        ]
        return np.stack(hits, axis=1), np.bincount(owner_T, minlength=num_images)

    def chance(self, k: int) -> tuple[float, float]:
        """R@k of a random order, I2T and T2I.

        A random order misses all n captions of an image with probability Π_j (T − n − j) / (T − j), j = 0 … k − 1.
        """
        num_texts, num_images = len(self.text_to_image_T), len(self.image_to_text)
        count_I = np.bincount(self.text_to_image_T.numpy(), minlength=num_images).astype(float)
        missed_I = np.ones(num_images)
        for place in range(min(k, num_texts)):
            missed_I *= np.maximum(num_texts - count_I - place, 0) / (num_texts - place)
        return float(1 - missed_I.mean()), min(1.0, k / num_images)


def retrieve(image_ID: Tensor, text_TD: Tensor, text_to_image_T: Tensor) -> Retrieval:
    """Ranks everything in both directions.

    >>> both = retrieve(torch.eye(3), torch.eye(3), torch.arange(3))
    >>> both.figures()["rsum"], both.figures()["i2t_median_rank"]
    (600.0, 1.0)
    """
    image_I = torch.arange(len(image_ID), device=text_to_image_T.device)
    return Retrieval(
        rank(image_ID, text_TD, image_I, text_to_image_T),
        rank(text_TD, image_ID, text_to_image_T, image_I),
        text_to_image_T.cpu(),
    )
