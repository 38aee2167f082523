"""Studies on captions, brains and costs: what they make of given records, and the pictures they generate."""

import math

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from ermoe.errors import UserError
from ermoe.retrieval.captions.catalogue import open_captions
from ermoe.retrieval.shapes import COLOURS, scene, write_shapes
from ermoe.studies.figures import Runs
from ermoe.studies.paper import brains, captions, catalogue, costs, tissues
from ermoe.studies.paper.setup import Setup


def record(name, **figures):
    return {"name": name, "seed": 1, "figures": figures}


def findings_of(study, *records):
    return catalogue.find(study).findings(Runs(records))


def test_scenes_repeat_and_their_captions_tell_the_truth():
    first, again, other = scene(0, 1), scene(0, 1), scene(0, 2)
    assert (first.pixels == again.pixels).all()
    assert first.captions == again.captions
    assert (first.pixels != other.pixels).any()
    for index in range(20):
        made = scene(3, index)
        named = {word for caption in made.captions for word in caption.split() if word in COLOURS}
        for colour, rgb in COLOURS.items():
            assert (made.pixels == np.array(rgb)).all(-1).any() == (colour in named)


def test_places_in_captions_are_those_in_the_picture():
    for index in range(40):
        made = scene(5, index)
        words = made.captions[0].split()
        colours = [word for word in words if word in COLOURS]
        if colours[0] == colours[1]:
            continue
        rows, columns = zip(
            *(np.argwhere((made.pixels == np.array(COLOURS[c])).all(-1)).mean(0) for c in colours), strict=True
        )
        if "above" in words:
            assert rows[0] < rows[1]
        elif "below" in words:
            assert rows[0] > rows[1]
        elif "left" in words:
            assert columns[0] < columns[1]
        else:
            assert columns[0] > columns[1]


def test_scenes_on_disk_are_captioned_images(tmp_path):
    folder = write_shapes(tmp_path / "shapes", train=6, dev=2, test=3, side=24)
    for split, count in (("train", 6), ("dev", 2), ("test", 3)):
        found = open_captions(folder, "custom", split)
        assert len(found) == count
        assert len(found.texts) == 5 * count
    with Image.open(folder / "images" / "shapes-0-00000.png") as picture:
        assert (np.asarray(picture) == scene(0, 0, side=24).pixels).all()
    assert write_shapes(folder) == folder  # nothing is made again
    assert len(open_captions(folder, "custom", "train")) == 6


@pytest.mark.parametrize("name", ["coco", "flickr"])
def test_retrieval_tables_have_the_papers_rows_and_ours(name):
    figures = dict.fromkeys(captions.CUTS, 0.25)
    records = [
        record(method, figures=figures, chance=dict.fromkeys(captions.CUTS, 0.01)) for method in captions.METHODS
    ]
    found = findings_of(name, *records)
    assert [row[0] for row in found.rows[:4]] == [
        f"paper: {m}" for m in ("Long-CLIP", "Fix-CLIP", "CLIP-MoE", "CLIP-ERMoE")
    ]
    assert found.rows[4][1] == "25.0%"
    assert found.rows[-1][1] == "1.0%"


def test_text_tuning_puts_both_towers_beside_the_papers():
    figures = dict.fromkeys(captions.CUTS, 0.5)
    found = findings_of("text-tuning", record("frozen", figures=figures))
    assert found.rows[0][:3] == ["frozen", "49.1", "50.0%"]
    assert found.rows[1][:3] == ["tuned", "50.3", "–"]


@pytest.mark.parametrize("name", ["coco", "brain-age"])
def test_full_scale_wants_real_data(name, tmp_path):
    full = Setup(scale="full", out=tmp_path, console=Console(quiet=True))
    with pytest.raises(UserError, match="--data"):
        catalogue.find(name).ours(full)


def test_brain_ages_by_sex():
    records = [
        record("ermoe", M=2.0, F=3.0, all=2.5, **{"predict the mean": 9.0}),
        record("vit3d", M=4.0, F=4.0, all=4.0),
    ]
    found = findings_of("brain-age", *records)
    row = next(row for row in found.rows if row[0] == "ERMoE-ba")
    assert row[1:] == ["2.30", "2.00", "2.32", "3.00", "2.31", "2.50"]
    assert found.rows[-1][-1] == "9.00"


def test_regions_name_the_best_two_experts():
    names = ["wm_expert", "gm_expert", "csf_expert", "free_expert0"]
    late = {
        f"probe/{t}/{e}": 0.9 if e.startswith(t) else 0.1 + 0.1 * i
        for t in ("wm", "gm", "csf")
        for i, e in enumerate(names)
    }
    early = dict.fromkeys(late, 0.2)
    found = findings_of("region-routing", record("ermoe", first=early, last=late))
    assert found.rows[0][-1] == "wm_expert 0.90, free_expert0 0.40"
    assert "3 of 3 tissues" in found.sentences[0]
    assert len(found.drawing.axes) == 2


def test_scatter_has_four_panels_with_their_lines():
    part = {"age": [50.0, 60.0, 70.0, 80.0], "predicted": [52.0, 60.0, 68.0, 78.0], "sex": ["M", "F", "M", "F"]}
    found = findings_of("brain-scatter", record("ermoe", test=part, train=part))
    assert len(found.rows) == len(found.drawing.axes) == 4
    assert found.rows[0][2:4] == ["2.00", "0.80"]


def test_calibrations_that_were_refused_are_said_so():
    raw = {"mae": 5.0, "gap_age_r": -0.5, "slope": 0.1, "intercept": 50.0}
    figures = {"train": {"raw": raw}, "held-out": {}, "refusals, train": ["refused: flat"], "refusals, held-out": []}
    found = findings_of("calibration", record("ermoe", **figures))
    assert found.rows[0] == ["raw", "2.307", "5.000", "-0.287", "-0.500", "0.887", "0.100", "9.026", "50.000"]
    assert found.rows[1][2] == "–"
    assert found.sentences[-1] == "1 calibrations were refused, for example: refused: flat"


def test_counts_are_those_of_the_presets():
    counted = costs.count_model("v-moe-b16")
    assert counted["parameters"] == pytest.approx(284.9, abs=0.05)
    found = findings_of("efficiency", record("v-moe-b16", **counted))
    assert found.rows[0][1:3] == ["284.9 (129.9)", "284.9 (114.9)"]


def test_routing_operations_follow_the_formula():
    counted = costs.count_routing()
    assert counted["V-MoE"] == pytest.approx(6 * 197 * 768 * 8 / 1e9, rel=1e-6)
    # tokens, six layers: 197 · 768 · 8 r multiply-adds, and a little for the cosines; contexts are averages of these
    expected = 6 * 197 * 768 * 8 * 56 / 1e9
    assert counted["ERMoE r = 56"] == pytest.approx(expected, rel=0.02)
    assert all(math.isfinite(value) for value in counted.values())


def test_region_routing_wants_tissue_maps(tmp_path, monkeypatch):
    fold = tmp_path / "folds" / "fold-0"
    fold.mkdir(parents=True)
    (fold / "metrics.jsonl").write_text('{"step": 1, "kind": "test", "test_mae": 5.0}\n')
    monkeypatch.setattr(brains, "trained", lambda setup, method, seed: tmp_path)
    with pytest.raises(UserError, match="no region probes: give the scans tissue maps"):
        tissues.probe(Setup(), "ermoe", 1)
