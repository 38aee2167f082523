"""Measures against cases computed by hand, their limits, and loops on random inputs."""

import math

import pytest
import torch

from ermoe.analysis import measures
from ermoe.nn.basis import random_basis
from support import slow_measures as slow


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


def test_load_cv2_by_hand():
    # mean 2, deviations -1, -1, 2, 0: variance 6/4, over 4
    assert measures.load_cv2(torch.tensor([1, 1, 4, 2])).item() == pytest.approx(0.375)


@pytest.mark.parametrize("num_experts", [1, 2, 8, 64])
def test_load_cv2_runs_from_zero_to_the_number_of_experts_minus_one(num_experts):
    equal, all_in_one = torch.full((num_experts,), 7), torch.eye(num_experts)[0]
    assert measures.load_cv2(equal).item() == 0
    assert measures.load_cv2(all_in_one).item() == pytest.approx(num_experts - 1)


def test_load_cv2_does_not_depend_on_the_unit(generator):
    load = torch.rand(8, generator=generator)
    assert measures.load_cv2(1000 * load).item() == pytest.approx(measures.load_cv2(load).item())


def test_loads_of_nothing_are_not_equal_but_undefined():
    assert math.isnan(measures.load_cv2(torch.zeros(4)))
    assert math.isnan(measures.max_load(torch.zeros(4)))


def test_load_cv2_is_exact_where_float32_would_not_be():
    load = torch.tensor([2**25 + 1, 2**25 - 1])
    assert measures.load_cv2(load).item() == pytest.approx(2.0**-50, rel=1e-9)


def test_tail_mass_by_hand():
    # Of {0.9, 0.6, 0.5} above 0.4, all beyond the best one: 1.1 / 2.0; an expert exactly at the threshold is out.
    score = torch.tensor([[0.9, 0.6, 0.5, 0.4]])
    assert measures.tail_masses(score, 0.4)[0].tolist() == pytest.approx([0.55, 0.25, 0, 0])


def test_tail_mass_falls_with_k_and_vanishes_at_the_number_of_experts(generator):
    score = 2 * torch.rand(50, 6, generator=generator) - 1
    tails = measures.tail_masses(score, 0.1).nan_to_num()
    assert (tails.diff(dim=1) <= 0).all()
    assert (tails[:, -1] == 0).all()


def test_tail_masses_hold_every_k_at_once(generator):
    score = 2 * torch.rand(30, 5, generator=generator, dtype=torch.float64) - 1
    tails = measures.tail_masses(score, 0.2)
    for k in range(1, 6):
        expected = torch.tensor([slow.tail_mass(row, 0.2, k) for row in score.tolist()], dtype=torch.float64)
        torch.testing.assert_close(tails[:, k - 1], expected, equal_nan=True)


def test_tail_mass_refuses_a_threshold_below_which_weights_would_be_negative():
    with pytest.raises(ValueError, match="at least 0"):
        measures.tail_masses(torch.zeros(1, 2), -0.5)


@pytest.mark.parametrize("top_k", [1, 2, 5])
@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.95])
def test_token_measures_equal_loops(generator, threshold, top_k):
    score = 2 * torch.rand(40, 5, generator=generator, dtype=torch.float64) - 1
    rows = score.tolist()
    expected = [slow.tail_mass(row, threshold, top_k) for row in rows]
    tail = measures.tail_masses(score, threshold)[:, top_k - 1]
    torch.testing.assert_close(tail, torch.tensor(expected, dtype=torch.float64), equal_nan=True)
    assert measures.margin(score).tolist() == pytest.approx([slow.margin(row) for row in rows])
    assert measures.spread(score).tolist() == pytest.approx([max(row) - min(row) for row in rows])


def test_margin_of_a_single_expert_is_undefined():
    assert measures.margin(torch.rand(3, 1)).isnan().all()
    assert (measures.spread(torch.rand(3, 1)) == 0).all()


def test_near_zero_has_the_bound_it_says():
    bound = measures.NEAR_ZERO_WEIGHT
    assert bound == 0.01
    weight = torch.tensor([0.0, bound - 1e-6, bound, 0.5], dtype=torch.float64)
    assert measures.near_zero(weight).tolist() == [True, True, False, False]


def test_changed_looks_at_sets():
    before = torch.tensor([[1, 1, 0], [1, 0, 1], [0, 0, 0], [1, 0, 0]], dtype=torch.bool)
    after = torch.tensor([[1, 1, 0], [1, 1, 0], [0, 0, 0], [1, 1, 0]], dtype=torch.bool)
    assert measures.changed(before, after).tolist() == [False, True, False, True]


def test_drop_rate_by_hand():
    assert measures.drop_rate(torch.tensor(3), torch.tensor(9)).item() == 0.25
    assert math.isnan(measures.drop_rate(torch.tensor(0), torch.tensor(0)))


def test_principal_angles_by_hand():
    angle = 0.3
    plane = torch.eye(4)[:, :2]
    turned = torch.stack([plane[:, 0], math.cos(angle) * plane[:, 1] + math.sin(angle) * torch.eye(4)[:, 2]], dim=1)
    cosines = measures.principal_cosines(torch.stack([plane, turned]))
    assert cosines[0, 1].tolist() == pytest.approx([1, math.cos(angle)])
    overlap = measures.subspace_overlap(torch.stack([plane, turned])).item()
    assert overlap == pytest.approx((1 + math.cos(angle) ** 2) / 2)


def test_overlap_equals_that_of_projectors_whatever_the_basis_of_a_subspace(generator):
    basis = random_basis(4, 10, 3, generator=generator).double()
    mixed = basis @ torch.randn(4, 3, 3, generator=generator, dtype=torch.float64)
    assert measures.subspace_overlap(basis).item() == pytest.approx(slow.overlap(basis))
    assert measures.subspace_overlap(mixed).item() == pytest.approx(slow.overlap(basis))


def test_overlap_of_orthogonal_equal_and_random_subspaces(generator):
    shared_out = torch.eye(12).reshape(12, 3, 4).transpose(0, 1)
    assert measures.subspace_overlap(shared_out).item() == pytest.approx(0, abs=1e-12)
    assert measures.subspace_overlap(shared_out[:1].expand(5, -1, -1)).item() == pytest.approx(1)
    assert measures.subspace_overlap(random_basis(24, 64, 8, generator=generator)).item() == pytest.approx(
        8 / 64, rel=0.05
    )
    assert math.isnan(measures.subspace_overlap(shared_out[:1]))


def test_class_information_by_hand():
    # One class uses expert 0 alone, the other both equally: H(E) = 0.8113, H(E | C) = 0.5
    count = torch.tensor([[4, 0], [2, 2]])
    assert measures.class_information(count).item() == pytest.approx(0.811278 - 0.5, abs=1e-6)


def test_class_information_equals_loops_and_its_limits(generator):
    count = torch.randint(0, 9, (5, 4), generator=generator)
    assert measures.class_information(count).item() == pytest.approx(slow.class_information(count.tolist()))
    assert measures.class_information(torch.eye(8)).item() == pytest.approx(3)
    assert measures.class_information(torch.outer(torch.arange(1, 4), torch.arange(1, 6))).item() < 1e-12
    assert math.isnan(measures.class_information(torch.zeros(3, 2)))
