"""Every router of the registry, with its variants, as tests build them."""

from dataclasses import replace

import torch

from ermoe.nn.registry import LAYERS, build_layer

DIM, HIDDEN, EXPERTS = 16, 24, 4

VARIANTS = {
    "eigen": [{}, {"experts": "dense"}, {"score": "logit"}, {"balance": "none"}, {"balance": "mean", "shared_dim": 20}],
    "loss-free": [{}, {"score": "softmax", "normalise": True}],
    "cosine": [{"proj_dim": 8}, {"proj_dim": 8, "top_k": 1, "gshard_weight": 0.0}],
    "emoe": [{"route_rank": 8}, {"top_k": 1, "normalise": False, "temperature": 0.1}],
    "v-moe": [{"group_size": 2}, {"capacity_factor": None}, {"capacity_factor": 0.5, "batch_priority": "always"}],
    "expert-choice": [{}, {"capacity_factor": 1.0, "capacity_multiple": 4, "shared_dim": 20}],
    "soft": [{"slots_per_expert": 3}, {"num_tokens": 12, "noise_std": 0.1, "shared_dim": 20}],
    "base": [{}],
    "clip-moe": [{}],
    "logit": [{}, {"experts": "eigen", "gated": True}],
}
assert set(VARIANTS) == set(LAYERS), "a router without a test"
CASES = [(name, options) for name, variants in VARIANTS.items() for options in variants]
IDS = [f"{name}-{options}" for name, options in CASES]

# Of these, a token's experts depend on nothing but the token (and its context) at inference.
PER_TOKEN = {"eigen", "loss-free", "cosine", "emoe", "base", "clip-moe", "logit"}


def is_per_token(name, options):
    return name in PER_TOKEN or (name == "v-moe" and options.get("capacity_factor", 1.05) is None)


def build(name, options=None, *, seed=0, **more):
    generator = torch.Generator().manual_seed(seed)
    options = {"num_experts": EXPERTS, "generator": generator} | (options or {}) | more
    return build_layer(name, DIM, HIDDEN, **options)


def inputs(batch=4, tokens=12, *, seed=1, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(batch, tokens, DIM, generator=generator, dtype=dtype) for _ in range(2))


def without_noise(layer):
    for module in layer.modules():
        if hasattr(module, "settings") and hasattr(module.settings, "noise_std"):
            module.settings = replace(module.settings, noise_std=0.0)
    return layer
