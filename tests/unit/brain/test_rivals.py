"""Networks for volumes that ERMoE-ba is compared with."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

import ermoe
from ermoe.brain.ages import AgeBins
from ermoe.brain.rivals.sfcn import SFCN
from ermoe.brain.rivals.swin3d import Swin3D
from ermoe.errors import UserError

GOLDEN = Path(os.environ.get("ERMOE_DATA", "")) / "golden"


def swin():
    pytest.importorskip("monai")
    return Swin3D(num_classes=7, embed_dim=6, window_size=2, depths=(1,) * 4, num_heads=(1, 2, 2, 2))


def sfcn():
    return SFCN(num_classes=7, channels=(4, 4, 8, 8, 8, 8))


def test_sfcn_has_the_parameters_of_its_authors():
    assert sum(p.numel() for p in SFCN(num_classes=40).parameters()) == 2_952_936


@pytest.mark.skipif(not GOLDEN.is_dir(), reason="ERMOE_DATA names no folder with golden vectors")
@pytest.mark.parametrize(("name", "volume", "answer"), [("", "x64", "y_64_logprob"), ("_short", "x", "y_logprob")])
def test_sfcn_takes_the_weights_of_its_authors_by_their_names(name, volume, answer):
    golden = np.load(GOLDEN / f"sfcn{name}_io_A.npz")
    stored = np.load(GOLDEN / f"sfcn{name}_state_dict_A.npz")
    sizes = {"channels": golden["channel_number"].tolist()} if name else {}
    model = SFCN(num_classes=int(golden["output_dim"]), **sizes)
    model.load_state_dict({f"{'module.' * bool(name)}{key}": torch.from_numpy(stored[key]) for key in stored})
    with torch.no_grad():
        found = model.eval()(torch.from_numpy(golden[volume])).log_softmax(1)
    np.testing.assert_allclose(found.numpy(), golden[answer][:, :, 0, 0, 0], atol=1e-4)


@pytest.mark.skipif(not GOLDEN.is_dir(), reason="ERMOE_DATA names no folder with golden vectors")
def test_labels_that_are_cut_at_the_ends_are_those_of_the_authors():
    golden = np.load(GOLDEN / "num2vect_A.npz")
    age, (low, high) = torch.from_numpy(golden["ages_f64"]), map(float, golden["bin_range"])
    for sigma, label in zip(golden["sigmas_f64"], golden["soft_labels_f64"], strict=True):
        bins = AgeBins(low, high, labels="cut", sigma=float(sigma))
        np.testing.assert_allclose(bins.soft_labels(age).numpy(), label, atol=1e-9)
    np.testing.assert_allclose(bins.centres().numpy(), golden["bin_centers_f64"])
    loss = AgeBins(low, high, labels="cut").loss(torch.from_numpy(golden["kl_logprob"]), age.float())
    np.testing.assert_allclose(float(loss), golden["kl_loss"], rtol=1e-5)


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
