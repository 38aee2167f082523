"""Protocols are named, sized and never mixed; what is wrong with a caption file is said in a sentence."""

import os
from pathlib import Path

import pytest

from ermoe.errors import UserError
from ermoe.retrieval.captions.catalogue import open_captions
from ermoe.retrieval.captions.files import read_annotations
from ermoe.retrieval.captions.protocols import PROTOCOLS
from support import captions as layouts

DATA = os.environ.get("ERMOE_DATA")
needs_data = pytest.mark.skipif(not DATA, reason="set ERMOE_DATA to the folder of test data")


@pytest.mark.parametrize("name", [name for name in PROTOCOLS if name != "custom"])
def test_a_wrong_number_of_images_is_refused_with_both_numbers(tmp_path, name):
    layouts.flickr8k(tmp_path)
    layouts.coco(tmp_path)
    layouts.karpathy(tmp_path)
    for file in ("results_20130124.token", "flickr30k_test_karpathy.txt"):
        (tmp_path / file).write_text((tmp_path / "Flickr8k.token.txt").read_text())
    images, captions = PROTOCOLS[name].sizes["test"]
    with pytest.raises(UserError, match=f"images with .* captions .*{name} is {images:,} with {captions:,}"):
        open_captions(tmp_path, name)


def test_sizes_are_those_that_were_published():
    sizes = {name: protocol.sizes["test"] for name, protocol in PROTOCOLS.items() if name != "custom"}
    assert sizes == {
        "coco-karpathy-5k": (5_000, 25_010),
        "coco-val2017-5k": (5_000, 25_000),
        "flickr30k-karpathy-1k": (1_000, 5_000),
        "flickr30k-full-31k": (31_783, 158_915),
        "flickr8k-1k": (1_000, 5_000),
    }
    assert sum(count for count, _ in PROTOCOLS["coco-karpathy-5k"].sizes.values()) == 123_287
    assert sum(count for _, count in PROTOCOLS["coco-karpathy-5k"].sizes.values()) == 616_767


def test_unknown_protocols_and_splits(tmp_path):
    with pytest.raises(UserError, match="no protocol 'flickr'"):
        open_captions(tmp_path, "flickr")
    with pytest.raises(UserError, match="no split 'train'"):
        open_captions(tmp_path, "flickr30k-full-31k", "train")
    with pytest.raises(UserError, match="does not exist"):
        open_captions(tmp_path / "nowhere")
    with pytest.raises(UserError, match="no caption file for flickr8k-1k"):
        open_captions(tmp_path, "flickr8k-1k")
    with pytest.raises(UserError, match="one caption file"):
        open_captions(tmp_path)


def test_missing_images_are_counted_and_named(tmp_path):
    layouts.flickr8k(tmp_path, test=20)
    gone = sorted((tmp_path / "images").iterdir())[9]
    gone.unlink()
    with pytest.raises(UserError, match=f"1 of the 20 images .* the first is {gone.name}"):
        open_captions(tmp_path)
    with pytest.raises(UserError, match="none of the 20 images"):
        open_captions(tmp_path, images=tmp_path / "elsewhere")


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"a.jpg,d\xe9j\xe0\n", r"not UTF-8 text: byte 7, in line 1, is 0xe9"),
        (b"a.jpg,one\nb.jpg,   \n", r"line 2, image b.jpg: a caption is empty"),
        (b"filepath\ttitle\na.jpg\n", r"line 2: 1 columns instead of 2"),
        (b"a.jpg#0\tone\nb.jpg two\n", r"line 2: .* is not NAME#NUMBER"),
        (b"name,words\na.jpg,one\n", r"columns name, words: need one of"),
        (b"", r"is empty"),
        (b"a dog\n", r"no tab, bar or comma"),
    ],
)
def test_a_damaged_table_is_told_in_one_sentence(tmp_path, content, complaint):
    layouts.files(tmp_path, ["a.jpg", "b.jpg"])
    (tmp_path / "captions.csv").write_bytes(content)
    with pytest.raises(UserError, match=complaint):
        open_captions(tmp_path, split="all")


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ('{"images": [', r"no valid JSON \(line 1"),
        ('{"a": 1}', "no caption file"),
        ('[{"image": "a.jpg"}]', "lacks 'caption'"),
        ('[{"image": "a.jpg", "caption": 3}]', "a caption is 3, not text"),
        ('[{"image": "a.jpg", "caption": []}]', "a.jpg has no caption"),
        ('{"images": [{"id": 1, "file_name": "a.jpg"}], "annotations": []}', "a.jpg has no caption"),
        ('{"images": [], "annotations": [{"id": 1, "image_id": 5, "caption": "x"}]}', "image 5, which is not listed"),
        ('{"images": [{"filename": "a.jpg", "sentences": [{"raw": ""}]}]}', "a caption is empty"),
    ],
)
def test_a_damaged_json_is_told_in_one_sentence(tmp_path, content, complaint):
    layouts.files(tmp_path, ["a.jpg"])
    (tmp_path / "captions.json").write_text(content)
    with pytest.raises(UserError, match=complaint):
        open_captions(tmp_path, split="all")


def test_a_list_that_names_an_image_without_captions(tmp_path):
    layouts.flickr8k(tmp_path)
    with open(tmp_path / "Flickr_8k.testImages.txt", "a") as names:
        names.write("1234567890_0123456789.jpg\n")
    with pytest.raises(UserError, match=r"has no caption for 1234567890_0123456789\.jpg"):
        open_captions(tmp_path)


def test_shards_that_lack_a_half_or_a_split(tmp_path):
    layouts.shards(tmp_path / "a", suffix="cls")
    with pytest.raises(UserError, match=r"lacks its image or \.txt file"):
        open_captions(tmp_path / "a")
    with pytest.raises(UserError, match="none for train"):
        open_captions(layouts.shards(tmp_path / "b"), split="train")


@needs_data
def test_the_real_captions_of_val2017_have_the_size_of_their_protocol():
    listed = read_annotations(Path(DATA, "coco_captions_val2017.json.gz"))
    protocol = PROTOCOLS["coco-val2017-5k"]
    counts = [len(own.captions) for own in listed]
    assert (len(listed), sum(min(count, 5) for count in counts)) == protocol.sizes["test"]
    assert sum(counts) == 25_014, "a few images have more than five"
