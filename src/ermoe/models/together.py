"""Networks fitted together: a narrow one that every token meets, and beside it a small one for each group of tokens.

Groups of tokens have most of the hidden units they use in common. Kept once, for all, these units cost the memory and
the time of one network; only what a group needs besides is an expert's own. With a_s the shared units and a_e those of
expert e, the last maps solve

    argmin Σ_e p_e E_e‖a_s B_s + a_e B_e − y‖² + λ ‖B − W2‖²

over all groups at once, p_e being a group's share of the tokens. Each B_e meets B_s alone, so experts are eliminated
one by one (Schur's complement), and what is left to solve is no larger than the shared network. Biases restore the mean
of every group.

Letters: T tokens, D model width, H hidden width, s shared units, k units of one expert.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ermoe.models.fitting import Moments, by_part, mapped, ridge_of
from ermoe.models.tokens import Tokens
from ermoe.nn.ffn import FFN, Linear


@dataclass(frozen=True, slots=True)
class _Group:
    """Hidden units of the tokens of one group: their covariance, their mean, and the group's share of all tokens."""

    covariance_HH: Tensor
    mean_H: Tensor
    share: float
    num: float

    @classmethod
    def of(cls, ffn: FFN, tokens: Tokens, share: float) -> _Group:
        moments = Moments.over((ffn.hidden(x), weight_T) for x, weight_T in tokens.parts())
        return cls(moments.covariance(centred=ffn.has_bias), moments.mean, share, moments.num)


@dataclass(frozen=True, slots=True)
class _Split:
    """Units that all groups share and units of each group's own, with the last maps (s, D) and (k, D) of each."""

    shared_s: Tensor
    solved_sD: Tensor
    own: list[tuple[Tensor, Tensor]]

    def weights(self, like_HD: Tensor) -> Iterator[Tensor]:
        """For each group, the last map of all hidden units, (H, D): zero where it has none."""
        for own_k, solved_kD in self.own:
            weight_HD = torch.zeros_like(like_HD)
            weight_HD[self.shared_s], weight_HD[own_k] = self.solved_sD, solved_kD
            yield weight_HD


@torch.no_grad()
def fitted_together(ffn: FFN, groups: Sequence[Tokens], shared: int, own: int) -> tuple[FFN, list[FFN]]:
    """The network of ``shared`` hidden units for all tokens, and those of ``own`` units that groups have beside it."""
    metric_DD = groups[0].metric_DD
    in_metric = ffn if metric_DD is None else mapped(ffn, metric_DD)
    weight_HD = in_metric.down.W.double()
    seen = [_Group.of(in_metric, tokens, share) for tokens, share in zip(groups, shares_of(groups), strict=True)]
    split = _split(weight_HD, seen, shared, own)
    back_DD = None if metric_DD is None else torch.linalg.inv(metric_DD.double())

    def network(units: Tensor, solved: Tensor, bias_D: Tensor | None) -> FFN:
        down = Linear(solved.to(ffn.down.W.dtype), None if bias_D is None else bias_D.to(ffn.down.W.dtype))
        cut = replace(in_metric.with_units(units), down=down)
        return cut if back_DD is None else mapped(cut, back_DD)

    beside = []
    for group, whole_HD, (own_k, solved_kD) in zip(seen, split.weights(weight_HD), split.own, strict=True):
        bias_D = None
        if ffn.has_bias:
            bias_D = group.mean_H @ (weight_HD - whole_HD)
            bias_D = bias_D if in_metric.down.b is None else bias_D + in_metric.down.b
        beside.append(network(own_k, solved_kD, bias_D))
    none_D = torch.zeros_like(weight_HD[0]) if ffn.has_bias else None
    return network(split.shared_s, split.solved_sD, none_D), beside


@torch.no_grad()
def errors_together(ffn: FFN, groups: Sequence[Tokens], sizes: Iterable[tuple[int, int]]) -> list[float]:
    """Mean of ‖(ŷ − y) L‖² over tokens by their cost for networks fitted together, of each (shared, own) size.

    Units and maps are found by one half of each group and judged by the other, as in `errors_of_widths`.
    """
    metric_DD = groups[0].metric_DD
    ffn = ffn if metric_DD is None else mapped(ffn, metric_DD)
    weight_HD = ffn.down.W.double()
    halves = [torch.arange(len(tokens), device=tokens.x_TD.device) % 2 == 0 for tokens in groups]
    fit, judge = [], []
    for tokens, half_T, weight, cost in zip(groups, halves, shares_of(groups), shares_of(groups, power=2), strict=True):
        fit.append(_Group.of(ffn, tokens.where(half_T), weight))
        judge.append(_Group.of(ffn, tokens.where(~half_T).by_cost(), cost))
    errors = []
    for shared, own in sizes:
        found = _split(weight_HD, fit, shared, own).weights(weight_HD)
        apart = [(other, weight_HD - own_HD) for other, own_HD in zip(judge, found, strict=True)]
        errors.append(sum(other.share * float(((other.covariance_HH @ d_HD) * d_HD).sum()) for other, d_HD in apart))
    return errors


def shares_of(groups: Sequence[Tokens], power: int = 1) -> list[float]:
    """Of the groups in the weight of all tokens; in their cost, which is the square of it."""
    weights = [float(tokens.weight_T.pow(power).sum()) for tokens in groups]
    return [weight / sum(weights) for weight in weights]


def _split(weight_HD: Tensor, groups: Sequence[_Group], shared: int, own: int) -> _Split:
    """Shared are the units whose parts of the output vary most within groups; a group's own are its next ones."""
    pooled_H = torch.stack([group.share * group.covariance_HH.diagonal() for group in groups]).sum(0)
    order_H = by_part(pooled_H, weight_HD)
    shared_s, rest = order_H[:shared].sort().values, order_H[shared:]
    num = sum(group.num for group in groups)
    system_ss = wanted_sD = torch.zeros((), dtype=weight_HD.dtype, device=weight_HD.device)
    eliminated = []
    for group in groups:
        own_k = rest[by_part(group.covariance_HH.diagonal()[rest], weight_HD[rest])[:own]].sort().values
        kept = torch.cat([shared_s, own_k])
        seen, ridge = group.covariance_HH[kept][:, kept], group.covariance_HH.diagonal()[kept].mean()
        # What is left to explain when kept units say what they said in the dense network.
        missing_D = group.covariance_HH[kept] @ weight_HD - seen @ weight_HD[kept]
        seen_ss, seen_sk, seen_kk = seen[:shared, :shared], seen[:shared, shared:], seen[shared:, shared:]
        own_kk = seen_kk + ridge_of(own, group.num) * ridge * torch.eye(own).to(seen)
        along_ks, along_kD = torch.linalg.solve(own_kk, torch.cat([seen_sk.mT, missing_D[shared:]], 1)).split(
            [shared, weight_HD.shape[1]], 1
        )
        shared_ss = seen_ss + ridge_of(shared, num) * ridge * torch.eye(shared).to(seen)
        system_ss = system_ss + group.share * (shared_ss - seen_sk @ along_ks)
        wanted_sD = wanted_sD + group.share * (missing_D[:shared] - seen_sk @ along_kD)
        eliminated.append((own_k, along_ks, along_kD))
    moved_sD = torch.linalg.solve(system_ss, wanted_sD)
    own_maps = [(own_k, weight_HD[own_k] + along_kD - along_ks @ moved_sD) for own_k, along_ks, along_kD in eliminated]
    return _Split(shared_s, weight_HD[shared_s] + moved_sD, own_maps)
