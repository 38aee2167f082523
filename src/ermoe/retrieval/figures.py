"""Exact ranks for any number of right candidates, and recall, median rank and RSUM in both directions from them.

I2T finds a caption for an image: a hit when any of the image's captions is among the first k, a mean over images.
T2I finds the image of a caption: a mean over captions. Figures are shares from 0 to 1; RSUM is the sum of the six
recalls in per cent.

Both directions are one computation, which never holds the matrix of all scores: queries meet all candidates strip by
strip, and a candidate is right when it is of the query's group (image). The score of the best right candidate is read
from the very product that holds the scores it is compared with: a second product of the same vectors may differ in the
last bit, and would make a query lose, or win, against itself. For the same reason products have sides that are
multiples of 64: kernels for the rest of a matrix sum in another order, and equal vectors would no longer tie. Scores
are at least float32 and never pass through a softmax, in which distinct scores become equal.

Letters: Q queries, C candidates, D width, P places for right candidates, S queries of a strip, I images, T texts,
F figures.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ermoe.errors import UserError

CUTS = (1, 5, 10)
RECALLS = tuple(f"{direction}_r{k}" for direction in ("i2t", "t2i") for k in CUTS)
TIES = ("against", "middle", "for", "first")
_STRIP_BYTES = 64 * 2**20
_SIDE = 64


@dataclass(frozen=True, slots=True)
class Ranks:
    """How each query's best right candidate stands among the wrong ones, (Q,) each.

    ``above_Q`` wrong candidates score more, ``tied_Q`` score exactly the same, ``tied_before_Q`` of those stand earlier
    in the list of candidates.
    """

    above_Q: Tensor
    tied_Q: Tensor
    tied_before_Q: Tensor
    num_candidates: int

    def __len__(self) -> int:
        return len(self.above_Q)

    def zero_based(self, ties: str = "against") -> Tensor:
        """Ranks from 0, (Q,). Ties count "against" the query, half ("middle"), "for" it, or by "first" in the list.

        Only "against" is safe with an encoder that gives all inputs one vector: it then finds nothing.

        >>> ranks = Ranks(torch.tensor([2]), torch.tensor([3]), torch.tensor([1]), num_candidates=9)
        >>> [ranks.zero_based(ties).item() for ties in TIES]
        [5.0, 3.5, 2.0, 3.0]
        """
        if ties not in TIES:
            raise UserError(f"ties={ties!r}: use one of {', '.join(TIES)}")
        better: dict[str, Tensor | int] = {
            "against": self.tied_Q,
            "middle": self.tied_Q / 2,
            "for": 0,
            "first": self.tied_before_Q,
        }
        return (self.above_Q + better[ties]).double()

    def found_within(self, k: int, ties: str = "against") -> Tensor:
        """Whether a right candidate is among the first k, (Q,)."""
        # A tie that is counted half may end at k − ½: not among the first k for sure.
        return self.zero_based(ties) <= k - 1


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

    def intervals(self, *, draws: int = 1000, seed: int = 0) -> dict[str, tuple[float, float]]:
        """95 % intervals of the recalls and of RSUM, drawing images with their captions, with replacement.

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
        low_F, high_F = np.quantile(drawn, (0.025, 0.975), axis=0)
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


@torch.no_grad()
def rank(
    query_QD: Tensor,
    candidate_CD: Tensor,
    query_group_Q: Tensor,
    candidate_group_C: Tensor,
    *,
    strip_bytes: int = _STRIP_BYTES,
) -> Ranks:
    """Ranks of the best candidate of each query's own group among all candidates of other groups.

    >>> image, text = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]])
    >>> rank(image, text, torch.arange(2), torch.tensor([0, 1, 0])).zero_based().tolist()
    [0.0, 0.0]
    """
    _check(query_QD, candidate_CD, query_group_Q, candidate_group_C)
    query_QD, candidate_CD = wide(query_QD), wide(candidate_CD)
    place_QP = _right_places(query_group_Q, candidate_group_C)
    num_queries, num_candidates = len(query_QD), len(candidate_CD)
    above_Q, tied_Q, tied_before_Q = (torch.zeros(num_queries, dtype=torch.long) for _ in range(3))
    candidate_CD = F.pad(candidate_CD, [0, 0, 0, -num_candidates % _SIDE])
    size = max(1, min(num_queries, strip_bytes // (candidate_CD.element_size() * len(candidate_CD))))
    size = size if size < _SIDE else size - size % _SIDE
    query_SD = query_QD.new_zeros(size + -size % _SIDE, query_QD.shape[1])
    score_SC = query_QD.new_empty(len(query_SD), len(candidate_CD))
    with _full_products():
        for start in range(0, num_queries, size):
            rows = slice(start, min(start + size, num_queries))
            num_rows = rows.stop - rows.start
            query_SD[:num_rows] = query_QD[rows]
            torch.mm(query_SD, candidate_CD.mT, out=score_SC)
            counts = _compare(score_SC[:num_rows, :num_candidates], place_QP[rows])
            for total_Q, count_S in zip((above_Q, tied_Q, tied_before_Q), counts, strict=True):
                total_Q[rows] = count_S.cpu()
    return Ranks(above_Q, tied_Q, tied_before_Q, num_candidates)


def nearest(query_D: Tensor, candidate_CD: Tensor, top: int) -> list[tuple[int, float]]:
    """The candidates nearest to a query, (place, cosine), best first; of equal ones the earlier wins.

    >>> nearest(torch.tensor([1.0, 0.0]), torch.tensor([[0.0, 1.0], [1.0, 0.0], [1.0, 0.0]]), 2)
    [(1, 1.0), (2, 1.0)]
    """
    score_C = candidate_CD @ query_D
    order = torch.argsort(score_C, descending=True, stable=True)[:top].tolist()
    return [(place, float(score_C[place])) for place in order]


def _compare(score_SC: Tensor, place_SP: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Wrong candidates above the best right one, equal to it, and equal to it and earlier; (S,) each."""
    right_SP = score_SC.gather(1, place_SP.clamp_min(0)).masked_fill(place_SP < 0, -torch.inf)
    best_S1 = right_SP.amax(1, keepdim=True)
    above_S = (score_SC > best_S1).sum(1)
    is_best_SP = right_SP == best_S1
    equal_SC = score_SC == best_S1
    tied_S = equal_SC.sum(1) - is_best_SP.sum(1)
    before_S = torch.zeros_like(tied_S)
    # Places are listed in order, so the first best one is the earliest.
    first_S1 = place_SP.gather(1, is_best_SP.int().argmax(1, keepdim=True))
    for row in tied_S.nonzero().squeeze(1).tolist():
        before_S[row] = equal_SC[row, : int(first_S1[row])].sum()
    return above_S, tied_S, before_S


def _right_places(query_group_Q: Tensor, candidate_group_C: Tensor) -> Tensor:
    """For each query the places of the candidates of its group, in order, filled up with −1: (Q, P).

    >>> _right_places(torch.tensor([0, 1]), torch.tensor([1, 0, 1])).tolist()
    [[1, -1], [0, 2]]
    """
    order_C = torch.argsort(candidate_group_C, stable=True)
    sorted_C = candidate_group_C[order_C].contiguous()
    first_Q = torch.searchsorted(sorted_C, query_group_Q.contiguous())
    count_Q = torch.searchsorted(sorted_C, query_group_Q.contiguous(), right=True) - first_Q
    if bool((count_Q == 0).any()):
        lonely = int(query_group_Q[count_Q == 0][0])
        raise UserError(f"a query of image {lonely} has no right candidate at all: every image needs a caption")
    offset_P = torch.arange(int(count_Q.max()), device=count_Q.device)
    index_QP = (first_Q.unsqueeze(1) + offset_P).clamp_max(len(order_C) - 1)
    return order_C[index_QP].masked_fill(offset_P >= count_Q.unsqueeze(1), -1)


def _check(query_QD: Tensor, candidate_CD: Tensor, query_group_Q: Tensor, candidate_group_C: Tensor) -> None:
    if query_QD.shape[1:] != candidate_CD.shape[1:]:
        raise UserError(
            f"queries have shape {tuple(query_QD.shape)} and candidates {tuple(candidate_CD.shape)}: their widths must "
            "be equal"
        )
    if len(query_group_Q) != len(query_QD) or len(candidate_group_C) != len(candidate_CD):
        raise UserError(
            f"{len(query_QD)} queries and {len(candidate_CD)} candidates have {len(query_group_Q)} and "
            f"{len(candidate_group_C)} groups: need one each"
        )
    for name, feature in (("queries", query_QD), ("candidates", candidate_CD)):
        if len(feature) and not all(bool(end.isfinite()) for end in torch.aminmax(feature)):
            # A comparison with NaN is false, so NaN would stand above everything.
            raise UserError(f"the features of the {name} hold NaN or infinity: they cannot be ranked")


def wide(feature: Tensor) -> Tensor:
    """Features in float32 at least."""
    return feature if feature.dtype == torch.float64 else feature.float()


@contextmanager
def _full_products() -> Iterator[None]:
    """Products in the precision of their factors, whatever shortcut the caller has switched on."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
