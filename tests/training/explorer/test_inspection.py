"""What `ermoe inspect` writes: complete, self-contained, with every number beside it. A browser: tests/system."""

import csv
import re

import numpy as np
import pytest
import timm
import torch
from PIL import Image

import ermoe
from ermoe.analysis.plots import Curve, Scale, curves
from ermoe.analysis.report import THRESHOLDS
from ermoe.data.images import open_images
from ermoe.errors import UserError
from ermoe.explorer import inspection
from ermoe.explorer.inspect import Settings, experts_a_token, inspect, look_into, routers_with_k
from ermoe.explorer.patches import Patched, viewer
from ermoe.explorer.places import model_names
from support import slow_measures as slow
from support.inspected import SIZE, model, write_report


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    return write_report(tmp_path_factory.mktemp("inspect"))


def test_report_has_every_section(report):
    text = report.read_text(encoding="utf-8")
    assert re.findall("<h2>(.*?)</h2>", text) == [
        "At a glance",
        "Load",
        "Where the patches go",
        "Classes and experts",
        "Experts",
        "Scores",
        "Threshold",
        "Experts a token",
        "Bases",
        "Over training",
        "All measures",
    ]
    without_pictures = re.sub(r"base64,[\w+/=\n]+", "", text)
    assert not re.search(r"https?:|//[a-z]|<link|@import|url\((?!#)", without_pictures)
    assert len(text) < 2_000_000
    cards = re.findall(r"<div id='(card-[\w-]+)'>", text)
    assert len(set(cards)) == 16
    assert sorted(re.findall(r'<a xlink:href="#(card-[\w-]+)">', text)) == sorted(cards)  # one click from the heat map


def test_every_plot_lies_beside_the_page_in_three_formats(report):
    text = report.read_text(encoding="utf-8")
    named = re.findall(r'<code class="source">(.*?)</code>', text)
    assert len(named) == len(set(named)) == text.count("<svg") - text.count('<svg class="card-places"')
    folder = report.parent / "figures"
    assert {path.name for path in folder.iterdir()} == {f"{n}.{end}" for n in named for end in ("png", "svg", "csv")}
    for name in named:
        with Image.open(folder / f"{name}.png") as picture:
            assert min(picture.size) > 100
        assert (folder / f"{name}.svg").read_text(encoding="utf-8").lstrip().startswith("<?xml")
        rows = list(csv.reader((folder / f"{name}.csv").open(encoding="utf-8")))
        assert len(rows) > 1
        assert all(len(row) == len(rows[0]) for row in rows), name


def test_numbers_in_the_files_are_those_of_a_recording(report):
    images = open_images("digits", "test")
    found = look_into(model(), images, Settings(k_images=0))
    rows = list(csv.DictReader((report.parent / "figures" / "first-load-choices.csv").open()))
    count = {name: tally.totals.count_E.tolist() for name, tally in found.tallies().items()}
    assert [(row["layer"], int(row["expert"]), float(row["choices"])) for row in rows] == [
        (name, e, float(number)) for name, load in count.items() for e, number in enumerate(load)
    ]
    rates = list(csv.DictReader((report.parent / "figures" / "first-fallback.csv").open()))
    assert {row["T"] for row in rates} == {str(t) for t in THRESHOLDS}
    own = found.summary()["block 1"]["fallback_rate"]
    at_half = next(float(row["fallback"]) for row in rates if row["layer"] == "block 1" and row["T"] == "0.5")
    assert at_half == pytest.approx(own, abs=1e-9)


def test_a_single_model_is_not_called_by_name(tmp_path):
    ermoe.save(model("soft"), tmp_path / "m")
    text = inspect([str(tmp_path / "m")], "digits", tmp_path / "out", settings=Settings(k_images=8)).read_text()
    assert "Accuracy against k" not in text  # tokens of Soft MoE choose nothing
    assert "Principal angles" not in text
    assert (tmp_path / "out" / "figures" / "load-choices.csv").is_file()


def test_a_model_without_experts_gets_a_sentence(tmp_path):
    ermoe.save(timm.create_model("vit_tiny_patch16_224", **SIZE), tmp_path / "dense")
    with pytest.raises(UserError, match=r"dense has no mixture-of-experts layer .* ermoe.upcycle"):
        inspect([str(tmp_path / "dense")], "digits", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_missing_things_get_a_sentence(tmp_path):
    with pytest.raises(UserError, match="no model given"):
        inspect([], "digits", tmp_path)
    with pytest.raises(UserError, match=r"nowhere is no folder|neither a folder here"):
        inspect([str(tmp_path / "nowhere")], "digits", tmp_path)
    ermoe.save(model(), tmp_path / "m")
    with pytest.raises(UserError, match="no images given"):
        inspect([str(tmp_path / "m")], None, tmp_path)
    with pytest.raises(UserError, match="--captions describe the experts of an index"):
        inspect([str(tmp_path / "m")], "digits", tmp_path, captions=tmp_path)
    with pytest.raises(UserError, match="does not exist"):
        inspect([str(tmp_path / "m")], str(tmp_path / "no-data"), tmp_path)
    one = tmp_path / "one" / "train" / "cat"
    one.mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(one / "a.png")
    (tmp_path / "one" / "val" / "cat").mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(tmp_path / "one" / "val" / "cat" / "b.png")
    with pytest.raises(UserError, match="only one class"):
        inspect([str(tmp_path / "m")], str(tmp_path / "one"), tmp_path)


def test_other_classes_leave_accuracy_out(tmp_path, caplog):
    torch.manual_seed(0)
    network = ermoe.upcycle(timm.create_model("vit_tiny_patch16_224", **{**SIZE, "num_classes": 3}), init="random")
    found = look_into(network, open_images("digits", "test"), Settings())
    assert found.accuracy is None
    assert list(found.by_k) == []
    assert set(found.patched.mistakes) == {""}
    assert "accuracy is left out" in caplog.text


def test_accuracy_at_other_numbers_of_experts_is_that_of_a_model_built_so():
    images, settings = open_images("digits", "test"), Settings(k_images=60)
    network = model()
    found = {at.top_k: at for at in look_into(network, images, settings).by_k}
    assert sorted(found) == [1, 2, 3, 4]
    assert found[2].agreement == 1
    assert [router.top_k for router in routers_with_k(network)] == [2, 2]
    other = model(top_k=3)
    other.load_state_dict(network.state_dict())
    own = {at.top_k: at for at in look_into(other, images, settings).by_k}
    assert own[3].accuracy == found[3].accuracy
    assert own[2].agreement == found[3].agreement


def test_experts_a_token_is_undone_after_an_error():
    network = model()

    def fail():
        with experts_a_token(network, 4):
            raise RuntimeError(str(routers_with_k(network)[0].top_k))

    with pytest.raises(RuntimeError, match="4"):
        fail()
    assert routers_with_k(network)[0].top_k == 2


def test_tails_and_class_weights_of_a_recording_equal_loops():
    network, images = model(), open_images("digits", "test")
    records = []
    layer = network.blocks[1].mlp
    layer.observers.append(records.append)
    found = look_into(network, images, Settings(k_images=0, pictures=1, batch_size=599))
    routing, tally = records[0], found.tallies()["block 1"]
    scores = routing.score_TE.tolist()
    for k in range(1, 5):
        tails = [slow.tail_mass(row, 0.5, k) for row in scores]
        known = [tail for tail in tails if tail == tail]
        assert tally.tail_mass(k) == pytest.approx(sum(known) / len(known), abs=1e-6)
    for threshold in (0.0, 0.3, 0.9):
        fell = sum(max(row) < threshold for row in scores) / len(scores)
        assert tally.fallback_rate(threshold) == pytest.approx(fell, abs=1e-12)
    weight = torch.zeros(10, 4, dtype=torch.float64)
    label = images.label_N.repeat_interleave(routing.num_tokens // len(images))
    for token, expert, share in zip(routing.token_A, routing.expert_A, routing.weight_A.tolist(), strict=True):
        weight[label[token], expert] += share
    torch.testing.assert_close(tally.totals.weight_CE[:-1], weight)


def test_names_are_the_folders_unless_they_clash():
    assert model_names(["runs/a/", "runs/b/model"]) == ["a", "b"]
    assert model_names(["x/a", "y/a"]) == ["x/a", "y/a"]
    assert model_names(["../model"]) == ["../model"]


def test_pooled_shares_are_sorted_and_sum_to_one():
    found = look_into(model(), open_images("digits", "test"), Settings(k_images=0))
    share = inspection.pooled_share(list(found.tallies().values()))
    assert len(share) == 8
    assert share == sorted(share, reverse=True)
    assert sum(share) == pytest.approx(1)


def test_curves_draw_what_they_are_given():
    lines = {"a": Curve([0, 1], [0.2, 0.4], marked=True), "b": Curve([0, 1], [0.1, 0.1], [0.01, 0.02])}
    axes = curves(lines, ["#000000", "#ff0000"], Scale("x", "y", percent=True, at={"here": 0.5})).axes[0]
    assert axes.get_lines()[0].get_ydata().tolist() == [0.2, 0.4]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["a", "b"]
    assert axes.texts[0].get_text() == "here"


def test_viewer_escapes_what_it_shows():
    patched = Patched([Image.new("RGB", (4, 4))], ["<cat>"], {"</script>": np.array([[[0]]])}, 1, ["<dog>"])
    text = "".join(viewer({"<m>": patched, "n": patched}))
    assert "<cat>" not in text
    assert "<dog>" not in text
    assert "<m>" not in text
    assert "</script>" not in text.replace("</script>", "", 1)
