"""The exponential mean of the weights."""

import pytest
import torch
from torch import nn

from ermoe.train import trainer
from ermoe.train.trainer import Average


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("mask", torch.full((2, 2), -torch.inf).triu(1), persistent=False)


def test_saved_buffers_are_averaged_and_constants_left_alone():
    model = Masked()
    average = Average(model, decay=0.5)
    with torch.no_grad():
        model.linear.weight.add_(1)
        model.mean.add_(1)
    before = model.linear.weight.clone()
    average.update()
    decay = 2 / 11  # the first updates count more
    with average.in_place():
        torch.testing.assert_close(model.mean, torch.full((2,), 1 - decay))
        torch.testing.assert_close(model.linear.weight, before - decay)
        assert model.mask.isneginf().sum() == 1
        assert not model.mask.isnan().any()
    assert torch.equal(model.linear.weight, before)


def test_own_weights_come_back_also_where_the_average_cannot_be_made_orthonormal(monkeypatch):
    model = Masked()
    average = Average(model, decay=0.5)
    with torch.no_grad():
        model.linear.weight.add_(1)
    before = model.linear.weight.clone()

    def fail(model, report):
        raise RuntimeError("no convergence")

    monkeypatch.setattr(trainer, "retract", fail)
    with pytest.raises(RuntimeError, match="no convergence"), average.in_place():
        pass
    assert torch.equal(model.linear.weight, before)
