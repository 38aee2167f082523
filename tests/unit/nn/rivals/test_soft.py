import pytest
import torch
from torch.testing import assert_close

from support import slow_routers as slow
from support.routers import DIM, EXPERTS, build, inputs


def test_the_layer_against_a_loop():
    layer = build("soft", {"slots_per_expert": 2}, dtype=torch.float64)
    with torch.no_grad():
        layer.scale.fill_(3.7)
    x, _ = inputs(batch=2, tokens=5, dtype=torch.float64)

    def expert(e, rows):
        return slow.run_expert(layer.experts, e, rows)

    expected = torch.stack([slow.soft_moe(image, layer.phi, 3.7, expert) for image in x])
    assert_close(layer(x), expected)


def test_weights_are_convex_mixtures():
    layer = build("soft", {"slots_per_expert": 3})
    x, _ = inputs()
    dispatch, combine = layer.weights(x)
    assert_close(dispatch.sum(1), torch.ones(4, 3 * EXPERTS))
    assert_close(combine.sum(2), torch.ones(4, 12))
    mask = torch.arange(12).expand(4, -1) < 7
    dispatch, combine = layer.weights(x, mask)
    assert_close(dispatch.sum(1), torch.ones(4, 3 * EXPERTS))
    assert not dispatch[:, 7:].any()
    assert not combine[:, 7:].any()


def test_slots_follow_the_number_of_tokens():
    assert build("soft").slots_per_expert == 1
    assert build("soft", {"num_tokens": 197}, num_experts=8).slots_per_expert == 25
    assert build("soft", {"num_tokens": 20}, num_experts=8).slots_per_expert == 2  # 2.5, half to even
    assert build("soft", {"num_tokens": 12, "capacity_factor": 2.0}).slots_per_expert == 6


def test_the_summary_names_the_expert_with_the_largest_share():
    layer = build("soft", {"slots_per_expert": 3}).eval()
    x, _ = inputs()
    share = layer.weights(x)[1].view(48, EXPERTS, 3).sum(-1)
    routing = layer.route(x)
    assert torch.equal(routing.expert_TK[:, 0], share.argmax(-1))
    assert_close(routing.score_TE, share)
    assert routing.count_E.tolist() == share.argmax(-1).bincount(minlength=EXPERTS).tolist()


def test_noise_only_in_training():
    layer = build("soft", {"noise_std": 1.0})
    x, _ = inputs()
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))


def test_a_wrong_width_is_refused():
    with pytest.raises(ValueError, match=f"width {DIM + 1}"):
        build("soft")(torch.zeros(1, 3, DIM + 1))
