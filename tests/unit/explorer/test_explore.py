"""What the explorer opens, and under which names."""

import json
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image

import ermoe
from ermoe.errors import UserError
from ermoe.explorer.explore import in_words, open_explorer
from ermoe.explorer.pictures import sample_pictures
from support.inspected import SIZE, model


def test_classes_are_in_words_where_there_are_such(tmp_path):
    (tmp_path / "words.txt").write_text("n01440764\ttench, Tinca tinca\nn01443537\tgoldfish\n")
    assert in_words(["n01440764", "n9"], str(tmp_path)) == ["tench", "n9"]
    assert in_words(["a"], None) == ["a"]


def test_a_thousand_classes_without_names_are_imagenets(tmp_path):
    dense = timm.create_model("vit_tiny_patch16_224", **{**SIZE, "num_classes": 1000})
    ermoe.save(ermoe.upcycle(dense, num_experts=2, init="random"), tmp_path / "thousand")
    explorer = open_explorer([str(tmp_path / "thousand")])
    assert explorer.subjects["thousand"].classes[:2] == ["tench", "goldfish"]
    assert explorer.summary == sample_pictures().summary
    assert json.dumps(explorer.subjects["thousand"].describe())


def test_what_cannot_be_explored_gets_a_sentence(tmp_path):
    with pytest.raises(UserError, match="no model given"):
        open_explorer([])
    ermoe.save(timm.create_model("vit_tiny_patch16_224", **SIZE), tmp_path / "dense")
    with pytest.raises(UserError, match="dense has no mixture-of-experts layer to explore"):
        open_explorer([str(tmp_path / "dense")])
    ermoe.save(model(), tmp_path / "sparse")
    with pytest.raises(UserError, match="--captions describe the experts of an index"):
        open_explorer([str(tmp_path / "sparse")], captions="x")
    with pytest.raises(UserError, match="model is a str: give the model itself"):
        ermoe.explore(str(tmp_path / "sparse"), "digits")


def test_a_folder_of_photographs_needs_no_classes(tmp_path):
    photographs = tmp_path / "photographs"
    photographs.mkdir()
    for name in ("b.jpg", "a.PNG", "._a.PNG"):
        Image.new("RGB", (12, 8), "teal").save(photographs / name, "PNG")
    (photographs / "notes.txt").write_text("x")
    torch.manual_seed(0)
    dense = timm.create_model("vit_tiny_patch16_224", **{**SIZE, "num_classes": 2})
    ermoe.save(ermoe.upcycle(dense, num_experts=2, init="random"), tmp_path / "two")
    explorer = open_explorer([str(tmp_path / "two")], str(photographs))
    images = explorer.pictures.images
    assert [Path(images.name(number)).name for number in range(len(images))] == ["a.PNG", "b.jpg"]
    assert explorer.subjects["two"].classes == ["0", "1"]  # photographs without classes name none
    explorer._asked = -1e9
    explorer.study()
    assert explorer.subjects["two"].cards.card("blocks.1.mlp", 0).classes == []
    one = open_explorer([str(tmp_path / "two")], str(photographs / "b.jpg"))
    assert one.summary == "b.jpg"
    with pytest.raises(UserError, match="does not exist"):
        open_explorer([str(tmp_path / "two")], str(tmp_path / "nowhere"))
