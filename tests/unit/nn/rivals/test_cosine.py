import math

import torch
from torch.testing import assert_close

import ermoe
from ermoe.nn.rivals.cosine import Cosine, CosineRouter
from support import slow_routers as slow
from support.routers import DIM, EXPERTS, inputs


def test_gates_by_hand():
    router = CosineRouter(DIM, EXPERTS, Cosine(proj_dim=8), generator=torch.Generator().manual_seed(0)).eval()
    x = inputs()[0]
    routing = router(x)
    for token in (0, 17):
        projected = router.projection(x.view(-1, DIM)[token])
        cosines = [projected @ direction / (projected.norm() * direction.norm()) for direction in router.direction_PE.T]
        assert_close(routing.score_TE[token], (2.0 * torch.stack(cosines)).softmax(-1))  # 1 / 0.5
    assert_close(routing.weight_TK.sum(-1), torch.ones(48))


def test_the_scale_stops_at_100():
    router = CosineRouter(DIM, EXPERTS, Cosine()).eval()
    x = inputs()[0]
    with torch.no_grad():
        router.log_scale.fill_(math.log(100))
        at_limit = router(x).score_TE
        router.log_scale.fill_(9.0)
        assert_close(router(x).score_TE, at_limit)


def test_one_expert_keeps_its_gate_and_with_it_a_gradient():
    router = CosineRouter(DIM, EXPERTS, Cosine(top_k=1))
    routing = router(inputs()[0])
    assert_close(routing.weight_TK[:, 0], routing.score_TE.amax(-1))
    routing.weight_A.sum().backward()
    assert router.direction_PE.grad.abs().sum() > 0


def test_equal_gates_go_to_lower_experts():
    router = CosineRouter(DIM, EXPERTS, Cosine())
    assert (router.choose(torch.full((5, EXPERTS), 0.25)).expert_TK == torch.tensor([0, 1])).all()


def test_the_loss_is_gshards_over_the_whole_batch():
    layer = ermoe.MoE(
        CosineRouter(DIM, EXPERTS, Cosine(gshard_weight=0.5)), ermoe.nn.build_experts(DIM, 8, num_experts=EXPERTS)
    )
    x = inputs()[0]
    layer(x)
    assert_close(ermoe.auxiliary_loss(layer).item(), 0.5 * slow.gshard(layer.route(x).score_TE.detach()))
