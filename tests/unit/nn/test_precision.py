"""Numbers wider than a device knows are computed on the CPU."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ermoe.nn import EigenMoE, basis, orthogonality, retract
from ermoe.nn.basis import orthonormality_error, random_basis
from ermoe.nn.capacity import places_per_group
from ermoe.nn.precision import double, widest


@pytest.fixture
def apple():
    """An Apple GPU that is not there: tensors with a shape and a device, and no data."""
    with FakeTensorMode():
        yield torch.device("mps")


def test_float64_is_where_it_can_be(apple):
    assert widest(apple) == torch.float32
    assert widest(torch.device("cpu")) == torch.float64
    wide = double(torch.empty(2, device=apple))
    assert (wide.device.type, wide.dtype) == ("cpu", torch.float64)
    assert double(torch.empty(2, device="cuda")).device.type == "cuda"


def test_bases_are_made_and_judged_on_the_cpu(apple):
    assert orthonormality_error(torch.empty(2, 6, 3, device=apple)).device.type == "cpu"
    with apple:
        made = random_basis(2, 6, 3)
    assert (made.device.type, made.dtype) == ("mps", torch.float32)


def test_places_are_counted_exactly_and_returned_to_the_device(apple):
    assert places_per_group(torch.ones(2, 5, dtype=torch.bool, device=apple), 2, 4, 1.05).device.type == "mps"


def test_retraction_needs_no_float64_of_the_device(monkeypatch):
    def refuse(x):
        raise TypeError("the device has no float64")

    monkeypatch.setattr(torch.Tensor, "double", refuse)
    for module in (basis, orthogonality):
        monkeypatch.setattr(module, "double", lambda x: x.cpu().to(torch.float64))
    assert retract(EigenMoE(16, num_experts=2))
