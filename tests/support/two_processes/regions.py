"""The loss of region experts under FSDP, against one process."""

import torch
from torch import nn

from ermoe.brain.regions import NUM_REGIONS, _recognition_loss
from ermoe.nn import EigenMoE
from ermoe.nn.parallel import parallelise
from ermoe.nn.sharding import whole


def recognition(group):
    """Scores are asked for after a pass, when a process keeps a part of the bases and of ψ."""
    generator = torch.Generator().manual_seed(0)
    x_GSD = torch.randn(NUM_REGIONS, 5, 16, generator=generator, dtype=torch.float64)
    found = []
    for how in (None, "fsdp"):
        torch.manual_seed(0)
        layer = EigenMoE(16, num_experts=6, score="prototype").double()
        if how is not None:
            parallelise(nn.Sequential(layer), how, group.num)
        mask_GS = torch.ones(x_GSD.shape[:2], dtype=torch.bool)
        loss = _recognition_loss(layer, x_GSD, None, mask_GS, torch.arange(NUM_REGIONS))
        loss.backward()
        found.append([loss.detach(), whole(layer.score.psi.grad), whole(layer.experts.token_basis.grad)])
    plain, shared = found
    for expected, value in zip(plain, shared, strict=True):
        torch.testing.assert_close(value, expected)
