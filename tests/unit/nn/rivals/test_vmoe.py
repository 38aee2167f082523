import pytest
import torch
from torch.testing import assert_close

import ermoe
from ermoe.nn.rivals.vmoe import VMoE, VMoERouter
from support import slow_routers as slow
from support.routers import DIM, EXPERTS, build, inputs


def test_the_layer_against_a_loop():
    layer = build(
        "v-moe", {"capacity_factor": 0.6, "capacity_multiple": 1, "group_size": 2}, dtype=torch.float64
    ).eval()
    x, _ = inputs(batch=4, tokens=10, dtype=torch.float64)
    gate_GSE = layer.router.gate(x).softmax(-1).view(2, 20, EXPERTS)
    weight_GSK, expert_GSK = gate_GSE.topk(2)
    position_GSK = slow.capacity_positions(
        expert_GSK, EXPERTS, torch.ones_like(expert_GSK, dtype=torch.bool), weight_GSK[..., 0]
    )
    combine_GSE = torch.zeros_like(gate_GSE).scatter(-1, expert_GSK, weight_GSK * (position_GSK < 6))
    expected = slow.experts_loop(layer.experts, x.view(-1, DIM), combine_GSE.view(-1, EXPERTS))
    assert_close(layer(x).view(-1, DIM), expected)
    assert int(layer.route(x).num_dropped) == int((position_GSK >= 6).sum()) > 0


def test_gates_are_not_renormalised():
    router = VMoERouter(DIM, EXPERTS, VMoE(capacity_factor=None)).eval()
    routing = router(inputs()[0])
    assert (routing.weight_TK.sum(-1) < 1).all()
    assert_close(routing.weight_TK, routing.score_TE.topk(2).values)


def test_noise_only_in_training_and_of_the_stated_size():
    router = VMoERouter(DIM, EXPERTS, VMoE(noise_std=2.0, capacity_factor=None))
    x = inputs(batch=64, tokens=64)[0]
    clean = router.eval()(x).score_TE.log()
    assert torch.equal(router(x).score_TE.log(), clean)
    noisy = router.train()(x).score_TE.log()
    differences = (noisy - clean)[:, 0] - (noisy - clean)[:, 1]  # the softmax's normaliser drops out
    assert_close(differences.std(), torch.tensor(2.0 / EXPERTS * 2**0.5), rtol=0.05, atol=0)


@pytest.mark.parametrize(("images", "group_size", "merged"), [(8, 8, 8), (12, 8, 6), (7, 8, 7), (13, 8, 1), (3, 1, 1)])
def test_images_of_a_group_share_places(images, group_size, merged):
    """All tokens want the same two experts, so each group keeps exactly its places."""
    options = {"group_size": group_size, "capacity_factor": 1.0, "capacity_multiple": 1}
    routing = build("v-moe", options).eval().route(torch.ones(images, 4, DIM))
    places = -(-merged * 4 * 2 // EXPERTS)
    assert routing.count_E.sort().values.tolist() == [0, 0, *[images // merged * places] * 2]


def test_a_capacity_makes_inference_depend_on_the_batch_and_none_does_not():
    x = inputs(batch=8)[0]
    limited = build("v-moe", {"capacity_factor": 0.5}).eval()
    assert not torch.allclose(limited(x)[:1], limited(x[:1]), atol=1e-3)
    unlimited = build("v-moe", {"capacity_factor": 0.5, "eval_capacity_factor": None}).eval()
    assert_close(unlimited(x)[:1], unlimited(x[:1]), rtol=0, atol=1e-6)
    assert unlimited.route(x).num_dropped is None
    assert int(unlimited.train().route(x).num_dropped) > 0


def test_batch_priority_keeps_the_largest_gates():
    options = {"capacity_factor": 0.25, "capacity_multiple": 1, "top_k": 1, "group_size": 4}
    x = inputs()[0]
    in_order = build("v-moe", options | {"batch_priority": "never"}).eval().route(x)
    by_gate = build("v-moe", options).eval().route(x)
    assert by_gate.weight_A.sum() > in_order.weight_A.sum()
    assert torch.equal(by_gate.count_E, in_order.count_E)
    training = build("v-moe", options | {"noise_std": 0.0})
    assert torch.equal(training.route(x).token_A, in_order.token_A)


def test_training_with_the_losses_balances_the_load():
    layer = build("v-moe", {"capacity_factor": None, "importance_weight": 1.0, "load_weight": 1.0, "group_size": 8})
    x = inputs(batch=8)[0] + 1.0  # a common direction, which the gate favours unevenly
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    optimizer = torch.optim.Adam(layer.router.parameters(), lr=0.02)

    def variation():
        count_E = layer.eval().route(x).count_E.double()
        return float(count_E.var(correction=0) / count_E.mean() ** 2)

    before = variation()
    for _ in range(60):
        layer.train()(x + 0.1 * torch.randn(x.shape, generator=generator))
        optimizer.zero_grad()
        ermoe.auxiliary_loss(layer).backward()
        optimizer.step()
    assert variation() < 0.1 * before
