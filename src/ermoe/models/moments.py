"""What a dense feed-forward network sees: means and covariances, accumulated over calibration batches.

Letters: T tokens, D model width, H hidden width, O output width of a weight, R rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from ermoe.errors import UserError
from ermoe.models.backbones import FFN
from ermoe.models.passes import run

_KEPT_TOKENS = 2048


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
    moments = {}
    with ExitStack() as hooks:
        for name, ffn in networks.items():
            moments[name] = Moments(ffn.dim, ffn.hidden_dim, centred=ffn.has_bias, device=ffn.up.W.device)
            hooks.callback(ffn.norm.register_forward_hook(_counter(moments[name], ffn)).remove)
        if run(model, batches) == 0:
            raise UserError("calibration= has no batches: pass a list or a data loader, not an exhausted iterator")
    return moments


def _counter(moments: Moments, ffn: FFN) -> Any:
    def count(norm: nn.Module, inputs: object, z: Tensor) -> None:
        moments.add(z.flatten(0, -2), ffn)

    return count
