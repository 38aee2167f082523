"""The offsets under which every expert is chosen equally often, solved from a sample of scores.

Equal load is the optimum of a convex function of the offsets o, Σ_t (sum of the k largest s_te + o_e) − (load a share)
· Σ_e o_e, whose slope in o_e is the load of expert e minus its share. It is descended one expert at a time: with the
others held, the offset that gives expert e exactly its share is an order statistic of its margins.

Letters: T tokens, E experts, K experts per token.
"""

from __future__ import annotations

import torch
from torch import Tensor

_EQUAL_ENOUGH = 1e-6
_MAX_SWEEPS = 60
_PATIENCE = 4


@torch.no_grad()
def equal_load_offsets(score_TE: Tensor, top_k: int, *, threshold: float | None = None) -> Tensor:
    """Offsets (E,), of mean zero, for which choosing the ``top_k`` largest score + offset loads all experts equally.

    With a ``threshold``, experts that score below it are not chosen, and a token without any expert above it goes to
    its best one whatever the offsets: then loads are only as equal as the threshold lets them be.

    >>> score = torch.rand(4000, 4, generator=torch.Generator().manual_seed(0)) + torch.tensor([0.5, 0.0, 0.0, 0.0])
    >>> offset = equal_load_offsets(score, top_k=1)
    >>> (score + offset).argmax(1).bincount().tolist()
    [1000, 1000, 1000, 1000]
    """
    num_tokens, num_experts = score_TE.shape
    if num_tokens == 0 or top_k >= num_experts:
        return score_TE.new_zeros(num_experts)
    eligible_TE, fixed_E = _eligibility(score_TE, threshold)
    kept_T = eligible_TE.sum(1).clamp_max(top_k)
    share_E = ((kept_T.sum() + fixed_E.sum()) / num_experts - fixed_E).clamp_min(0)
    open_TE = score_TE.masked_fill(~eligible_TE, -torch.inf)
    reach = (score_TE.max() - score_TE.min()).clamp_min(1e-6)  # beyond it an offset changes nothing more
    best_offset_E = offset_E = score_TE.new_zeros(num_experts)
    best_error, best_sweep = torch.inf, 0
    for sweep in range(_MAX_SWEEPS):
        offset_E = _sweep(open_TE, offset_E, top_k, share_E, reach)
        load_E = _load(open_TE + offset_E, top_k) + fixed_E
        error = float(load_E.var(correction=0) / load_E.mean().square())
        if error < best_error:
            best_error, best_offset_E, best_sweep = error, offset_E, sweep
        if error < _EQUAL_ENOUGH or sweep > best_sweep + _PATIENCE:
            break
    return best_offset_E - best_offset_E.mean()


def _eligibility(score_TE: Tensor, threshold: float | None) -> tuple[Tensor, Tensor]:
    """Which experts a token may choose among, (T, E), and how many tokens have none and go to their best, (E,)."""
    if threshold is None:
        return torch.ones_like(score_TE, dtype=torch.bool), score_TE.new_zeros(score_TE.shape[1])
    eligible_TE = score_TE >= threshold
    fell_back_T = ~eligible_TE.any(1)
    fixed_E = score_TE[fell_back_T].argmax(1).bincount(minlength=score_TE.shape[1])
    return eligible_TE, fixed_E.to(score_TE.dtype)


def _sweep(open_TE: Tensor, offset_E: Tensor, top_k: int, share_E: Tensor, reach: Tensor) -> Tensor:
    """Gives each expert in turn its exact share, the others held."""
    offset_E = offset_E.clone()
    for expert, share in enumerate(share_E.round().long().tolist()):
        rivals_TE = open_TE + offset_E
        rivals_TE[:, expert] = -torch.inf
        # A token chooses the expert when its score exceeds the k-th best rival by more than −offset.
        margin_T = open_TE[:, expert] - rivals_TE.topk(top_k, dim=1).values[:, -1]
        margin_T = margin_T[open_TE[:, expert] > -torch.inf].sort(descending=True).values
        inside = margin_T[share - 1] if 0 < share <= len(margin_T) else margin_T.new_tensor(torch.inf)
        outside = margin_T[share] if share < len(margin_T) else margin_T.new_tensor(-torch.inf)
        # Infinite margins: rivals are too few to contest the token, so no finite offset changes its choice.
        offset_E[expert] = _between(inside, outside, reach)
        offset_E -= offset_E.mean()
    return offset_E


def _between(inside: Tensor, outside: Tensor, reach: Tensor) -> Tensor:
    """−(inside + outside) / 2, at most ``reach`` away from zero."""
    inside, outside = inside.clamp(-reach, reach), outside.clamp(-reach, reach)
    return -(inside + outside) / 2


def _load(ranking_TE: Tensor, top_k: int) -> Tensor:
    """How often each expert is among the ``top_k`` finite entries of a row."""
    value_TK, expert_TK = ranking_TE.topk(top_k, dim=1)
    return expert_TK[value_TK > -torch.inf].bincount(minlength=ranking_TE.shape[1]).to(ranking_TE.dtype)
