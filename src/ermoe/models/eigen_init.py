"""Experts that equal a dense feed-forward network, and bases that already route: eigen-upcycling.

W = U diag(s) Vᵀ is the singular value decomposition of a dense weight. Every expert gets the same factors with its
columns in another order, so every expert computes W; and since the first r columns of U route, expert e is given the
singular directions e, e + E, e + 2E, … first. The routing subspaces then share out the dense layer's own eigenbasis,
mutually orthogonal, each with strong and weak directions in equal measure.

Beside a shared expert, which is the dense network itself, the others may be small and differ from the start, for they
add nothing yet: their last weight is zero. They share out its hidden units in the same way, strong and weak ones.

Letters: E experts, I input and O output width of one weight, R rank, r routing rank, T tokens, D model width, H hidden
width, k hidden units of an expert.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ermoe.errors import UserError
from ermoe.models.passes import evaluating
from ermoe.nn import DenseLinear, EigenLinear, Experts, MixtureLayer, PrototypeScore
from ermoe.nn.basis import polar_factor
from ermoe.nn.ffn import FFN, Linear

_SMALLEST_RATIO = 1e-4
_TOKENS_TO_JUDGE = 2048


def interleaved(num_experts: int, rank: int) -> Tensor:
    """Which singular direction stands in which column of each expert, (E, R): e, e + E, … first, then e + 1, ….

    >>> interleaved(3, 6).tolist()
    [[0, 3, 1, 4, 2, 5], [1, 4, 2, 5, 0, 3], [2, 5, 0, 3, 1, 4]]
    """
    shares = [torch.arange(rank)[start::num_experts] for start in range(num_experts)]
    return torch.stack([torch.cat(shares[expert:] + shares[:expert]) for expert in range(num_experts)])


def refuse_equal_experts(layer: MixtureLayer, ffn: FFN) -> None:
    """Raises a UserError if `fill_from_dense` would give two experts the same routing columns, so the same scores."""
    score, experts = layer.score, layer.experts
    if score is None or score.route_rank is None or isinstance(score, PrototypeScore):  # each ψ is another
        return
    basis = experts.token_basis if layer.shared is None else None
    num_directions = min(ffn.entry.W.shape) if basis is None else basis.shape[2]
    num_distinct = num_directions if score.route_rank < num_directions else 1
    if experts.num_experts > num_distinct:
        raise UserError(
            f"num_experts={experts.num_experts}, route_rank={score.route_rank}: with {num_directions} singular "
            "directions to share out, some experts would route by the same ones and nothing would tell them apart; use "
            f"at most {num_directions} experts and a smaller route_rank, or init='random'"
        )


def svd(weight_IO: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """U (I, R), s (R,) falling, and V (O, R) with R = min(I, O), in float64.

    From the eigenvectors of the smaller Gram matrix, which takes a seventh of the time of a general decomposition.
    Squaring costs digits: the columns of the longer side deviate from orthonormality by 2e-16 (s₁ / s_R)². So
    a weight whose singular values span more than four orders of magnitude is decomposed the long way.

    >>> weight = torch.randn(8, 20)
    >>> U, s, V = svd(weight)
    >>> torch.allclose((U * s) @ V.mT, weight.double()), torch.allclose(V.mT @ V, torch.eye(8).double())
    (True, True)
    """
    wide = weight_IO.cpu() if weight_IO.device.type == "mps" else weight_IO  # Apple's GPU has no float64
    wide = wide.double()
    if wide.shape[0] > wide.shape[1]:
        V, s, U = svd(wide.mT)
        return U, s, V
    eigenvalue, U = torch.linalg.eigh(wide @ wide.mT)
    U, s = U.flip(-1), eigenvalue.flip(-1).clamp_min(0).sqrt()
    if float(s[-1]) <= _SMALLEST_RATIO * float(s[0]):
        U, s, Vh = torch.linalg.svd(wide, full_matrices=False)
        return U, s, Vh.mT
    return U, s, (wide.mT @ U) / s


@torch.no_grad()
def fill_from_dense(layer: MixtureLayer, ffn: FFN) -> None:
    """Writes ``ffn`` into every expert of ``layer``, and its singular directions into the basis that routes.

    Of a weight whose rank is above that of the experts, the largest singular values are kept.
    """
    # Only what tokens enter through routes, and only its columns are interleaved.
    down = layer.experts.down
    for stacked, dense in zip(layer.experts.linears(), ffn.linears(), strict=True):
        if isinstance(stacked, DenseLinear):
            stacked.W.copy_(dense.W)
            _copy_bias(stacked, dense.b)
        else:
            _fill_eigen(stacked, dense, interleave=stacked is not down)
    if layer.score is not None and layer.score.basis is not None:
        _cut_basis(layer.score.basis, ffn.entry)


def _fill_eigen(stacked: EigenLinear, dense: Linear, *, interleave: bool) -> None:
    num_experts, rank = stacked.s.shape
    U, s, V = svd(dense.W)
    order_ER = interleaved(num_experts, rank) if interleave else torch.arange(rank).expand(num_experts, -1)
    for expert, order_R in enumerate(order_ER.to(U.device)):
        stacked.U[expert].copy_(U[:, order_R])
        stacked.s[expert].copy_(s[order_R])
        stacked.V[expert].copy_(V[:, order_R])
    _copy_bias(stacked, dense.b)


@torch.no_grad()
def fill_beside_dense(layer: MixtureLayer, ffn: FFN) -> None:
    """Makes ``ffn`` the shared expert of ``layer``, and the others parts of it that add nothing yet.

    Expert e has the hidden units e, e + E, … in the order of what they may say, ‖W1_j‖ ‖W2_j‖, and looks at them
    through the singular directions e, e + E, …, of which the first r route.
    """
    experts, score = layer.experts, layer.score
    strength_H = ffn.entry.W.norm(dim=0) * ffn.down.W.norm(dim=1)
    share_Ek = interleaved(experts.num_experts, ffn.hidden_dim)[:, : experts.size[0]].to(strength_H.device)
    unit_Ek = strength_H.argsort(descending=True, stable=True)[share_Ek].sort(1).values
    for expert, unit_k in enumerate(unit_Ek):
        write_expert(experts, expert, ffn.with_units(unit_k))
    if isinstance(experts.entry, EigenLinear):
        _share_out_directions(experts.entry, ffn.entry, unit_Ek)
    if score is not None and score.basis is not None:
        _cut_basis(score.basis, ffn.entry)
    keep_dense(layer, ffn)


def _share_out_directions(entry: EigenLinear, dense: Linear, unit_Ek: Tensor) -> None:
    U, s, V = svd(dense.W)
    order_ER = interleaved(len(unit_Ek), len(s))[:, : entry.s.shape[1]].to(U.device)
    entry.U.copy_(U[:, order_ER].transpose(0, 1))
    entry.s.copy_(s[order_ER])
    # V, seen by k of its H units, is no longer orthonormal; the nearest basis is.
    seen_EkR = torch.stack([V[unit_k][:, order_R] for unit_k, order_R in zip(unit_Ek, order_ER, strict=True)])
    entry.V.copy_(polar_factor(seen_EkR))


@torch.no_grad()
def keep_dense(layer: MixtureLayer, ffn: FFN) -> None:
    """Makes ``ffn`` the shared expert of ``layer``, and silences the others: their last weight and bias are zero."""
    assert layer.shared is not None
    write_expert(layer.shared, 0, ffn)
    last = layer.experts.down
    silenced = last.s if isinstance(last, EigenLinear) else last.W
    for parameter in (silenced, last.bias):
        if parameter is not None:
            parameter.zero_()


def write_expert(experts: Experts, expert: int, network: FFN) -> None:
    """Makes one expert of a stack the given network, by its largest singular values where experts have a rank."""
    for stacked, linear in zip(experts.linears(), network.linears(), strict=True):
        if isinstance(stacked, EigenLinear):
            rank = stacked.s.shape[1]
            U, s, V = svd(linear.W)
            stacked.U[expert], stacked.s[expert], stacked.V[expert] = U[:, :rank], s[:rank], V[:, :rank]
        else:
            stacked.W[expert] = linear.W
        if stacked.bias is not None:
            stacked.bias[expert] = 0 if linear.b is None else linear.b


def _copy_bias(stacked: DenseLinear | EigenLinear, bias: Tensor | None) -> None:
    if stacked.bias is not None:
        stacked.bias.copy_(torch.zeros_like(stacked.bias) if bias is None else bias)


def _cut_basis(basis_EDr: Tensor, entry: Linear) -> None:
    num_experts, _, route_rank = basis_EDr.shape
    U = svd(entry.W)[0]
    for expert, order in enumerate(interleaved(num_experts, U.shape[1]).to(U.device)):
        basis_EDr[expert].copy_(U[:, order[:route_rank]])


def is_smaller(layer: MixtureLayer, ffn: FFN) -> bool:
    """Whether experts have fewer hidden units or a lower rank than the dense network."""
    width, rank = layer.experts.size
    return width < ffn.hidden_dim or (rank is not None and rank < min(ffn.up.W.shape))


@torch.no_grad()
def output_error(layer: MixtureLayer, ffn: FFN, x_TD: Tensor | None = None) -> float | None:
    """‖f_e(x) − f(x)‖ / ‖f(x)‖ of the experts, which are all equal; None if they are as large as the dense network.

    On the given tokens, or on normalised random ones.
    """
    if not is_smaller(layer, ffn):
        return None
    if x_TD is None:
        generator = torch.Generator().manual_seed(0)
        x_TD = ffn.norm(torch.randn(_TOKENS_TO_JUDGE, ffn.dim, generator=generator).to(ffn.up.W))
    x_TD = x_TD[:_TOKENS_TO_JUDGE]
    count_E = torch.zeros(layer.experts.num_experts, dtype=torch.long, device=x_TD.device)
    count_E[0] = len(x_TD)
    y_TD = ffn(x_TD)
    with evaluating(layer):
        y_sparse_TD = layer.experts(x_TD, count_E)
    return float((y_sparse_TD - y_TD).norm() / y_TD.norm())
