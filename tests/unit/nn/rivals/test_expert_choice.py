import pytest
import torch
from torch.testing import assert_close

from ermoe.nn.capacity import places
from support import slow_routers as slow
from support.routers import DIM, EXPERTS, build, inputs


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("factor", "multiple"), [(0.7, 1), (2.0, 4), (1.3, 1)])
def test_the_layer_against_a_loop(factor, multiple, masked):
    options = {"capacity_factor": factor, "capacity_multiple": multiple}
    layer = build("expert-choice", options, dtype=torch.float64).eval()
    x, _ = inputs(batch=3, tokens=11, dtype=torch.float64)
    real = [11, 7, 2] if masked else [11] * 3
    mask = torch.arange(11) < torch.tensor(real)[:, None]
    gate_GSE = layer.router.gate(x).softmax(-1).detach()
    limit = [places(count, 1, EXPERTS, factor, multiple) for count in real]
    combine_GSE = slow.expert_choice(gate_GSE, limit, mask)
    routing = layer.route(x, mask=mask if masked else None)
    assert_close(routing.dense_weights().view(3, 11, EXPERTS), combine_GSE)
    expected = slow.experts_loop(layer.experts, x.view(-1, DIM), combine_GSE.view(-1, EXPERTS))
    assert_close(layer(x, mask=mask if masked else None).view(-1, DIM), expected)


def test_loads_are_equal_and_tokens_are_not():
    routing = build("expert-choice", {"top_k": 1}).eval().route(inputs()[0])
    assert routing.count_E.unique().numel() == 1
    per_token = torch.bincount(routing.token_A, minlength=48)
    assert int(per_token.sum()) == 48
    assert int(per_token.min()) == 0
    assert int(per_token.max()) > 1


def test_equal_gates_go_to_earlier_tokens():
    layer = build("expert-choice", {"capacity_factor": 1.0})
    routing = layer.router.choose(torch.full((1, 8, EXPERTS), 0.25))
    assert routing.token_A.view(EXPERTS, -1).tolist() == [[0, 1]] * EXPERTS


def test_an_expert_cannot_take_more_tokens_than_there_are():
    layer = build("expert-choice", {"capacity_factor": 9.0}).eval()
    routing = layer.route(inputs()[0])
    assert routing.count_E.tolist() == [48] * EXPERTS
    assert_close(routing.dense_weights().sum(-1), torch.ones(48))
