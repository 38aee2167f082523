"""Small captioned data sets in the layouts of the real ones, made for tests."""

import io
import json
import tarfile

from support.pictures import picture

WORDS = ("red", "green", "blue", "grey", "white", "black")
THINGS = ("dog", "cat", "car", "boat", "tree", "house", "child")


def caption(image, number):
    return f"a {WORDS[image % 6]} {THINGS[image % 7]}, seen {number} times"


def captions_of(image, count=5):
    return [caption(image, number) for number in range(count)]


def files(root, names, size=(40, 36)):
    for seed, name in enumerate(names):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(picture(seed, size=size, format="JPEG"))


def flickr8k(root, train=6, dev=2, test=3, unused=1):
    """Token file, split lists and images; returns the folder."""
    names = [f"{1000268201 + i}_{i:010x}.jpg" for i in range(train + dev + test + unused)]
    files(root / "images", names)
    token = "".join(f"{name}#{k}\t{caption(i, k)}\n" for i, name in enumerate(names) for k in range(5))
    (root / "Flickr8k.token.txt").write_text(token)
    parts = {"train": names[:train], "dev": names[train : train + dev], "test": names[train + dev :][:test]}
    for split, own in parts.items():
        (root / f"Flickr_8k.{split}Images.txt").write_text("\n".join(own) + "\n")
    return root


def coco(root, count=4, captions=6, year="val2017"):
    names = [f"{391895 + i:012d}.jpg" for i in range(count)]
    files(root / year, names)
    images = [{"id": 391895 + i, "file_name": name} for i, name in enumerate(names)]
    notes = [
        {"id": 10 * k + i, "image_id": 391895 + i, "caption": f" {caption(i, k)}\n"}
        for i in range(count)
        for k in range(captions)
    ]
    (root / "annotations").mkdir(exist_ok=True)
    content = {"images": images, "annotations": notes[::-1]}
    (root / "annotations" / f"captions_{year}.json").write_text(json.dumps(content))
    return root


def karpathy(root, name="dataset_coco.json"):
    splits = ["train", "restval", "val", "test", "train", "test"]
    listed = []
    for i, split in enumerate(splits):
        file = f"COCO_val2014_{391895 + i:012d}.jpg"
        files(root, [f"val2014/{file}"])
        sentences = [{"raw": caption(i, k)} for k in range(5 + (i == 3))]
        listed.append({"filepath": "val2014", "filename": file, "split": split, "sentences": sentences})
    (root / name).write_text(json.dumps({"images": listed, "dataset": "coco"}))
    return root


def shards(root, split="test", count=3, suffix="txt"):
    root.mkdir(parents=True, exist_ok=True)
    with tarfile.open(root / f"{split}-000.tar", "w") as tar:
        for i in range(count):
            _add(tar, f"s{i:04d}.jpg", picture(i, size=(40, 36), format="JPEG"))
            _add(tar, f"s{i:04d}.{suffix}", "\n".join(captions_of(i, 1 + i)).encode())
    return root


def _add(tar, name, data):
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))
