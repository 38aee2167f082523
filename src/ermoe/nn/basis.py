"""Orthonormal bases: how they start, how far they have drifted, and how they are brought back.

A stack of bases is a tensor (E, n, R): for every expert, R orthonormal columns in a space of n dimensions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from ermoe.nn.precision import double, full_precision, widen, widest


def random_basis(num_experts: int, dim: int, rank: int, *, generator: torch.Generator | None = None) -> Tensor:
    """Independent, uniformly distributed orthonormal bases, (num_experts, dim, rank), in float32.

    >>> basis = random_basis(2, 6, 3, generator=torch.Generator().manual_seed(0))
    >>> torch.allclose(basis.mT @ basis, torch.eye(3), atol=1e-6)
    True
    """
    device = generator.device if generator is not None else torch.get_default_device()
    size = (num_experts, dim, rank)
    basis_EnR = double(torch.randn(size, generator=generator, device=device, dtype=widest(device)))
    # Cholesky-QR with a positive diagonal: Gaussian columns become uniformly distributed orthonormal ones. Matrix
    # products do the work, several times faster than Householder QR; the second pass undoes the rounding of the first,
    # which a nearly singular square draw can feel.
    for _ in range(2):
        triangle_ERR = torch.linalg.cholesky(basis_EnR.mT @ basis_EnR).mT
        basis_EnR = torch.linalg.solve_triangular(triangle_ERR, basis_EnR, upper=True, left=False)
    return basis_EnR.float().to(device)


def _gram_error(basis_EnR: Tensor) -> Tensor:
    """UᵀU − I for every expert, (E, R, R)."""
    gram_ERR = basis_EnR.mT @ basis_EnR
    gram_ERR.diagonal(dim1=-2, dim2=-1).sub_(1)
    return gram_ERR


def orthonormality_error(basis_EnR: Tensor) -> Tensor:
    """The spectral norm ‖UᵀU − I‖₂ of each expert's basis, (E,)."""
    eigenvalue_ER: Tensor = torch.linalg.eigvalsh(_gram_error(double(basis_EnR)))
    return eigenvalue_ER.abs().amax(-1)


class _OrthogonalityPenalty(torch.autograd.Function):
    """Σ_e ‖UᵀU − I‖²_F. Its gradient is 4U(UᵀU − I): one product where autograd would take two."""

    @staticmethod
    def forward(ctx: FunctionCtx, basis_EnR: Tensor) -> Tensor:
        error_ERR = _gram_error(basis_EnR)
        ctx.save_for_backward(basis_EnR, error_ERR)
        return error_ERR.square().sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        basis_EnR, error_ERR = ctx.saved_tensors
        with full_precision(basis_EnR):
            gradient: Tensor = basis_EnR @ (error_ERR * (4 * grad))
        return gradient


def orthogonality_penalty(basis_EnR: Tensor) -> Tensor:
    """Σ_e ‖UᵀU − I‖²_F of one stack of bases, a scalar in at least float32: half precision rounds what is penalised.

    >>> orthogonality_penalty(torch.eye(4)[None, :, :2]).item()
    0.0
    """
    with full_precision(basis_EnR):
        penalty: Tensor = _OrthogonalityPenalty.apply(widen(basis_EnR))
    return penalty


def polar_factor(basis_EnR: Tensor) -> Tensor:
    """The nearest orthonormal basis of each expert (Frobenius norm): U (UᵀU)^(−1/2), in float64.

    Columns keep their place and their meaning: no other orthonormal set is closer to them.
    """
    basis_EnR = double(basis_EnR)
    eigenvalue_ER, eigenvector_ERR = torch.linalg.eigh(basis_EnR.mT @ basis_EnR)
    if bool((eigenvalue_ER[:, 0] <= 1e-10 * eigenvalue_ER[:, -1]).any()):
        # Squaring the condition number in the Gram matrix would lose a nearly dependent column.
        left, _, right = torch.linalg.svd(basis_EnR, full_matrices=False)
        nearest_EnR: Tensor = left @ right
        return nearest_EnR
    inverse_root_ERR = (eigenvector_ERR * eigenvalue_ER.rsqrt().unsqueeze(-2)) @ eigenvector_ERR.mT
    nearest_EnR = basis_EnR @ inverse_root_ERR
    return nearest_EnR
