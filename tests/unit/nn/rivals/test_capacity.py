import pytest
import torch

from ermoe.nn import EigenMoE
from ermoe.nn.capacity import places, places_per_group, queue_positions, within_capacity
from support import slow_routers as slow


def proposals(groups, tokens, experts, top_k, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(experts, generator=generator)[:top_k] for _ in range(groups * tokens)]).view(
        groups, tokens, top_k
    )


@pytest.mark.parametrize(("groups", "tokens", "experts", "top_k"), [(1, 7, 3, 1), (3, 10, 5, 3), (2, 16, 2, 2)])
@pytest.mark.parametrize("prioritised", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_queues_against_a_loop(groups, tokens, experts, top_k, prioritised, masked):
    expert = proposals(groups, tokens, experts, top_k)
    generator = torch.Generator().manual_seed(1)
    kept = torch.rand(expert.shape, generator=generator) < 0.7 if masked else torch.ones_like(expert, dtype=torch.bool)
    # Few distinct values: priorities tie, and ties keep the order of tokens.
    priority = torch.randint(0, 3, (groups, tokens), generator=generator).float() if prioritised else None
    expected = slow.capacity_positions(expert, experts, kept, priority)
    positions = queue_positions(expert, experts, kept_GSK=kept if masked else None, priority_GS=priority)
    assert torch.equal(positions, expected)
    for capacity in (0, 1, 3, 100):
        inside = within_capacity(expert, experts, capacity, kept_GSK=kept if masked else None, priority_GS=priority)
        assert torch.equal(inside, (expected >= 0) & (expected < capacity))
    capacity_G = torch.arange(groups)
    inside = within_capacity(expert, experts, capacity_G, kept_GSK=kept, priority_GS=priority)
    assert torch.equal(inside, (expected >= 0) & (expected < capacity_G[:, None, None]))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((16, 2, 4, 1.0, 4), 8),
        ((16, 2, 4, 0.5, 4), 4),
        ((16, 1, 4, 0.5, 1), 2),
        ((1576, 2, 8, 1.05, 4), 416),
        ((10, 1, 4, 1.0, 1, "round"), 2),  # 2.5, half to even
        ((14, 1, 4, 1.0, 1, "round"), 4),  # 3.5, half to even
        ((1, 1, 8, 1.0, 1, "round"), 1),  # never none
    ],
)
def test_places(arguments, expected):
    assert places(*arguments) == expected
    num_tokens, *rest = arguments
    mask = torch.arange(num_tokens + 5)[None] < num_tokens
    if len(rest) == 4:
        assert places_per_group(mask, *rest).tolist() == [expected]


def test_padding_earns_eigen_moe_no_places():
    generator = torch.Generator().manual_seed(0)
    layer = EigenMoE(16, num_experts=4, score="logit", capacity_factor=0.5, generator=generator)
    x = torch.randn(1, 10, 16, generator=generator)
    padded = torch.cat([x, torch.zeros(1, 30, 16)], dim=1)
    mask = torch.arange(40)[None] < 10
    assert torch.equal(layer.route(padded, mask=mask).token_A, layer.route(x).token_A)
