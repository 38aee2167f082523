"""Age heads: bins beside slow loops, and what they refuse."""

import json
import math

import pytest
import torch

from ermoe.brain.ages import AgeBins, AgeRegression, fit_temperature, stored_head
from ermoe.errors import UserError
from ermoe.files import to_json


def slow_soft_label(age, low, high, step, sigma):
    """The mass of a normal distribution in every bin, by the error function, one bin at a time."""
    mass = []
    for number in range(math.ceil((high - low) / step)):
        left, right = low + number * step, low + (number + 1) * step
        below = [0.5 * (1 + math.erf((edge - age) / (sigma * math.sqrt(2)))) for edge in (left, right)]
        mass.append(below[1] - below[0])
    return [m / sum(mass) for m in mass]


@pytest.mark.parametrize(("age", "sigma", "step"), [(60.3, 1.0, 1.0), (41.0, 2.0, 2.0), (79.9, 5.0, 0.5)])
def test_soft_labels_are_normal_masses(age, sigma, step):
    bins = AgeBins(40, 80, step, sigma=sigma)
    expected = torch.tensor(slow_soft_label(age, 40, 80, step, sigma))
    torch.testing.assert_close(bins.soft_labels(torch.tensor([age]))[0], expected, atol=1e-5, rtol=1e-4)


def test_an_age_beyond_the_bins_is_their_end_and_never_nan():
    target = AgeBins(40, 80).soft_labels(torch.tensor([0.0, 200.0]))
    assert target.isfinite().all()
    assert target.argmax(1).tolist() == [0, 39]


def test_loss_is_least_where_the_logits_are_the_soft_label():
    bins = AgeBins(40, 80, sigma=2.0)
    age = torch.tensor([55.5, 61.2])
    perfect = bins.soft_labels(age).clamp_min(1e-30).log()
    assert float(bins.loss(perfect, age)) < 1e-5
    assert float(bins.loss(torch.randn(2, 40, generator=torch.Generator().manual_seed(0)), age)) > 0.1
    torch.testing.assert_close(bins.age(perfect), age, atol=1e-3, rtol=0)


def test_hard_labels_plus_l1():
    bins = AgeBins(40, 80, labels="hard", l1=0.5)
    logits, age = torch.zeros(1, 40), torch.tensor([50.0])
    assert float(bins.loss(logits, age)) == pytest.approx(math.log(40) + 0.5 * 10.0, rel=1e-5)
    assert bins.bin_of(torch.tensor([40.0, 79.99, 80.0, 10.0])).tolist() == [0, 39, 39, 0]


def test_the_temperature_flattens_the_expectation():
    sharp, flat = AgeBins(40, 80), AgeBins(40, 80, temperature=100.0)
    logits = torch.zeros(1, 40)
    logits[0, 35] = 8.0
    assert float(sharp.age(logits)[0]) > 74
    assert abs(float(flat.age(logits)[0]) - 60) < 0.2


def test_quantiles_against_drawing():
    bins = AgeBins(40, 80, 2.0)
    chance = torch.rand(3, 20, generator=torch.Generator().manual_seed(1))
    chance /= chance.sum(1, keepdim=True)
    drawn_bin = torch.multinomial(chance, 200_000, replacement=True, generator=torch.Generator().manual_seed(2))
    drawn = 40 + 2 * (drawn_bin + torch.rand(drawn_bin.shape, generator=torch.Generator().manual_seed(3)))
    expected = torch.quantile(drawn, torch.tensor([0.05, 0.95]), dim=1).T
    torch.testing.assert_close(bins.quantiles(chance, [0.05, 0.95]), expected, atol=0.15, rtol=0)


def test_fitted_temperature_makes_intervals_as_wide_as_the_errors():
    bins = AgeBins(20, 100)
    generator = torch.Generator().manual_seed(0)
    age = 40 + 40 * torch.rand(400, generator=generator)
    predicted = age + 6 * torch.randn(400, generator=generator)
    logits = -0.5 * ((bins.centres() - predicted.unsqueeze(1)) / 1.5).square()  # four times too sure
    tau = fit_temperature(bins, logits, age)
    assert tau == pytest.approx(16, rel=0.2)
    low, high = bins.quantiles(bins.probability(logits, tau), [0.05, 0.95]).T
    assert 0.85 < float(((low <= age) & (age <= high)).float().mean()) < 0.95


def test_without_a_scan_a_head_answers_with_the_usual_age():
    age_N = torch.tensor([30.0, 60.0, 62.0, 64.0, 70.0])
    bins, regression = AgeBins(15, 95, sigma=4.0), AgeRegression(mean=50.0, scale=12.0)
    assert float(bins.age(bins.prior(age_N).unsqueeze(0))) == pytest.approx(62.0, abs=0.7)  # bins end at 95
    assert bins.prior(torch.tensor([40.0, 40.0])).isfinite().all()
    assert float(regression.age(regression.prior(age_N).unsqueeze(0))) == pytest.approx(62.0)


def test_regression_is_the_absolute_error():
    head = AgeRegression(mean=60.0, scale=10.0)
    output, age = torch.tensor([[0.5], [-1.0]]), torch.tensor([60.0, 60.0])
    assert head.age(output).tolist() == [65.0, 50.0]
    assert float(head.loss(output, age)) == pytest.approx(7.5 / 10)


@pytest.mark.parametrize("head", [AgeBins(20, 90, 2.0, "hard", 3.0, 0.1, 1.5), AgeRegression(50.0, 12.0)])
def test_heads_survive_json(head):
    assert stored_head(json.loads(json.dumps(to_json(head))), where="brain_age.json") == head


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"low": 80, "high": 40}, "low < high"),
        ({"low": 40, "high": 80, "labels": "firm"}, "labels='firm'"),
        ({"low": 40, "high": 80, "sigma": 0}, "sigma > 0"),
    ],
)
def test_nonsense_is_refused(arguments, named):
    with pytest.raises(UserError, match=named):
        AgeBins(**arguments)
