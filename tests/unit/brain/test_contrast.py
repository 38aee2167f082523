"""Tissue contrast: found from intensities alone, whatever their scale."""

from typing import get_args

import pytest
import torch

from ermoe.brain.inputs import network_input, partial_volumes, tissue_means
from ermoe.brain.recipes import CHANNELS, InputKind, recipe, reduction
from ermoe.errors import UserError


def brain(seed=0, shares=(0.35, 0.5, 0.15), means=(1.0, 0.72, 0.3), noise=0.04, side=24):
    """A cube of voxels of three brightnesses, all inside the mask but for a shell."""
    generator = torch.Generator().manual_seed(seed)
    tissue = torch.multinomial(torch.tensor(shares), side**3, replacement=True, generator=generator)
    t1 = torch.tensor(means)[tissue] + noise * torch.randn(side**3, generator=generator)
    mask = torch.zeros(side, side, side, dtype=torch.bool)
    mask[2:-2, 2:-2, 2:-2] = True
    return t1.view(side, side, side), mask, tissue.view(side, side, side)


@pytest.mark.parametrize("shares", [(0.35, 0.5, 0.15), (0.3, 0.4, 0.3), (0.4, 0.52, 0.08)])
def test_means_of_three_tissues_are_found(shares):
    t1, mask, _ = brain(shares=shares)
    torch.testing.assert_close(tissue_means(t1, mask), torch.tensor([1.0, 0.72, 0.3]), atol=0.03, rtol=0)


def test_what_a_network_sees_does_not_depend_on_the_intensity_scale():
    t1, mask, _ = brain()
    for kind in ("contrast", "blocks"):
        plain, scaled = (network_input(kind, image, mask)[0] for image in (t1, 317.0 * t1 - 5.0))
        torch.testing.assert_close(scaled, plain, atol=2e-3, rtol=0)


def test_shares_sum_to_one_inside_the_mask_and_are_zero_outside():
    t1, mask, tissue = brain()
    share = partial_volumes(t1, mask, tissue_means(t1, mask))
    torch.testing.assert_close(share.sum(0), mask.float())
    assert share.min() >= 0
    assert float((share.argmax(0) == tissue)[mask].float().mean()) > 0.95


def test_outside_of_the_mask_nothing_counts():
    t1, mask, _ = brain()
    other = torch.where(mask, t1, 1e4)
    for kind in get_args(InputKind):
        torch.testing.assert_close(network_input(kind, other, mask), network_input(kind, t1, mask))


def test_blocks_are_mean_shares_of_cubes_beside_those_of_the_brain():
    t1, mask, _ = brain()
    share = partial_volumes(t1, mask, tissue_means(t1, mask))
    seen, coarse = network_input("blocks", t1, mask)
    typical = torch.tensor([0.35, 0.45, 0.20])
    for x, y, z in [(0, 0, 0), (2, 3, 1), (5, 5, 5)]:
        cube = share[:, 4 * x : 4 * x + 4, 4 * y : 4 * y + 4, 4 * z : 4 * z + 4].mean((1, 2, 3))
        torch.testing.assert_close(seen[:3, x, y, z], ((cube - typical) / 0.3).flip(0))  # csf first
        whole = share.sum((1, 2, 3)) / mask.sum()
        torch.testing.assert_close(seen[3:, x, y, z], ((whole - typical) / 0.03).clamp(-4, 4).flip(0))
    assert coarse.shape == (6, 6, 6)


def test_what_is_isolated_tells_nothing_of_the_rest():
    t1, mask, tissue = brain()
    only = tissue == 0  # white matter
    seen, coarse = network_input("blocks", t1, mask, only)
    assert not seen[3:].any()
    assert seen[2][coarse].mean() > seen[0][coarse].mean()
    contrast, kept = network_input("contrast", t1, mask, only)
    assert torch.equal(kept, mask & only)
    assert not contrast[:, ~kept].any()


def test_shapes_and_refusals():
    t1, mask, _ = brain()
    for kind in get_args(InputKind):
        side = 24 // reduction(kind)
        seen, kept = network_input(kind, t1, mask)
        assert seen.shape == (CHANNELS[kind], side, side, side)
        assert kept.shape == (side, side, side)
    with pytest.raises(UserError, match="all equal"):
        tissue_means(torch.ones_like(t1), mask)
    with pytest.raises(UserError, match="too small"):
        tissue_means(t1, torch.zeros_like(mask))
    with pytest.raises(UserError, match="input='rgb'"):
        recipe("tiny", input="rgb")
