"""Recording changes nothing, forgets nothing, and says what loops over the same records say."""

import math
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ermoe
from ermoe.analysis import MEASURES
from ermoe.analysis.tally import NUM_BINS, Tally
from ermoe.errors import UserError
from ermoe.nn import EigenMoE, Routing, moe_layers
from ermoe.nn.registry import LAYERS, build_layer
from support import slow_measures as slow
from support.recorded_tower import Tower, assert_same, batches, record


@pytest.fixture
def tower():
    return Tower().eval()


def test_summary_equals_loops_over_the_records(tower):
    records = {name: [] for name in moe_layers(tower)}
    for name, layer in moe_layers(tower).items():
        layer.observers.append(records[name].append)
    data = batches()
    found = record(tower, data).summary()
    for name, layer in moe_layers(tower).items():
        expected = slow.summary(
            records[name],
            threshold=layer.router.threshold,
            top_k=layer.router.top_k,
            labels=[label.tolist() for _, _, label in data],
            num_classes=3,
        )
        assert {key: found[name][key] for key in expected} == pytest.approx(expected, rel=1e-5, nan_ok=True)
    assert found["crowded"]["drop_rate"] > 0
    assert found["pruned"]["fallback_rate"] > 0


def test_every_measure_is_there_and_is_a_float(tower):
    for figures in record(tower, batches()).summary().values():
        assert list(figures) == list(MEASURES)
        assert all(type(value) is float for value in figures.values())


def test_outputs_gradients_and_random_state_do_not_change(tower):
    x = torch.randn(4, 6, 16)
    tower.train()
    plain = tower(x)
    plain.sum().backward()
    gradients = [parameter.grad.clone() for parameter in tower.parameters()]
    tower.zero_grad()
    state = torch.get_rng_state()
    with ermoe.record_routing(tower):
        recorded = tower(x)
    recorded.sum().backward()
    assert torch.equal(recorded, plain)
    assert torch.equal(torch.get_rng_state(), state)
    for parameter, gradient in zip(tower.parameters(), gradients, strict=True):
        assert torch.equal(parameter.grad, gradient)


def test_batches_may_be_cut_anywhere(tower):
    x, mask, label = (torch.cat(parts) for parts in zip(*batches(), strict=True))
    whole = record(tower, [(x, mask, label)])
    parts = record(tower, list(zip(x.split(5), mask.split(5), label.split(5), strict=True)))
    assert_same(parts.summary(), whole.summary())


def test_memory_does_not_grow_with_the_number_of_batches(tower):
    def held(routing):
        tallies = routing.tallies.values()
        tensors = [t for tally in tallies for t in (*tally.totals.tensors(), *vars(tally).values())]
        return sum(t.numel() for t in tensors if isinstance(t, torch.Tensor)), len(tensors)

    assert held(record(tower, batches(1), probe_tokens=10)) == held(record(tower, batches(9), probe_tokens=10))


def test_the_model_is_left_clean_by_nesting_and_by_errors(tower):
    x = batches(1)[0][0]
    outer, inner = ermoe.record_routing(tower), ermoe.record_routing(tower)
    with torch.no_grad(), outer:
        tower(x)
        with inner:
            tower(x)
        with pytest.raises(ValueError, match="width"), ermoe.record_routing(tower):
            tower(torch.zeros(2, 3, 5))
        assert len(tower.crowded.observers) == 1
    assert all(layer.observers == [] for layer in moe_layers(tower).values())
    assert inner.summary()["crowded"]["tokens"] == 24
    assert outer.summary()["crowded"]["tokens"] == 48


def test_foreign_observers_stay(tower):
    seen = []
    tower.crowded.observers.append(seen.append)
    record(tower, batches(2))
    assert tower.crowded.observers == [seen.append]
    assert len(seen) == 2


def test_a_recording_can_be_continued_but_not_nested_in_itself(tower):
    data = batches(2)
    routing = record(tower, data[:1])
    with torch.no_grad(), routing:
        routing.labels(data[1][2])
        tower(*data[1][:2])
        with pytest.raises(ValueError, match="open already"), routing:
            pass
    assert_same(routing.summary(), record(tower, data).summary())


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_counts_once(tower, use_reentrant):
    x = torch.randn(4, 6, 16, requires_grad=True)
    with ermoe.record_routing(tower.train()) as routing:
        checkpoint(tower, x, use_reentrant=use_reentrant).sum().backward()
    assert routing.summary()["crowded"]["tokens"] == 24


def test_under_bf16_autocast_scores_are_recorded_in_float32(tower):
    data = batches(1)
    plain = record(tower, data).summary()["crowded"]
    with torch.autocast("cpu", torch.bfloat16):
        half = record(tower, data).summary()["crowded"]
    assert half["margin"] == plain["margin"]
    assert half["load_cv2"] == plain["load_cv2"]


def test_a_recorder_made_in_inference_mode_goes_on_outside(tower):
    x = batches(1)[0][0]
    with torch.inference_mode(), ermoe.record_routing(tower) as routing:
        tower(x)
    with routing:
        tower(x)
    assert routing.summary()["crowded"]["tokens"] == 48


def test_a_batch_without_tokens(tower):
    with ermoe.record_routing(tower) as routing:
        tower(torch.zeros(0, 6, 16))
    figures = routing.summary()["crowded"]
    assert figures["tokens"] == 0
    assert math.isnan(figures["load_cv2"])


@pytest.mark.parametrize("router", LAYERS)
def test_every_router_of_the_registry(router):
    generator = torch.Generator().manual_seed(0)
    layer = build_layer(router, 16, num_experts=4, generator=generator).eval()
    x, mask, label = torch.randn(3, 8, 16), torch.rand(3, 8) > 0.3, torch.tensor([0, 1, 0])
    with torch.no_grad(), ermoe.record_routing(nn.Sequential(layer), classes=2) as routing:
        routing.labels(label)
        expected = layer.route(x, x.roll(1, 1), mask)
        layer(x, x.roll(1, 1), mask)
    figures, tally = routing.summary()["0"], routing.tallies["0"]
    assert figures["tokens"] == mask.sum()
    assert tally.totals.count_E.equal(expected.count_E)
    assert tally.totals.count_CE.sum(0).equal(expected.count_E)
    assert tally.totals.weight_E.allclose(expected.dense_weights().sum(0).double())
    used = expected.dense_weights() > 0
    assert figures["unserved_rate"] == pytest.approx(float((~used.any(1) & mask.view(-1)).sum() / mask.sum()))
    assert 0 <= figures["class_information"] <= 1
    has_threshold = layer.router is not None and layer.router.threshold is not None
    assert math.isnan(figures["fallback_rate"]) != has_threshold


def test_fluctuation_counts_tokens_that_changed_an_expert(tower):
    data = batches(2)
    before = record(tower, data)
    assert record(tower, data, previous=before).summary()["pruned"]["fluctuation"] == 0
    assert math.isnan(before.summary()["pruned"]["fluctuation"])
    old = before.tallies["crowded"].probe().clone()
    with torch.no_grad():
        tower.crowded.experts.up.U.copy_(tower.crowded.experts.up.U.flip(0))
    after = record(tower, data, previous=before)
    new = after.tallies["crowded"].probe()
    compared = [i for i in range(len(old)) if old[i].any() or new[i].any()]
    expected = sum(old[i].tolist() != new[i].tolist() for i in compared) / len(compared)
    assert 0 < expected < 1
    assert after.summary()["crowded"]["fluctuation"] == pytest.approx(expected)


def test_the_probe_keeps_the_first_tokens_and_no_more(tower):
    data = batches(3)
    whole = record(tower, data).tallies["crowded"].probe()
    assert whole.shape == (72, 4)
    for length in (1, 24, 30, 71):
        assert record(tower, data, probe_tokens=length).tallies["crowded"].probe().equal(whole[:length])


def test_previous_recordings_of_other_models(tower):
    other = nn.ModuleDict({"crowded": EigenMoE(16, num_experts=3)})
    with pytest.raises(ValueError, match="3 in the"):
        ermoe.record_routing(tower, previous=ermoe.record_routing(other))


def test_labels_for_each_token_or_each_image_and_none(tower):
    x = torch.randn(2, 6, 16)
    tables = []
    for label in (torch.tensor([0, 2]), torch.tensor([0] * 6 + [2] * 6)):
        with torch.no_grad(), ermoe.record_routing(tower, classes=["a", "b", "c"]) as routing:
            routing.labels(label)
            tower(x)
            tower(x)  # not labelled
        tables.append(routing.tallies["pruned"].totals.count_CE)
    assert tables[0].equal(tables[1])
    assert tables[0][1].sum() == 0
    assert tables[0][:3].sum() == tables[0][3].sum() > 0
    with torch.no_grad(), ermoe.record_routing(tower, classes=3) as routing:
        routing.labels(torch.tensor([-100, 1]))
        tower(x)
    assert routing.tallies["pruned"].totals.count_CE[0].sum() == 0


@pytest.mark.parametrize(
    ("classes", "label", "message"),
    [(None, [0], "classes="), (3, [3, 0], "label 3 is outside"), (3, [0] * 5, "cannot be shared out")],
)
def test_labels_that_make_no_sense(tower, classes, label, message):
    def labelled_pass():
        with ermoe.record_routing(tower, classes=classes) as routing:
            routing.labels(torch.tensor(label))
            tower(torch.randn(4, 6, 16))

    with pytest.raises(ValueError, match=message):
        labelled_pass()


def test_a_dense_model_has_nothing_to_record():
    with pytest.raises(UserError, match=r"ermoe\.upcycle"):
        ermoe.record_routing(nn.Linear(3, 3))


def test_wrappers_leave_no_trace_in_names(tower):
    compiled = torch.compile(nn.ModuleDict({"module": tower}), backend="eager")
    assert list(moe_layers(compiled)) == ["crowded", "pruned"]


def test_the_fallback_rate_of_any_threshold_can_be_read_later():
    score = torch.tensor([[0.3, 0.1], [0.505, 0.2], [0.9, -0.5], [-0.2, -1.0], [1.0, 0.0]])
    tally = Tally(num_experts=2)
    choice = score.argmax(1, keepdim=True)
    tally.add(Routing.from_choice(choice, torch.ones(5, 1), num_experts=2, score_TE=score))
    assert tally.totals.best_score_B.sum() == 5
    assert tally.totals.score_B.sum() == 10
    assert len(tally.totals.score_B) == NUM_BINS
    for threshold in (-0.5, 0.0, 0.3, 0.31, 0.5, 0.51, 0.99):
        assert tally.fallback_rate(threshold) == pytest.approx(float((score.amax(1) < threshold).float().mean()))


def test_geometry_is_of_the_weights_after_the_block(tower):
    routing = record(tower, batches(1))
    before = routing.summary()["crowded"]
    assert before["orthonormality_error"] < 1e-5
    assert 0 < before["subspace_overlap"] < 1
    with torch.no_grad():
        tower.crowded.experts.up.U.mul_(2)
    assert routing.summary()["crowded"] == pytest.approx(before, nan_ok=True)
    after = record(tower, batches(1)).summary()["crowded"]
    assert after["orthonormality_error"] == pytest.approx(3, abs=1e-4)
    assert after["subspace_overlap"] == pytest.approx(before["subspace_overlap"])


def test_reduce_belongs_after_the_block_and_without_processes_does_nothing(tower):
    routing = record(tower, batches(1))
    before = routing.summary()
    assert_same(routing.reduce().reduce().summary(), before)
    with routing, pytest.raises(ValueError, match="after the with block"):
        routing.reduce()


def test_without_a_probe(tower):
    routing = record(tower, batches(2), probe_tokens=0)
    assert routing.tallies["crowded"].probe().shape == (0, 4)
    assert math.isnan(record(tower, batches(2), previous=routing).summary()["crowded"]["fluctuation"])


def test_every_measure_is_explained_in_the_docs():
    text = (Path(__file__).parents[3] / "docs/reference/measures.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `(\w+)` \|", text, flags=re.MULTILINE) == list(MEASURES)


def test_table_shows_what_has_a_meaning(tower):
    table = record(tower, batches(1)).table()
    header, _, *rows = table.splitlines()
    assert "fluctuation" not in header
    assert "class bits" in header
    assert [row.split()[1] for row in rows] == ["crowded", "pruned"]
    assert len({len(row) for row in rows} | {len(header)}) == 1
