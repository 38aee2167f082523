import torch
from torch.testing import assert_close

import ermoe
from support.routers import EXPERTS, build, inputs


def test_bias_changes_the_choice_and_not_the_weights():
    layer = build("loss-free", {"top_k": 1}).eval()
    x, _ = inputs()
    layer.router.balance.offset_E.copy_(torch.tensor([0.0, 0.0, 0.0, 9.0]))
    routing = layer.route(x)
    assert (routing.expert_TK == 3).all()
    assert_close(routing.weight_TK[:, 0], routing.score_TE[:, 3])


def test_one_update_is_one_centred_step_of_fixed_size():
    layer = build("loss-free", {"top_k": 1, "rate": 0.01})
    x, _ = inputs()
    count_E = layer.route(x).count_E
    layer(x)
    layer(x)  # accumulation: two forwards, one step
    ermoe.update_balance(layer)
    step_E = 0.01 * torch.sign(count_E.float().mean() - count_E)
    assert_close(layer.router.balance.offset_E, step_E - step_E.mean())
    ermoe.update_balance(layer)  # nothing seen, nothing moved
    assert_close(layer.router.balance.offset_E, step_E - step_E.mean())


def test_updates_balance_the_load():
    layer = build("loss-free", {"rate": 0.02})
    x = inputs(batch=16)[0] + 1.0
    before = layer.route(x).count_E.double()
    for _ in range(200):
        layer(x)
        ermoe.update_balance(layer)
    after = layer.route(x).count_E.double()
    assert after.var() < 0.05 * before.var()


def test_weights():
    x, _ = inputs()
    plain = build("loss-free", {"score": "softmax"}).route(x)
    assert_close(plain.score_TE.sum(-1), torch.ones(48))
    assert_close(plain.weight_TK, plain.score_TE.topk(2).values)
    shared = build("loss-free", {"normalise": True, "route_scale": 2.5}).route(x)
    assert_close(shared.weight_TK.sum(-1), torch.full((48,), 2.5))
    assert shared.score_TE.shape == (48, EXPERTS)
