import torch
from torch.testing import assert_close

import ermoe
from ermoe.nn.basis import orthonormality_error
from support import slow_routers as slow
from support.routers import DIM, EXPERTS, build, inputs


def test_the_layer_against_a_loop():
    layer = build("emoe", {"route_rank": 6}, dtype=torch.float64).eval()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in (layer.router.gates.gamma_r, layer.router.gates.bias_E):  # ones and zeros tell nothing
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    x, _ = inputs(batch=2, tokens=5, dtype=torch.float64)
    tokens, gates = x.view(-1, DIM), layer.router.gates
    expected = torch.zeros(10, EXPERTS, dtype=torch.float64)
    for token, row in enumerate(tokens):
        gate = slow.emoe(row, gates.basis[0].detach(), gates.mask_Er, gates.gamma_r, gates.bias_E)
        best = sorted(range(EXPERTS), key=lambda e, gate=gate: -gate[e])[:2]
        for e in best:
            expected[token, e] = gate[e] / sum(gate[other] for other in best)
    assert_close(layer.route(x).dense_weights(), expected)
    assert_close(layer(x).view(-1, DIM), slow.experts_loop(layer.experts, tokens, expected))


def test_its_basis_is_kept_as_every_other():
    layer = build("emoe")
    assert float(orthonormality_error(layer.router.gates.basis.detach()).max()) < 1e-5
    assert "router.gates.basis" in ermoe.nn.no_weight_decay(layer)
    with torch.no_grad():
        layer.router.gates.basis.mul_(1.1)
    assert ermoe.orthogonality_loss(layer) > 0.1
    assert ermoe.retract(layer)["router.gates"].error_after < 1e-5


def test_weights_as_published_are_the_plain_gates():
    routing = build("emoe", {"normalise": False}).route(inputs()[0])
    assert_close(routing.weight_TK, routing.score_TE.gather(1, routing.expert_TK))
