"""What can be measured about a routing: one definition each, as pure functions of tensors.

Functions that describe single tokens return one value per token, so that whoever averages them, over a batch or over
an epoch, uses the same definition. Where a measure has no meaning it is NaN, never a flattering zero. How to read
each of them is in docs/reference/measures.md.

Letters: T tokens, N images of S tokens, E experts, A pairs of token and expert, C classes, D model width, r routing
rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

NEAR_ZERO_WEIGHT = 0.01
"""A chosen expert with a smaller mixing weight has next to no say in the output: an idle pick."""


def load_cv2(load_E: Tensor) -> Tensor:
    """Squared coefficient of variation of the experts' loads: population variance over squared mean.

    0 when all loads are equal, E − 1 when one expert has everything. ``load_E`` counts pairs, or sums their weights.

    >>> load_cv2(torch.tensor([1, 1, 1, 1])).item(), load_cv2(torch.tensor([8, 0, 0, 0])).item()
    (0.0, 3.0)
    """
    load_E = load_E.double()
    return load_E.var(correction=0) / load_E.mean().square()


def max_load(load_E: Tensor) -> Tensor:
    """The busiest expert's load over the mean load: by how much one device would have to wait for another.

    >>> max_load(torch.tensor([6, 1, 1, 0])).item()
    3.0
    """
    load_E = load_E.double()
    return load_E.max() / load_E.mean()


def tail_masses(score_TE: Tensor, threshold: float) -> Tensor:
    """Share of the weight above the threshold that lies beyond the k best, for every k from 1 to E, (T, E).

    With A = {e : s_e > threshold} and weights ∝ s renormalised on A, column k − 1 is the weight of A without its k best
    (paper, supplement). NaN for a token with an empty A.

    >>> tail_masses(torch.tensor([[0.5, 0.75, 0.75, 0.2]]), threshold=0.4).tolist()
    [[0.625, 0.25, 0.0, 0.0]]
    """
    if threshold < 0:
        raise ValueError(f"threshold={threshold}: weights proportional to scores need a threshold of at least 0")
    above_TE = torch.where(score_TE > threshold, score_TE, 0).sort(-1, descending=True).values
    from_TE = above_TE.flip(-1).cumsum(-1).flip(-1)  # what the k-th best and all after it have
    return torch.nn.functional.pad(from_TE[:, 1:], (0, 1)) / from_TE[:, :1]


def margin(score_TE: Tensor) -> Tensor:
    """Best minus second-best score, (T,): how clear the first choice was. NaN with a single expert.

    >>> margin(torch.tensor([[0.75, 0.25, 0.5]])).tolist()
    [0.25]
    """
    if score_TE.shape[-1] < 2:
        return score_TE.new_full(score_TE.shape[:-1], torch.nan)
    best, second = score_TE.topk(2, dim=-1).values.unbind(-1)
    return best - second


def spread(score_TE: Tensor) -> Tensor:
    """Best minus worst score, (T,). Zero means that the score cannot tell experts apart.

    >>> spread(torch.tensor([[0.75, 0.25, 0.5]])).tolist()
    [0.5]
    """
    return score_TE.amax(-1) - score_TE.amin(-1)


def near_zero(weight_A: Tensor) -> Tensor:
    """Whether a pair's mixing weight is below `NEAR_ZERO_WEIGHT`, (A,). The mean is the near-zero rate.

    Equal counts can be had by giving tokens to experts that hardly weigh in; this is how to notice.

    >>> near_zero(torch.tensor([0.998, 0.002])).tolist()
    [False, True]
    """
    return weight_A < NEAR_ZERO_WEIGHT


def changed(before_TE: Tensor, after_TE: Tensor) -> Tensor:
    """Whether a token's set of experts differs between two routings, (T,). The mean is the routing fluctuation.

    Both are boolean, True where a token uses an expert. The order of a token's experts does not matter.

    >>> before = torch.tensor([[True, True, False], [True, False, True]])
    >>> changed(before, torch.tensor([[True, True, False], [False, True, True]])).tolist()
    [False, True]
    """
    return (before_TE != after_TE).any(-1)


def drop_rate(num_dropped: Tensor, num_assigned: Tensor) -> Tensor:
    """Share of the wanted pairs that found their expert full.

    >>> drop_rate(torch.tensor(1), torch.tensor(3)).item()
    0.25
    """
    return num_dropped.double() / (num_dropped + num_assigned)


def principal_cosines(basis_EDr: Tensor) -> Tensor:
    """Cosines of the principal angles between all pairs of experts' subspaces, (E, E, r), largest first.

    Only the subspaces count: the columns need not be orthonormal.

    >>> axes = torch.eye(3)
    >>> principal_cosines(torch.stack([axes[:, :2], axes[:, 1:]]))[0, 1].tolist()
    [1.0, 0.0]
    """
    orthonormal_EDr, _ = torch.linalg.qr(basis_EDr.double())
    cosines = torch.einsum("idr,jds->ijrs", orthonormal_EDr, orthonormal_EDr)
    largest_first: Tensor = torch.linalg.svdvals(cosines).clamp_max(1)
    return largest_first


def subspace_overlap(basis_EDr: Tensor) -> Tensor:
    """Mean squared cosine of the principal angles between two experts' routing subspaces, over all pairs of experts.

    0 for mutually orthogonal subspaces, 1 for equal ones, r / D on average for random ones. NaN with a single expert.

    >>> axes = torch.eye(3)
    >>> subspace_overlap(torch.stack([axes[:, :2], axes[:, 1:]])).item()
    0.5
    """
    overlap_EE = principal_cosines(basis_EDr).square().mean(-1)
    num_experts = len(overlap_EE)
    others_EE = ~torch.eye(num_experts, dtype=torch.bool, device=overlap_EE.device)
    return overlap_EE[others_EE].mean()


def class_information(count_CE: Tensor) -> Tensor:
    """Mutual information between a pair's class and its expert, in bits: what the expert tells about the class.

    0 when the experts ignore the class; at most log₂ min(C, E). From n pairs it is overestimated by about
    (C − 1)(E − 1) / (2 n ln 2) bits.

    >>> class_information(torch.tensor([[5, 0], [0, 5]])).item(), class_information(torch.ones(2, 2)).item()
    (1.0, 0.0)
    """
    joint_CE = count_CE.double() / count_CE.sum()
    independent_CE = joint_CE.sum(1, keepdim=True) * joint_CE.sum(0, keepdim=True)
    # 0 · log 0 = 0; a table without any pair stays NaN
    terms_CE = torch.where(joint_CE == 0, 0, joint_CE * torch.log2(joint_CE / independent_CE))
    return terms_CE.sum().clamp_min(0)


def class_information_by_position(top_NS: Tensor, label_N: Tensor) -> Tensor:
    """Mutual information between class and the expert of a token, given its position in the image, in bits.

    ``top_NS`` holds the expert that weighs most for every token of N images. Experts that only tell the middle of an
    image from its border have none, and neither have experts that look at colours that all classes share.

    >>> by_class, by_position = torch.tensor([[0, 0], [1, 1]]), torch.tensor([[0, 1], [0, 1]])
    >>> label = torch.tensor([0, 1])
    >>> class_information_by_position(by_class, label).item(), class_information_by_position(by_position, label).item()
    (1.0, 0.0)
    """
    num_images, num_positions = top_NS.shape
    num_classes, num_experts = int(label_N.max()) + 1, int(top_NS.max()) + 1
    cell_NS = label_N.unsqueeze(1) * num_experts + top_NS.long()
    cell_NS = cell_NS + num_classes * num_experts * torch.arange(num_positions)
    count_S = torch.bincount(cell_NS.flatten(), minlength=num_positions * num_classes * num_experts)
    joint_SCE = count_S.view(num_positions, num_classes, num_experts).double() / num_images
    independent_SCE = joint_SCE.sum(2, keepdim=True) * joint_SCE.sum(1, keepdim=True)
    terms_SCE = torch.where(joint_SCE == 0, 0, joint_SCE * torch.log2(joint_SCE / independent_SCE))
    return terms_SCE.sum((1, 2)).mean().clamp_min(0)
