"""Recording works under torch.compile, in one graph."""

import pytest
import torch

import ermoe
from ermoe.nn.registry import build_layer
from support.recorded_tower import Tower, assert_same, batches, record

pytestmark = pytest.mark.no_cover  # lines that torch traces are not run, and tracing takes twice as long when watched


@pytest.fixture
def tower():
    return Tower().eval()


@torch.no_grad()
def test_under_compile(tower):
    data = batches(3)
    compiled = torch.compile(tower, fullgraph=True, backend="aot_eager")
    before = compiled(*data[0][:2])
    routing = record(compiled, data)
    assert_same(routing.summary(), record(tower, data).summary())
    assert torch.equal(compiled(*data[0][:2]), before)
    assert routing.tallies["crowded"].totals.count_CE.equal(record(tower, data).tallies["crowded"].totals.count_CE)


@torch.no_grad()
def test_recording_every_epoch_compiles_once(tower):
    data = batches(1)
    compiled = torch.compile(tower, fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(recompile_limit=2):  # beyond which fullgraph is an error
        tokens = []
        for _ in range(4):
            compiled(*data[0][:2])
            tokens.append(record(compiled, data).summary()["crowded"]["tokens"])
    assert tokens == [data[0][1].sum()] * 4


@pytest.mark.parametrize("router", ["eigen", "v-moe", "expert-choice"])
def test_masked_pairs_are_not_counted_in_a_traced_graph(router):
    layer = build_layer(router, 16, num_experts=4, generator=torch.Generator().manual_seed(0)).eval()
    x, mask = torch.randn(3, 8, 16), torch.rand(3, 8) > 0.5
    with torch.no_grad(), ermoe.record_routing(layer) as eager:
        layer(x, x.roll(1, 1), mask)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.no_grad(), ermoe.record_routing(compiled) as traced:
        compiled(x, x.roll(1, 1), mask)
    assert_same(traced.summary(), eager.summary())
