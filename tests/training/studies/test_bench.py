"""The benchmarks run, compare like with like, and record what they promise. No time is ever asserted."""

import pytest
import torch
from rich.console import Console

from ermoe import cpu
from ermoe.errors import UserError
from ermoe.nn import MoE
from ermoe.studies.bench import data, file, layer, parts, start, training
from ermoe.studies.bench.measure import compare, peak_megabytes, take_turns
from ermoe.studies.bench.peers import Forced, Shape, available, build, eigen_layer, tokens
from ermoe.studies.bench.result import Bar, Result, save, show
from ermoe.studies.bench.step import training_step_of
from ermoe.studies.bench.training import miniature_of_equal_flops
from ermoe.studies.record import read_records

SMALL = Shape(images=2, tokens=10, dim=512, hidden_dim=768, num_experts=4)


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_candidates_take_turns_in_a_rotating_order():
    calls = []
    seconds = take_turns({name: lambda name=name: calls.append(name) for name in "abc"}, rounds=3, warmup=1)
    assert "".join(calls) == "abc" + "bca" + "cab" + "abc"
    assert {name: len(times) for name, times in seconds.items()} == {"a": 3, "b": 3, "c": 3}


def test_ratios_are_taken_within_a_round():
    # the machine is ten times slower in the second round; the ratio does not notice
    rows = {row.name: row for row in compare({"floor": [1.0, 10.0, 1.0], "x": [2.0, 20.0, 2.0]}, "floor")}
    assert rows["x"].ratio == rows["x"].ratio_low == rows["x"].ratio_high == 2.0
    assert rows["floor"].ratio == 1.0


@pytest.mark.parametrize("routing_kind", ["natural", "balanced", "collapsed"])
def test_every_candidate_gives_an_output_of_the_right_shape(routing_kind):
    x, context = tokens(SMALL)
    for name in available(routing_kind):
        output = build(name, SMALL, routing_kind)(x, context)
        assert output.shape == x.shape, name
        assert torch.isfinite(output).all(), name


def test_forced_routings_are_what_they_say():
    balanced = Forced(SMALL, "balanced")(None, None, None, None)
    assert balanced.count_E.tolist() == [10, 10, 10, 10]
    collapsed = Forced(SMALL, "collapsed")(None, None, None, None)
    assert collapsed.count_E.tolist() == [20, 20, 0, 0]


def test_our_dense_experts_and_the_peer_compute_the_same_numbers():
    pytest.importorskip("transformers")
    x, context = tokens(SMALL)
    ours, theirs = build("our V-MoE", SMALL, "balanced"), build("transformers grouped_mm", SMALL, "balanced")
    assert isinstance(ours, MoE)
    with torch.no_grad():
        ours.experts.up.W.copy_(theirs.experts.up_proj.mT)
        ours.experts.down.W.copy_(theirs.experts.down_proj.mT)
    torch.testing.assert_close(ours(x, context), theirs(x, context), rtol=0, atol=1e-5)


def test_a_result_is_saved_with_all_that_is_needed_to_trust_it(tmp_path, capsys):
    result = layer.beside_peers(SMALL, rounds=2, threads=[1], routings=["natural"], memory=False)
    (record,) = read_records(save(result, tmp_path))
    assert {"command", "commit", "machine", "versions"} <= record["environment"].keys()
    assert record["environment"]["machine"]["cores"] >= 1
    assert record["name"] == "layer"
    assert record["settings"]["reference"] == "floor"
    stored = record["figures"]
    assert {"forward, natural, 1 threads", "forward+backward, natural, 1 threads"} == stored["tables"].keys()
    assert "forward, ERMoE / floor" in {bar["name"] for bar in stored["bars"]}
    assert (tmp_path / "layer.svg").stat().st_size > 1000
    show(result, Console())
    assert "ermoe R=504" in capsys.readouterr().out


def test_routing_benchmark_reports_its_share():
    result = layer.routing(SMALL, rounds=2, threads=1)
    assert [bar.limit for bar in result.bars] == [0.06, 0.10]
    assert all(bar.value > 0 for bar in result.bars)


def test_parts_of_both_layers_beside_the_floor(monkeypatch):
    monkeypatch.setattr(parts, "SHAPES", {"small": (SMALL, {"rank": 32}), "slim": (SMALL, parts.SHAPES["slim"][1])})
    result = parts.run(rounds=2, threads=1)
    assert [bar.limit for bar in result.bars] == [0.75]
    forward, training = ({row.name for row in result.tables[parts.table_of("small", name)]} for name in parts.PASSES)
    assert training - forward == {"ERMoE: penalty", "ERMoE: balance"}
    assert {"floor", "ERMoE: route", "ERMoE: of which context", "V-MoE: products", "V-MoE: unrouted"} <= forward
    assert result.settings["instructions"] in ("AVX2", "AVX512", "DEFAULT", "NO AVX")


def test_instructions_are_limited_before_torch_is_loaded_or_not_at_all():
    with pytest.raises(UserError, match="in a process of its own"):
        cpu.limit_to_avx2()


def test_a_missed_bar_is_called_missed(capsys):
    result = Result("x", {}, "floor", bars=[Bar("slow", 1.2, 1.0), Bar("fast", 0.8, 1.0)])
    show(result, Console())
    output = capsys.readouterr().out
    assert "MISSED slow: 1.200" in output
    assert "held   fast: 0.800" in output


def test_memory_is_measured_in_a_process_of_its_own():
    small = peak_megabytes(layer.build_work, "floor", SMALL, "natural", False, 1)
    large = peak_megabytes(
        layer.build_work, "floor", Shape(images=8, tokens=512, dim=512, hidden_dim=2048), "natural", False, 1
    )
    assert large > small + 20  # 32 MB of hidden activations


def test_the_paper_layer_has_the_presets_ranks():
    built = eigen_layer(Shape(), device="meta")
    assert built.experts.up.U.shape == (8, 768, 504)
    assert built.router.score.route_rank == 56


def test_products_alone_are_the_experts_with_equally_many_rows():
    built = eigen_layer(SMALL, route_rank=32)
    outputs = layer.products_of(built, SMALL)()
    rows = tokens(SMALL)[0].flatten(0, 1).repeat(2, 1)
    with torch.no_grad():
        torch.testing.assert_close(outputs, built.experts(rows, torch.tensor([10, 10, 10, 10])))


def test_the_dense_miniature_is_as_wide_as_two_experts_where_the_sparse_one_has_experts():
    widths = [block.mlp.fc1.out_features for block in miniature_of_equal_flops().blocks]
    assert widths == [384, 768, 384, 768]


def test_a_training_step_belongs_to_the_batch_it_is_given():
    model = torch.nn.Linear(4, 2)
    before = model.weight.detach().clone()
    step = training_step_of(model, iter([(torch.ones(3, 4), torch.tensor([0, 1, 1]))]))
    step()
    assert not torch.equal(before, model.weight)
    with pytest.raises(StopIteration):
        step()


def test_the_data_benchmark_compares_the_loader_with_tensors(monkeypatch):
    taken = []
    monkeypatch.setattr(data, "step", lambda batches: lambda: taken.append(next(batches)))
    result = data.run(None, rounds=1, threads=1)
    assert {(image.shape, label.shape[0]) for image, label in taken} == {((100, 3, 32, 32), 100)}
    (table,) = result.tables.values()
    assert {row.name for row in table} == {
        "preloaded tensors",
        "loader, miniature preset",
        "loader, all augmentations of the paper",
    }
    assert [bar.limit for bar in result.bars] == [1 / 0.9]


def test_the_file_benchmark_asks_for_equal_outputs(monkeypatch):
    pytest.importorskip("onnxruntime")
    small = {"img_size": 224, "patch_size": 56, "embed_dim": 32, "depth": 2, "num_heads": 2}
    monkeypatch.setattr(file, "_ARGUMENTS", small)
    result = file.run(images=2, rounds=1, threads=1)
    (table,) = result.tables.values()
    assert [row.name for row in table] == ["torch", "torch, merged", "onnxruntime, sparse", "onnxruntime, every expert"]
    difference = result.bars[-1]
    assert "difference" in difference.name
    assert difference.holds


def test_the_start_benchmark_times_processes_of_their_own():
    result = Result("start", {}, reference="the libraries alone")
    start._time(result, "image predict", ["--help"], "import tyro", rounds=1, threads=1)
    (table,) = result.tables.values()
    assert [row.name for row in table] == ["import tyro", "ermoe image predict"]
    (bar,) = result.bars
    assert bar.limit == 2.0


def test_the_training_benchmark_counts_a_retraction_as_often_as_the_recipe_has_one(monkeypatch):
    seconds = {
        "dense": 1.0,
        "ermoe": 2.0,
        "v-moe": 2.0,
        "gate": 2.0,
        "ermoe: retraction": 1.0,
        "V-MoE": 2.0,
        "ERMoE": 1.5,
    }
    monkeypatch.setattr(training, "take_turns", lambda work, rounds: {name: [seconds.get(name, 1.0)] for name in work})
    bars = {bar.name: bar.value for bar in training.run(rounds=1, threads=1).bars}
    assert bars["training step, ERMoE / V-MoE"] == pytest.approx(2.1 / 2.0)
    assert bars["demo: training step, ERMoE / V-MoE"] == pytest.approx(1.6 / 2.0)
    assert bars["demo: parameters, ERMoE / V-MoE"] < 1
