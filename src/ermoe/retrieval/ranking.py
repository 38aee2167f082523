"""Exact ranks for any number of right candidates, without ever holding the matrix of all scores.

Both directions are one computation: queries meet all candidates strip by strip, and a candidate is right when it is of
the query's group (image). The score of the best right candidate is read from the very product that holds the scores it
is compared with: a second product of the same vectors may differ in the last bit, and would make a query lose, or win,
against itself. For the same reason products have sides that are multiples of 64: kernels for the rest of a matrix sum
in another order, and equal vectors would no longer tie. Scores are at least float32 and never pass through a softmax,
in which distinct scores become equal.

Letters: Q queries, C candidates, D width, P places for right candidates, S queries of a strip.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ermoe.errors import UserError

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
    query_QD, candidate_CD = _at_least_float32(query_QD), _at_least_float32(candidate_CD)
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


def _at_least_float32(feature: Tensor) -> Tensor:
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
