"""The penalty, the retraction, and what weight decay must leave alone."""

import pytest
import torch

from ermoe.nn import EigenMoE, no_weight_decay, orthogonality_loss, retract
from ermoe.nn.basis import orthogonality_penalty, orthonormality_error, polar_factor, random_basis


def drifted(size, seed=0, **options):
    layer = EigenMoE(24, 48, num_experts=3, generator=torch.Generator().manual_seed(seed), **options)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(size * torch.randn(parameter.shape, generator=generator))
    return layer


def test_random_bases_are_orthonormal_and_differ():
    basis = random_basis(4, 40, 16, generator=torch.Generator().manual_seed(0))
    assert orthonormality_error(basis).max() < 1e-5
    assert (basis[0] - basis[1]).abs().max() > 0.1


def test_the_loss_is_the_sum_of_equation_9_over_all_bases():
    layer = drifted(0.05, experts="eigen", gated=True)
    expected = 0.0
    for linear in (layer.experts.gate, layer.experts.up, layer.experts.down):
        for basis in (linear.U, linear.V):
            for e in range(3):
                expected += (basis[e].T @ basis[e] - torch.eye(basis.shape[2])).square().sum().item()
    assert orthogonality_loss(layer).item() == pytest.approx(expected, rel=1e-5)


def test_a_separate_routing_basis_is_kept_orthonormal_too():
    layer = drifted(0.05, experts="dense")
    assert orthogonality_loss(layer) > 0.01
    (report,) = retract(layer).values()
    assert report.error_before > 1e-2
    assert report.error_after < 1e-5
    assert orthogonality_loss(layer) < 1e-9


def test_the_loss_of_a_model_without_bases_is_zero():
    assert orthogonality_loss(torch.nn.Linear(3, 3)).item() == 0
    assert retract(torch.nn.Linear(3, 3)) == {}


def test_retraction_without_a_report_does_the_same():
    told, silent = drifted(1e-2), drifted(1e-2)
    assert retract(told)
    assert retract(silent, report=False) == {}
    for name, tensor in told.state_dict().items():
        torch.testing.assert_close(silent.state_dict()[name], tensor, atol=0, rtol=0)


def test_gradient_of_the_penalty():
    basis = torch.randn(2, 7, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(orthogonality_penalty, basis)


@pytest.mark.parametrize("size", [1e-6, 1e-3, 1e-2, 0.1])
@pytest.mark.parametrize("rank", [24, 10])
def test_retraction_restores_orthonormality_and_hardly_moves_the_weight(size, rank):
    layer = drifted(size, rank=rank)
    up = layer.experts.up
    before, old_U = up.matrices().detach().clone(), up.U.detach().clone()
    reports = retract(layer)
    assert set(reports) == {"experts.up", "experts.down"}
    report = reports["experts.up"]
    assert report.error_after < 1e-5
    assert orthonormality_error(up.U).max() < 1e-5
    assert orthonormality_error(up.V).max() < 1e-5
    change = ((up.matrices() - before).flatten(1).norm(dim=1) / before.flatten(1).norm(dim=1)).max().item()
    assert change <= report.error_before + 1e-6
    assert report.weight_change == pytest.approx(change, abs=2e-6)
    # every column stays nearest to itself: routing columns keep their place
    assert torch.equal((old_U.mT @ up.U).argmax(-1), torch.arange(rank).expand(3, rank))


def test_the_polar_factor_is_nearer_than_any_other_orthonormal_basis():
    basis = (random_basis(1, 12, 5) + 0.1 * torch.randn(1, 12, 5)).double()
    nearest = polar_factor(basis)
    distance = (nearest - basis).norm()
    assert (torch.linalg.qr(basis)[0].abs() - basis.abs()).norm() > distance
    for _ in range(20):
        other = polar_factor(nearest + 0.01 * torch.randn_like(nearest))
        assert (other - basis).norm() > distance


def test_a_degenerate_basis_is_made_orthonormal_all_the_same():
    basis = random_basis(2, 10, 4)
    basis[0, :, 1] = basis[0, :, 0]
    assert orthonormality_error(polar_factor(basis)).max() < 1e-10


def test_what_weight_decay_must_not_touch():
    model = torch.nn.ModuleDict(
        {
            "eigen": EigenMoE(16, num_experts=2),
            "dense": EigenMoE(16, num_experts=2, experts="dense", score="prototype"),
            "logit": EigenMoE(16, num_experts=2, experts="dense", score="logit", bias=False),
        }
    )
    exempt = no_weight_decay(model)
    assert exempt == {
        *(f"eigen.experts.{linear}.{name}" for linear in ("up", "down") for name in ("U", "s", "V", "bias")),
        *(f"dense.experts.{linear}.bias" for linear in ("up", "down")),
        "dense.router.score.basis",
        "dense.router.score.psi",
    }
    assert exempt <= dict(model.named_parameters()).keys()
    assert no_weight_decay(EigenMoE(16, num_experts=2)) >= {"experts.up.U"}


@pytest.mark.parametrize("backward_within", [True, False])
def test_autocast_does_not_touch_the_penalty(backward_within):
    layer = drifted(0.0)
    with torch.autocast("cpu", torch.bfloat16):
        loss = orthogonality_loss(layer)
        if backward_within:
            loss.backward()
    if not backward_within:
        loss.backward()
    assert loss.dtype == torch.float32
    assert loss < 1e-9
    assert layer.experts.up.U.grad.abs().max() < 1e-5


def test_the_penalty_of_half_precision_bases_is_summed_in_single_precision():
    layer = drifted(0.05).bfloat16()
    loss = orthogonality_loss(layer)
    loss.backward()
    assert loss.dtype == torch.float32
    assert layer.experts.up.U.grad.dtype == torch.bfloat16
