"""A small model whose routing tests record, and what they do with it."""

import pytest
import torch
from torch import nn

import ermoe
from ermoe.nn import EigenMoE


class Tower(nn.Module):
    """Two MoE layers that differ in what their records hold: one drops pairs, the other prunes them."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        shape = {"num_experts": 4, "generator": generator}
        self.crowded = EigenMoE(16, 24, capacity_factor=1.0, **shape)
        self.pruned = EigenMoE(16, 24, score="energy", below_threshold="prune", threshold=0.7, **shape)

    def forward(self, x, mask=None):
        x = x + self.crowded(x, x.roll(1, 1), mask)
        return x + self.pruned(x, mask=mask)


def batches(number=3, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(4, 6, 16, generator=generator),
            torch.rand(4, 6, generator=generator) > 0.2,
            torch.randint(0, 3, (4,), generator=generator),
        )
        for _ in range(number)
    ]


def record(model, data, **options):
    with torch.no_grad(), ermoe.record_routing(model, classes=3, **options) as routing:
        for x, mask, label in data:
            routing.labels(label)
            model(x, mask)
    return routing


def assert_same(found, expected, tolerance=1e-6):
    assert found.keys() == expected.keys()
    for layer in expected:
        assert found[layer] == pytest.approx(expected[layer], rel=tolerance, abs=tolerance, nan_ok=True), layer
