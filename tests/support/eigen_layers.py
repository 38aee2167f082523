"""EigenMoE with each of its options, as tests build it."""

import torch
from torch import nn

from ermoe.nn import EigenMoE

OPTIONS = [
    {},
    {"below_threshold": "prune"},
    {"capacity_factor": 0.8},
    {"score": "prototype"},
    {"score": "energy"},
    {"score": "logit"},
    {"experts": "dense"},
    {"gated": True, "act_layer": nn.SiLU},
    {"balance": "none", "shared_dim": 24},
]
IDS = [str(options) for options in OPTIONS]


def build(dim=16, **options):
    layer = EigenMoE(dim, **{"num_experts": 4, "generator": torch.Generator().manual_seed(0)} | options)
    generator = torch.Generator().manual_seed(1)
    x, context = (torch.randn(2, 12, dim, generator=generator) for _ in range(2))
    return layer, x, context
