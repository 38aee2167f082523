"""Experts that equal a dense feed-forward network, and bases that already route: eigen-upcycling.

W = U diag(s) Vᵀ is the singular value decomposition of a dense weight. Every expert gets the same factors with its
columns in another order, so every expert computes W; and since the first r columns of U route, expert e is given the
singular directions e, e + E, e + 2E, … first. The routing subspaces then share out the dense layer's own eigenbasis,
mutually orthogonal, each with strong and weak directions in equal measure.

Where the rank is cut, `Moments` of what the dense network sees say which directions matter.

Letters: E experts, I input and O output width of one weight, R rank, r routing rank, T tokens, D model width, H
hidden width.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ermoe.errors import UserError
from ermoe.models.backbones import FFN, Linear
from ermoe.models.passes import evaluating, run
from ermoe.nn import DenseLinear, EigenLinear, MixtureLayer, PrototypeScore

_SMALLEST_RATIO = 1e-4
_KEPT_TOKENS = 2048


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
    entry = ffn.up if ffn.gate is None else ffn.gate
    num_directions = min(entry.W.shape) if experts.token_basis is None else experts.token_basis.shape[2]
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
def fill_from_dense(layer: MixtureLayer, ffn: FFN, moments: Moments | None = None) -> None:
    """Writes ``ffn`` into every expert of ``layer``, and its singular directions into the basis that routes.

    Weights whose rank is below full are truncated: in the metric of the activations if ``moments`` are known.
    """
    # Only what tokens enter through routes, and only its columns are interleaved.
    down = layer.experts.down
    for stacked, dense in zip(layer.experts.linears(), ffn.linears(), strict=True):
        if isinstance(stacked, DenseLinear):
            stacked.W.copy_(dense.W)
            _copy_bias(stacked, dense.b)
        else:
            truncated = _truncate(dense, stacked.s.shape[1], moments, is_down=stacked is down)
            _fill_eigen(stacked, truncated, interleave=stacked is not down)
    if layer.score is not None and layer.score.basis is not None:
        _cut_basis(layer.score.basis, ffn.up if ffn.gate is None else ffn.gate)


def _fill_eigen(stacked: EigenLinear, dense: Linear, *, interleave: bool) -> None:
    num_experts, rank = stacked.s.shape
    U, s, V = svd(dense.W)
    order_ER = interleaved(num_experts, rank) if interleave else torch.arange(rank).expand(num_experts, -1)
    for expert, order_R in enumerate(order_ER.to(U.device)):
        stacked.U[expert].copy_(U[:, order_R])
        stacked.s[expert].copy_(s[order_R])
        stacked.V[expert].copy_(V[:, order_R])
    _copy_bias(stacked, dense.b)


def _copy_bias(stacked: DenseLinear | EigenLinear, bias: Tensor | None) -> None:
    if stacked.bias is not None:
        stacked.bias.copy_(torch.zeros_like(stacked.bias) if bias is None else bias)


def _cut_basis(basis_EDr: Tensor, entry: Linear) -> None:
    num_experts, _, route_rank = basis_EDr.shape
    U = svd(entry.W)[0]
    for expert, order in enumerate(interleaved(num_experts, U.shape[1]).to(U.device)):
        basis_EDr[expert].copy_(U[:, order[:route_rank]])


def _truncate(dense: Linear, rank: int, moments: Moments | None, *, is_down: bool) -> Linear:
    """The best map of the given rank: unchanged if ``rank`` is full, or if nothing is known of its inputs.

    Without data nothing need be done here: the singular value decomposition that follows is cut, which is best for
    inputs without a preferred direction.
    """
    if moments is None or rank >= min(dense.W.shape):
        return dense
    weight = dense.W.to(moments.covariance_y.dtype)
    principal_OR = moments.principal_outputs(weight, rank, is_down=is_down)
    # Outputs are projected on the directions in which they vary most: Ŵ = W Q Qᵀ minimises E‖(x − μ)(W − Ŵ)‖².
    truncated = (weight @ principal_OR) @ principal_OR.mT
    if dense.b is None:
        return Linear(truncated, None)
    mean_I = moments.mean_h if is_down else moments.mean_x
    return Linear(truncated, dense.b.to(weight.dtype) + mean_I @ (weight - truncated))  # what the mean loses, b gets


@torch.no_grad()
def output_error(layer: MixtureLayer, ffn: FFN, moments: Moments | None = None) -> float | None:
    """‖f_e(x) − f(x)‖ / ‖f(x)‖ of the experts, which are all equal; None if their weights have full rank.

    On tokens kept from calibration, or on normalised random ones.
    """
    is_cut = any(
        isinstance(stacked, EigenLinear) and stacked.s.shape[1] < min(dense.W.shape)
        for stacked, dense in zip(layer.experts.linears(), ffn.linears(), strict=True)
    )
    if not is_cut:
        return None
    if moments is not None:
        x_TD = torch.cat(moments.kept)
    else:
        generator = torch.Generator().manual_seed(0)
        x_TD = ffn.norm(torch.randn(256, ffn.dim, generator=generator).to(ffn.up.W))
    count_E = torch.zeros(layer.experts.num_experts, dtype=torch.long, device=x_TD.device)
    count_E[0] = len(x_TD)
    y_TD = ffn(x_TD)
    with evaluating(layer):
        y_sparse_TD = layer.experts(x_TD, count_E)
    return float((y_sparse_TD - y_TD).norm() / y_TD.norm())


class Moments:
    """First and second moments of one network's inputs x and outputs y, and the mean of its hidden layer h.

    With ``centred=False`` second moments are taken about zero, which suits a network without biases: there, nothing
    could take up what a truncation does to the mean.
    """

    def __init__(self, dim: int, hidden_dim: int, *, centred: bool = True, device: torch.device | None = None) -> None:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=device)

        self.centred = centred
        self.num_tokens = 0
        self.kept: list[Tensor] = []
        self._sum_x, self._sum_y, self._sum_h = zeros(dim), zeros(dim), zeros(hidden_dim)
        self._square_x, self._square_y = zeros(dim, dim), zeros(dim, dim)

    def add(self, x_TD: Tensor, ffn: FFN) -> None:
        """Counts tokens in, and keeps the first few to measure errors on."""
        if self.num_tokens < _KEPT_TOKENS:
            self.kept.append(x_TD[: _KEPT_TOKENS - self.num_tokens].clone())
        self.num_tokens += len(x_TD)
        hidden_TH = ffn.hidden(x_TD)
        self._sum_h += hidden_TH.double().sum(0)
        y_TD = ffn.down(hidden_TH).double()
        x_TD = x_TD.double()
        self._sum_x += x_TD.sum(0)
        self._sum_y += y_TD.sum(0)
        self._square_x.addmm_(x_TD.mT, x_TD)
        self._square_y.addmm_(y_TD.mT, y_TD)

    @property
    def mean_x(self) -> Tensor:
        """Mean input, (D,)."""
        return self._sum_x / self.num_tokens

    @property
    def mean_h(self) -> Tensor:
        """Mean of the hidden layer, (H,)."""
        return self._sum_h / self.num_tokens

    @property
    def covariance_x(self) -> Tensor:
        """Covariance of inputs, (D, D)."""
        return self._covariance(self._square_x, self._sum_x)

    @property
    def covariance_y(self) -> Tensor:
        """Covariance of outputs, (D, D)."""
        return self._covariance(self._square_y, self._sum_y)

    def _covariance(self, square: Tensor, total: Tensor) -> Tensor:
        mean = total / self.num_tokens
        covariance = square / self.num_tokens
        return covariance - torch.outer(mean, mean) if self.centred else covariance

    def principal_outputs(self, weight_IO: Tensor, rank: int, *, is_down: bool) -> Tensor:
        """The ``rank`` orthonormal directions in which the outputs of a weight vary most, (O, R)."""
        if is_down:  # its outputs were seen
            principal_OO: Tensor = torch.linalg.eigh(self.covariance_y)[1].flip(-1)
            return principal_OO[:, :rank]
        # Outputs x W have covariance WᵀCW; its eigenvectors are the right singular vectors of √C W.
        eigenvalue, eigenvector = torch.linalg.eigh(self.covariance_x)
        root = eigenvalue.clamp_min(0).sqrt().unsqueeze(1) * eigenvector.mT
        right_OI: Tensor = torch.linalg.svd(root @ weight_IO, full_matrices=False)[2].mT
        return right_OI[:, :rank]


def collect(model: nn.Module, networks: dict[str, FFN], batches: Iterable[Any]) -> dict[str, Moments]:
    """Runs the dense model over ``batches`` and returns the moments of its ``networks``, by name."""
    moments = {
        name: Moments(ffn.dim, ffn.hidden_dim, centred=ffn.has_bias, device=ffn.up.W.device)
        for name, ffn in networks.items()
    }
    run(model, batches, {ffn.norm: _counter(moments[name], ffn) for name, ffn in networks.items()})
    return moments


def _counter(moments: Moments, ffn: FFN) -> Any:
    def count(norm: nn.Module, args: object, kwargs: object, z: Tensor) -> None:
        moments.add(z.flatten(0, -2), ffn)

    return count
