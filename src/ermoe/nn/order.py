"""Which comes first: the largest, and of equal ones the one with the lower index, which `torch.topk` does not promise.

Letters: T tokens, E experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ermoe.nn.tracing import is_for_onnx


def falling_order(values: Tensor, dim: int = -1) -> Tensor:
    """Indices along ``dim`` from the largest value to the smallest; of equal ones the lower index comes first.

    >>> falling_order(torch.tensor([0.5, 0.9, 0.9])).tolist()
    [1, 2, 0]
    """
    if is_for_onnx():  # which has no stable sort, but a TopK that promises the order of equal ones
        return values.topk(values.shape[dim], dim=dim).indices
    return torch.argsort(values, dim=dim, descending=True, stable=True)


def is_one_of(index: Tensor, number: int) -> Tensor:
    """A last axis that tells which of ``number`` an index is; unlike torch's `one_hot`, it looks at no value.

    >>> is_one_of(torch.tensor([2, 0]), 3).tolist()
    [[False, False, True], [True, False, False]]
    """
    return index.unsqueeze(-1) == torch.arange(number, device=index.device)


def stable_top_k(ranking_TE: Tensor, k: int) -> Tensor:
    """Ids of the k largest entries of each row, best first; of equal entries the lower id wins. All are above −inf.

    >>> stable_top_k(torch.tensor([[0.5, 0.9, 0.9]]), 2).tolist()
    [[1, 2]]
    """
    if k > 2:
        return falling_order(ranking_TE)[:, :k]
    best_T1 = ranking_TE.argmax(-1, keepdim=True)  # the first of the largest, without sorting the others
    if k == 1:
        return best_T1
    others_TE = ranking_TE.scatter(-1, best_T1, -torch.inf)
    return torch.cat([best_T1, others_TE.argmax(-1, keepdim=True)], dim=-1)
