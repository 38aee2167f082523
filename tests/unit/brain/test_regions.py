"""Forced routing, prototypes and the region probe beside slow loops; and a warm start that names decide."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from ermoe.analysis.recorder import record_routing
from ermoe.brain.ages import AgeBins
from ermoe.brain.batches import ScanSet, every_scan
from ermoe.brain.estimation import Lesson
from ermoe.brain.recipes import recipe
from ermoe.brain.regions import (
    forced,
    point_prototypes,
    probe_regions,
    tissue_score_correlation,
)
from ermoe.errors import UserError
from ermoe.models.upcycle import upcycle
from ermoe.models.vit3d import ViT3D
from ermoe.nn import moe_layers
from ermoe.nn.scores import cosine
from ermoe.train.loop import train
from ermoe.train.settings import Training
from support.tiny_brains import BallCache, people

HEAD = AgeBins(35, 95, 5.0, sigma=5.0)


def network(seed=0, **sparsity):
    torch.manual_seed(seed)
    dense = ViT3D(
        (16, 16, 16), patch_size=4, in_chans=2, num_classes=HEAD.num_outputs, embed_dim=32, depth=2, num_heads=2,
        mlp_ratio=2.0, global_pool="avg",
    )  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    options = {"num_experts": 5, "route_rank": 8, "score": "prototype", "blocks": "all", **sparsity}
    return upcycle(dense, init="random", inplace=True, generator=generator, **options)


def regions(num=4, **options):
    return ScanSet(BallCache(), people(num), "contrast", regions=True, **options)


def test_isolated_volumes_hold_one_tissue_each():
    batch = regions(2).read(np.arange(6))
    assert batch.region_B.tolist() == [0, 1, 2, 0, 1, 2]
    fluid, white = batch.input_BCXYZ.unbind(1)
    assert white[0].sum() > 10 * fluid[0].sum()
    assert fluid[2].sum() > 10 * white[2].sum()
    assert not batch.input_BCXYZ[:, :, ~batch.mask_BXYZ.any(0)].any()


def test_swapped_names_show_another_tissue_under_the_same_number():
    plain, swapped = regions(1).read(np.arange(3)), regions(1, swapped=(2, 0, 1)).read(np.arange(3))
    assert swapped.region_B.tolist() == [0, 1, 2]
    torch.testing.assert_close(swapped.input_BCXYZ, plain.input_BCXYZ[[2, 0, 1]])


def test_forced_routing_sends_every_token_to_its_volumes_expert():
    model, batch = network(), regions(1).read(np.arange(3))
    names = set(model.state_dict())
    with forced(model, batch.region_B), record_routing(model) as routing:
        assert set(model.state_dict()) == names
        model(batch.input_BCXYZ, batch.mask_BXYZ)
    real = [1 + len(set(map(tuple, (np.argwhere(mask.numpy()) // 4).tolist()))) for mask in batch.mask_BXYZ]
    for tally in routing.tallies.values():
        assert tally.totals.count_E.tolist() == [*real, 0, 0]
    assert all(layer.forced_G is None and not layer.observers for layer in moe_layers(model).values())


def test_forced_routing_uses_that_expert_alone():
    model, batch = network(), regions(1).read(np.array([1]))
    with forced(model, batch.region_B):
        before = model(batch.input_BCXYZ, batch.mask_BXYZ)
        for layer in moe_layers(model).values():
            with torch.no_grad():
                layer.experts.up.s[[0, 2, 3, 4]] = 9.0
        after = model(batch.input_BCXYZ, batch.mask_BXYZ)
    torch.testing.assert_close(after, before)


def test_only_ermoe_layers_can_be_forced():
    dense = ViT3D((8, 8, 8), patch_size=4, embed_dim=16, depth=1, num_heads=2)
    model = upcycle(dense, router="v-moe", blocks="all", num_experts=4)
    with pytest.raises(UserError, match="can be forced"), forced(model, torch.zeros(1, dtype=torch.long)):
        pass


def test_prototypes_are_mean_directions():
    model, volumes = network(), regions(2)
    layer = moe_layers(model)["blocks.1.mlp"]
    free = layer.router.score.psi[3:].detach().clone()
    entering = []
    layer.register_forward_pre_hook(lambda module, args: entering.append(args[0].detach()))
    point_prototypes(model, every_scan(volumes))
    batch = volumes.read(np.arange(6))
    with torch.no_grad(), forced(model, batch.region_B):
        model(batch.input_BCXYZ, batch.mask_BXYZ)
    x = entering[-1]
    for region in range(3):
        total = torch.zeros(8)
        for volume in range(6):
            if int(batch.region_B[volume]) != region:
                continue
            cubes = batch.mask_BXYZ[volume].view(4, 4, 4, 4, 4, 4).permute(0, 2, 4, 1, 3, 5).flatten(0, 2).flatten(1)
            for token, cube in zip(x[volume, 1:], cubes, strict=True):
                if cube.any():
                    along = layer.experts.up.U[region, :, :8].T @ token
                    total += (along / along.norm()).detach()
        torch.testing.assert_close(layer.router.score.psi[region], total / total.norm(), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(layer.router.score.psi[3:], free)


def test_the_probe_is_the_mean_plain_score_of_real_cubes():
    model, volumes = network(), regions(2)
    layer = moe_layers(model)["blocks.1.mlp"]
    entering = []
    layer.register_forward_pre_hook(lambda module, args: entering.append(args[0].detach()))
    with torch.no_grad():
        layer.router.balance.offset_E += torch.tensor([9.0, 0, 0, 0, 0])  # plays no part
    probe = probe_regions(model.eval(), every_scan(volumes))
    batch = volumes.read(np.arange(6))
    score = cosine(torch.einsum("bnd,edr->bner", entering[-1], layer.experts.up.U[:, :, :8]), layer.router.score.psi)
    for region in range(3):
        own = []
        for volume in np.flatnonzero(batch.region_B.numpy() == region):
            cubes = batch.mask_BXYZ[volume].view(4, 4, 4, 4, 4, 4).permute(0, 2, 4, 1, 3, 5).flatten(0, 2).flatten(1)
            own.append(score[volume, 1:][cubes.any(1)])
        expected = torch.cat(own).mean(0).detach()
        torch.testing.assert_close(probe.score_RE[region].float(), expected, atol=1e-5, rtol=1e-4)
    assert not layer.observers


def test_correlation_of_tissue_and_score_is_numpys():
    model = network().eval()
    volumes = ScanSet(BallCache(), people(3), "contrast")
    found = tissue_score_correlation(model, volumes, patch_size=4)
    routings = []
    layer = moe_layers(model)["blocks.1.mlp"]
    layer.observers.append(routings.append)
    shares, scores = [], []
    for index in range(3):
        batch = volumes.read(np.array([index]))
        with torch.no_grad():
            model(batch.input_BCXYZ, batch.mask_BXYZ)
        tissue = BallCache().volume(volumes.scans[index], with_tissue=True).tissue_3XYZ
        cubes = tissue.reshape(3, 4, 4, 4, 4, 4, 4).mean((2, 4, 6)).reshape(3, -1)
        real = routings[-1].mask_T[1:].numpy()
        shares.append(cubes[:, real])
        scores.append(routings[-1].score_TE[1:].numpy()[real].T)
    shares, scores = np.concatenate(shares, 1), np.concatenate(scores, 1)
    for region in range(3):
        for expert in range(5):
            expected = np.corrcoef(shares[region], scores[expert])[0, 1]
            assert float(found[region, expert]) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("swapped", [None, (1, 2, 0)])
def test_warm_start_sends_tissues_to_their_experts_and_follows_wrong_names(tmp_path, swapped):
    model, volumes = network(), regions(8, swapped=swapped)
    settings = Training(epochs=3, batch_size=8, base_lr=0.1, warmup_epochs=0.5, ema=0.5)
    train(
        replace(recipe("tiny"), training=settings, warm_start_epochs=3).for_regions(),
        Lesson(model, HEAD, volumes),
        tmp_path,
    )
    point_prototypes(model, every_scan(volumes))
    held_out = ScanSet(BallCache(), people(4, seed=9), "contrast", regions=True)
    first = probe_regions(model, every_scan(held_out)).first
    names = (0, 1, 2) if swapped is None else swapped
    assert [first[names[expert]] for expert in range(3)] == [0, 1, 2]
