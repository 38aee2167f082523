"""Networks for volumes that ERMoE-ba is compared with."""

import pytest
import torch

import ermoe
from ermoe.brain.rivals.sfcn import SFCN
from ermoe.brain.rivals.swin3d import Swin3D
from ermoe.errors import UserError


def swin():
    pytest.importorskip("monai")
    return Swin3D(num_classes=7, embed_dim=6, window_size=2, depths=(1,) * 4, num_heads=(1, 2, 2, 2))


def sfcn():
    return SFCN(num_classes=7, channels=(4, 4, 8, 8, 8, 8))


def test_sfcn_has_the_parameters_of_its_authors():
    assert sum(p.numel() for p in SFCN(num_classes=40).parameters()) == 2_952_936


def test_sfcn_refuses_a_volume_that_would_vanish():
    with pytest.raises(UserError, match="needs 32"):
        sfcn()(torch.zeros(1, 1, 32, 16, 32))


@pytest.mark.parametrize("build", [sfcn, swin])
def test_a_network_is_saved_and_loaded(build, tmp_path):
    model = build().eval()
    volume = torch.randn(2, 1, 32, 32, 32, generator=torch.Generator().manual_seed(0))
    ermoe.save(model, tmp_path)
    with torch.no_grad():
        expected = model(volume)
        assert expected.shape == (2, 7)
        torch.testing.assert_close(ermoe.load(tmp_path).eval()(volume), expected)


@pytest.mark.parametrize("build", [sfcn, swin])
def test_a_network_without_blocks_cannot_be_made_sparse(build):
    with pytest.raises(UserError, match="0 blocks"):
        ermoe.upcycle(build())
