"""Small networks fitted to tokens: the nearest to a dense one that a hidden width and a rank allow, in closed form.

- The hidden units are kept whose outputs vary most, Var[a_j] ‖W2_j‖² (what is constant goes to the bias).
- An entering weight is cut to rank R where the loss hurts least: with δ = (x − μ)(W − Ŵ) what a cut does to the
  pre-activations h, the output changes by (δ ∘ a′) W2 to first order, and Ŵ minimises E[δ M δᵀ] with
  M_jk = E[a′_j a′_k] (W2_j · W2_k). A unit which is off, or which W2 ignores, costs nothing; neither do changes that
  W2 adds up to nothing. (The diagonal of M is ω_j = E[a′_j²] ‖W2_j‖².)
- W2 is solved for what is left: the map of rank R from the network's own hidden layer to the dense outputs y,
  argmin_B E‖(a − ā) B − (y − ȳ)‖² + λ ‖B − W2‖², with a bias that restores the mean.

Expectations are over tokens by what they mean for the answer (`ermoe.models.tokens`).

Letters: T tokens, D model width, H hidden width, R rank, k hidden units that are kept, n columns of any rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ermoe.models.tokens import Tokens
from ermoe.nn.ffn import FFN, Linear

_TOKENS_FOR_SLOPES = 16_384
_RIDGE = 1e-3  # of a mean variance
_RIDGE_OF_FEW = 10


def fitted(ffn: FFN, tokens: Tokens, width: int, rank: int | None = None) -> FFN:
    """The network of the given hidden width and rank that comes nearest to ``ffn`` on the tokens, in closed form.

    Full width and rank give the network itself.
    """
    is_low_rank = rank is not None and rank < min(ffn.dim, width)
    if width >= ffn.hidden_dim and not is_low_rank:
        return ffn
    in_metric = ffn if tokens.metric_DD is None else mapped(ffn, tokens.metric_DD)
    network = _narrowed(in_metric, tokens, width)
    if is_low_rank:
        assert rank is not None
        network = _cut(network, tokens, rank)
        network = replace(network, down=_solved(network, in_metric, tokens, rank))
    return network if tokens.metric_DD is None else mapped(network, torch.linalg.inv(tokens.metric_DD.double()))


def mapped(ffn: FFN, map_DD: Tensor) -> FFN:
    """The network whose outputs are those of ``ffn`` times a matrix."""
    W, b = ((None if part is None else (part.to(map_DD) @ map_DD).to(part)) for part in (ffn.down.W, ffn.down.b))
    assert W is not None
    down = Linear(W, b)
    return replace(ffn, down=down)


@torch.no_grad()
def errors_of_widths(ffn: FFN, tokens: Tokens, widths: Sequence[int]) -> list[float]:
    """Mean of ‖(ŷ − y) L‖² over tokens by their cost for `fitted` networks of each of the ``widths``, in closed form.

    With S the covariance of hidden units, of which k are kept and mapped by B, it is
    tr W2ᵀ S W2 − tr Bᵀ (2 S_k· W2 − S_kk B). Units and B are chosen by one half of the tokens, S is that of the other:
    where few tokens matter, a fit says little about others like them.
    """
    ffn = ffn if tokens.metric_DD is None else mapped(ffn, tokens.metric_DD)
    weight_HD = ffn.down.W.double()
    half_T = torch.arange(len(tokens), device=tokens.x_TD.device) % 2 == 0
    chosen_by, judged_by = (
        Moments.over((ffn.hidden(x), weight_T) for x, weight_T in half.parts())
        for half in (tokens.where(half_T), tokens.where(~half_T).by_cost())
    )
    known_HH, other_HH = (moments.covariance(centred=ffn.has_bias) for moments in (chosen_by, judged_by))
    order_H = by_part(known_HH.diagonal(), weight_HD)
    whole = float(((other_HH @ weight_HD) * weight_HD).sum())
    errors = []
    for width in widths:
        kept = order_H[:width]
        prior_kD, seen_kD = weight_HD[kept], known_HH[kept] @ weight_HD
        solved_kD = _regression(known_HH[kept][:, kept], seen_kD, prior=prior_kD, num_tokens=chosen_by.num)
        explained_kD = 2 * other_HH[kept] @ weight_HD - other_HH[kept][:, kept] @ solved_kD
        errors.append(max(whole - float((solved_kD * explained_kD).sum()), 0.0))
    return errors


@torch.no_grad()
def errors_of_ranks(ffn: FFN, tokens: Tokens, ranks: Sequence[int]) -> list[float]:
    """The same for networks of full width and each of the ``ranks``, fitted to one half of the tokens."""
    half_T = torch.arange(len(tokens), device=tokens.x_TD.device) % 2 == 0
    judge = tokens.where(~half_T).by_cost()
    return [judge.error(fitted(ffn, tokens.where(half_T), ffn.hidden_dim, rank), ffn) for rank in ranks]


def by_part(variance_H: Tensor, weight_HD: Tensor) -> Tensor:
    """Hidden units by how much their parts of the output, a_j W2_j, vary over the tokens, most first."""
    return (variance_H * weight_HD.double().square().sum(1)).argsort(descending=True, stable=True)


def _regression(covariance_HH: Tensor, with_output_HD: Tensor, prior: Tensor, num_tokens: float) -> Tensor:
    """argmin_B E‖a B − y‖² + λ ‖B − prior‖², given E[aᵀa] and E[aᵀy]."""
    ridge = ridge_of(len(covariance_HH), num_tokens)
    solved_HD: Tensor = torch.linalg.solve(_ridged(covariance_HH, ridge), with_output_HD - covariance_HH @ prior)
    return prior + solved_HD


def ridge_of(num_units: int, num_tokens: float) -> float:
    """λ over a mean variance: the fewer tokens a unit, the larger."""
    return _RIDGE * (1 + _RIDGE_OF_FEW * num_units / num_tokens)


def _ridged(covariance: Tensor, ridge: float = _RIDGE) -> Tensor:
    return covariance + ridge * covariance.diagonal().mean() * torch.eye(len(covariance)).to(covariance)


def _narrowed(ffn: FFN, tokens: Tokens, width: int) -> FFN:
    """The network with those ``width`` hidden units whose part of the output varies most, and its last map solved."""
    if width >= ffn.hidden_dim:
        return ffn
    moments = Moments.over((ffn.hidden(x), weight_T) for x, weight_T in tokens.parts())
    covariance_HH, weight_HD = moments.covariance(centred=ffn.has_bias), ffn.down.W.double()
    kept = by_part(covariance_HH.diagonal(), weight_HD)[:width].sort().values
    # The dense outputs are a W2 + b2, so what is known of a is all that a regression on them needs.
    with_output_kD = covariance_HH[kept] @ weight_HD
    solved_kD = _regression(covariance_HH[kept][:, kept], with_output_kD, weight_HD[kept], moments.num)
    bias = None
    if ffn.has_bias:
        bias = moments.mean @ weight_HD - moments.mean[kept] @ solved_kD
        bias = (bias if ffn.down.b is None else bias + ffn.down.b).to(ffn.down.W.dtype)
    return replace(ffn.with_units(kept), down=Linear(solved_kD.to(ffn.down.W.dtype), bias))


def _cut(ffn: FFN, tokens: Tokens, rank: int) -> FFN:
    """The network with entering weights of lower rank, cut in the metric M."""
    moments = Moments.over(tokens.parts())
    covariance_DD = _ridged(moments.covariance(centred=ffn.has_bias))
    eigenvalue_D, eigenvector_DD = torch.linalg.eigh(covariance_DD)
    root_D = eigenvalue_D.clamp_min(1e-30).sqrt()
    weight_HD = ffn.down.W.double()
    alike_HH = weight_HD @ weight_HD.mT  # W2_j · W2_k

    def cut(linear: Linear, slopes_HH: Tensor) -> Linear:
        W = linear.W.double()
        coloured_DH = root_D.unsqueeze(1) * (eigenvector_DD.mT @ W)  # √C W, up to a rotation
        left_DR = torch.linalg.eigh(coloured_DH @ (slopes_HH * alike_HH) @ coloured_DH.mT)[1][:, -rank:]
        truncated = (eigenvector_DD / root_D) @ (left_DR @ (left_DR.mT @ coloured_DH))
        bias = None if linear.b is None else linear.b + (moments.mean @ (W - truncated)).to(linear.b.dtype)
        return Linear(truncated.to(linear.W.dtype), bias)

    slopes = _slopes(ffn, tokens)
    if ffn.gate is None:
        return replace(ffn, up=cut(ffn.up, slopes[0]))
    return replace(ffn, gate=cut(ffn.gate, slopes[0]), up=cut(ffn.up, slopes[1]))


def _slopes(ffn: FFN, tokens: Tokens) -> list[Tensor]:
    """E[a′_j a′_k] with a′_j = ∂a_j/∂h_j for the pre-activations h of each entering weight, (H, H) each."""
    entries = [ffn.up] if ffn.gate is None else [ffn.gate, ffn.up]
    totals = [linear.W.new_zeros(ffn.hidden_dim, ffn.hidden_dim, dtype=torch.float64) for linear in entries]
    some = tokens.where(torch.arange(min(len(tokens), _TOKENS_FOR_SLOPES), device=tokens.x_TD.device))
    for x, weight_T in some.parts():
        with torch.enable_grad():
            pre = [linear(x).detach().requires_grad_() for linear in entries]
            hidden = ffn.act(pre[0]) if ffn.gate is None else ffn.act(pre[0]) * pre[1]
            slopes = torch.autograd.grad(hidden.sum(), pre)
        for total, slope_TH in zip(totals, slopes, strict=True):
            total += (slope_TH.mT @ (slope_TH * weight_T.unsqueeze(1))).double()
    return [total / float(some.weight_T.sum()) for total in totals]


def _solved(network: FFN, ffn: FFN, tokens: Tokens, rank: int) -> Linear:
    """The last map of ``network``, solved so that its outputs come nearest to those of ``ffn`` on the tokens."""
    # Moments of the hidden layer beside the outputs: the blocks of their joint covariance are all that is needed.
    joint = Moments.over((torch.cat([network.hidden(x), ffn(x)], 1), weight_T) for x, weight_T in tokens.parts())
    width = network.hidden_dim
    covariance = joint.covariance(centred=ffn.has_bias)
    hidden_HH, hidden_output_HD = covariance[:width, :width], covariance[:width, width:]
    solved_HD = _regression(hidden_HH, hidden_output_HD, network.down.W.double(), joint.num)
    # the R directions in which the outputs vary most
    principal_DR = torch.linalg.eigh(solved_HD.mT @ hidden_HH @ solved_HD)[1][:, -rank:]
    solved_HD = (solved_HD @ principal_DR) @ principal_DR.mT
    bias = joint.mean[width:] - joint.mean[:width] @ solved_HD if ffn.has_bias else None
    dtype = network.down.W.dtype
    return Linear(solved_HD.to(dtype), None if bias is None else bias.to(dtype))


@dataclass(slots=True)
class Moments:
    """Weighted mean (n,) and second moments (n, n) of rows, in double precision.

    ``num`` is the number of equally heavy rows that would say as much, (Σ w)² / Σ w².
    """

    mean: Tensor
    second: Tensor
    num: float

    @classmethod
    def over(cls, parts: Iterable[tuple[Tensor, Tensor]]) -> Moments:
        total = square = weight = weight_squared = torch.zeros(())
        for row_Tn, weight_T in parts:
            weighed_Tn = row_Tn * weight_T.unsqueeze(1).to(row_Tn.dtype)
            total = total + weighed_Tn.sum(0).double()
            square = square + (row_Tn.mT @ weighed_Tn).double()  # exact enough: a few thousand rows at once
            weight = weight + weight_T.double().sum()
            weight_squared = weight_squared + weight_T.double().square().sum()
        return cls(total / weight, square / weight, float(weight.square() / weight_squared))

    def covariance(self, *, centred: bool) -> Tensor:
        """About the mean, or about zero: without biases nothing could take up what is done to the mean."""
        return self.second - torch.outer(self.mean, self.mean) if centred else self.second.clone()
