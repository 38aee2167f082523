"""Every format becomes the same schema: images in order, texts image by image, an id for each image."""

import json

import pytest
import torch

from ermoe.errors import UserError
from ermoe.retrieval.captions.catalogue import open_captions
from ermoe.retrieval.captions.schema import id_hash, id_hashes, named_id
from support import captions as layouts


def check(captions, num_images, num_texts):
    assert len(captions) == num_images == len(captions.images) == len(set(captions.ids))
    assert len(captions.texts) == num_texts == len(captions.text_to_image_T)
    assert captions.text_to_image_T.unique().numel() == num_images
    assert captions.images.read(num_images - 1).shape == (3, 36, 40)
    owners = captions.text_to_image_T.tolist()
    for image in range(num_images):
        owned = [text for text, owner in zip(captions.texts, owners, strict=True) if owner == image]
        assert owned == captions.texts_of(image)


def test_flickr_token_file_with_split_lists(tmp_path):
    found = {split: open_captions(layouts.flickr8k(tmp_path), split=split) for split in ("train", "dev", "test")}
    check(found["train"], 6, 30)
    check(found["test"], 3, 15)
    assert found["test"].texts[:2] == [layouts.caption(8, 0), layouts.caption(8, 1)]
    assert found["test"].ids[0] == "flickr:1000268209"
    assert "1 images of the file are in no split" in found["dev"].summary
    assert not set(found["train"].ids) & set(found["test"].ids)


def test_coco_json_keeps_the_order_of_annotation_ids(tmp_path):
    captions = open_captions(layouts.coco(tmp_path), split="all")
    check(captions, 4, 24)
    assert captions.texts_of(2) == layouts.captions_of(2, 6)
    assert captions.ids[0] == "coco:391895"


def test_coco_2014_names_and_folders(tmp_path):
    names = ["COCO_val2014_000000000007.jpg"]
    layouts.files(tmp_path / "val2014", names)
    content = {"images": [{"id": 7, "file_name": names[0]}], "annotations": [{"id": 1, "image_id": 7, "caption": "x"}]}
    (tmp_path / "captions_val2014.json").write_text(json.dumps(content))
    assert open_captions(tmp_path / "captions_val2014.json", split="all").ids == ["coco:7"]


def test_karpathy_json_has_splits_and_six_captions(tmp_path):
    layouts.karpathy(tmp_path)
    train, test = (open_captions(tmp_path, split=split) for split in ("train", "test"))
    check(train, 3, 15)  # train and restval
    check(test, 2, 11)
    assert test.num_texts_I.tolist() == [6, 5]


@pytest.mark.parametrize("nested", [True, False])
def test_plain_lists_with_one_caption_or_several_an_entry(tmp_path, nested):
    layouts.files(tmp_path, ["a.jpg", "b.jpg"])
    several = [{"image": name, "caption": layouts.captions_of(i, 2)} for i, name in enumerate(("a.jpg", "b.jpg"))]
    single = [{"image": entry["image"], "caption": text} for entry in several for text in entry["caption"]]
    (tmp_path / "list.json").write_text(json.dumps(several if nested else single))
    found = open_captions(tmp_path, split="all")
    check(found, 2, 4)
    assert found.num_texts_I.tolist() == [2, 2]


@pytest.mark.parametrize(
    "rows",
    [
        "image,caption\na.jpg,one, with a comma\nb.jpg,two\na.jpg,three\n",
        'image,caption\na.jpg,"one, with a comma"\nb.jpg,two\na.jpg,three\n',
        "image_name| comment_number| comment\na.jpg| 0| one, with a comma\nb.jpg| 0| two\na.jpg| 1| three\n",
        "filepath\ttitle\na.jpg\tone, with a comma\nb.jpg\ttwo\na.jpg\tthree\n",
        "a.jpg,one, with a comma\nb.jpg,two\na.jpg,three\n",
        "a.jpg#0\tone, with a comma\nb.jpg#0\ttwo\na.jpg#1\tthree\n",
        'filename,raw,split\na.jpg,"[""one, with a comma"", ""three""]",test\nb.jpg,"[""two""]",test\n',
    ],
    ids=["csv", "quoted", "bars", "tabs", "no-header", "token", "json-cells"],
)
def test_tables_of_all_kinds(tmp_path, rows):
    layouts.files(tmp_path, ["a.jpg", "b.jpg"])
    (tmp_path / "captions.csv").write_text(rows)
    captions = open_captions(tmp_path, split="all")
    check(captions, 2, 3)
    assert [captions.texts_of(image) for image in (0, 1)] == [["one, with a comma", "three"], ["two"]]


def test_webdataset_shards(tmp_path):
    layouts.shards(tmp_path, "train", count=4)
    captions = open_captions(layouts.shards(tmp_path), split="test")
    check(captions, 3, 6)
    assert captions.texts_of(2) == layouts.captions_of(2, 3)
    assert len(open_captions(tmp_path, split="all")) == 7


def test_shards_named_by_a_word_and_archives_that_are_none(tmp_path):
    layouts.shards(tmp_path, "coco-test")
    layouts.shards(tmp_path / "training", "a")
    (tmp_path / "backup.tar").touch()
    check(open_captions(tmp_path, split="test"), 3, 6)
    with pytest.raises(UserError, match="none for train"):
        open_captions(tmp_path, split="train")
    layouts.shards(tmp_path / "train", "a", count=4)
    assert len(open_captions(tmp_path, split="train")) == 4


def test_an_image_without_a_telling_name_is_known_by_its_bytes(tmp_path):
    layouts.files(tmp_path / "one", ["a.jpg", "b.jpg"])
    layouts.files(tmp_path / "two", ["other.jpg"])
    for folder, name in (("one", "a.jpg"), ("one", "b.jpg"), ("two", "other.jpg")):
        with open(tmp_path / folder / "captions.csv", "a") as table:
            table.write(f"{name},text\n")
    one, two = (open_captions(tmp_path / name, split="all") for name in ("one", "two"))
    assert two.ids[0] == one.ids[0] != one.ids[1]


def test_one_photograph_has_one_id_in_all_releases():
    assert named_id("COCO_train2014_000000000009.jpg") == named_id("train2017/000000000009.jpg") == "coco:9"
    assert named_id("36979.jpg") is None, "five digits are too few for a number at Flickr"
    assert named_id("0001234567.jpg") is None
    hashes = id_hashes(["b", "a", "b"])
    assert hashes.tolist() == sorted({id_hash("a"), id_hash("b")})
    assert bool((hashes >= 0).all())


def test_one_text_an_image_follows_from_seed_and_epoch(tmp_path):
    captions = open_captions(layouts.flickr8k(tmp_path), split="train")
    image_B = torch.arange(6).numpy()
    first, same, other = (captions.one_text_each(image_B, seed=1, epoch=epoch) for epoch in (0, 0, 1))
    assert (first == same).all()
    assert (first != other).any()
    assert (captions.text_to_image_T[torch.from_numpy(first)] == torch.arange(6)).all()
    assert (captions.one_text_each(image_B[3:], seed=1, epoch=0) == first[3:]).all(), "whoever asks, and whenever"
    drawn = {int(t) for epoch in range(60) for t in captions.one_text_each(image_B, seed=1, epoch=epoch)}
    assert drawn == set(range(30)), "every caption gets its turn"


HOSTILE = {
    "nothing.json": ("[]", "names no image"),
    "number.json": ('[{"image": 5, "caption": "a"}]', "not text"),
    "half.json": ('[{"image": "a.jpg", "caption": "\\ud83d"}]', "half of a character"),
    "deep.json": ("[" * 100_000, "nested too deeply"),
    "id.json": (
        '{"images": [{"id": 1, "file_name": "a.jpg"}], "annotations": [{"id": "x", "image_id": 1}]}',
        "damaged",
    ),
    "two_splits.csv": ("image,caption,split\na.jpg,one,train\na.jpg,two,test\n", "decide for one"),
    "strange.csv": ("image,caption,split\na.jpg,one,train\nb.jpg,two,exam\n", "in the split 'exam'"),
    "open.csv": ('image,caption\na.jpg,"a dog\nb.jpg,runs"\n', "not closed"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_get_a_sentence(name, tmp_path):
    content, complaint = HOSTILE[name]
    (tmp_path / name).write_text(content)
    split = "train" if name == "strange.csv" else "all"
    with pytest.raises(UserError, match=complaint) as raised:
        open_captions(tmp_path / name, split=split)
    assert "an entry lacks" not in str(raised.value) or name == "id.json"


def test_splits_may_be_written_large_and_old_line_ends_are_read(tmp_path):
    layouts.flickr8k(tmp_path)
    first, second = sorted(path.name for path in (tmp_path / "images").glob("*.jpg"))[:2]
    table = tmp_path / "own.csv"
    table.write_bytes(f"image,caption,split\r{first},a dog,Train\r{second},a cat,\r".encode())
    found = open_captions(table, split="train", images=tmp_path / "images")
    assert found.texts == ["a dog"]
    assert "1 images of the file are in no split" in found.summary


def test_a_named_protocol_wants_to_know_its_split_and_no_image_twice(tmp_path):
    layouts.flickr8k(tmp_path, train=2, dev=2, test=1000)
    listing = tmp_path / "Flickr_8k.testImages.txt"
    names = listing.read_text().splitlines()
    listing.write_text("\n".join([*names[:-1], names[0]]))
    with pytest.raises(UserError, match="twice"):
        open_captions(tmp_path, "flickr8k-1k", "test")
    for other in tmp_path.glob("Flickr_8k.*Images.txt"):
        other.unlink()
    with pytest.raises(UserError, match="does not say which of its images"):
        open_captions(tmp_path, "flickr8k-1k", "test")
