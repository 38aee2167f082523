"""Every layout is recognised and read as what it is."""

import hashlib
import os
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from ermoe.data import cifar, shards
from ermoe.data.decode import decode
from ermoe.data.images import open_images
from ermoe.errors import UserError
from ermoe.images.check import _PORTION, check
from support import pictures as make


def test_cifar_binary_is_read_record_by_record(tmp_path):
    folder = make.cifar10(tmp_path)
    images = open_images(tmp_path, "train")
    assert "CIFAR-10 (binary release)" in images.summary
    assert len(images) == 40
    record = np.frombuffer((folder / "data_batch_2.bin").read_bytes(), np.uint8).reshape(-1, 3073)[3]
    assert images.label_N[23] == record[0]
    assert torch.equal(images.read(23), torch.from_numpy(record[1:].reshape(3, 32, 32).copy()))
    assert len(open_images(folder, "test")) == 10


def test_cifar_100_takes_the_fine_label(tmp_path):
    records = np.zeros((5, 3074), np.uint8)
    records[:, 0], records[:, 1] = 7, np.arange(5)
    for name in ("train", "test"):
        (tmp_path / f"{name}.bin").write_bytes(records.tobytes())
    (tmp_path / "fine_label_names.txt").write_text("\n".join(f"fine{i}" for i in range(100)))
    images = open_images(tmp_path, "test")
    assert images.label_N.tolist() == [0, 1, 2, 3, 4]
    assert "CIFAR-100" in images.summary


def test_pickled_cifar_needs_the_published_checksums(tmp_path, monkeypatch):
    folder = make.cifar10_pickled(tmp_path)
    with pytest.raises(UserError, match="without the published checksum"):
        open_images(tmp_path, "train")
    sums = {file.name: hashlib.md5(file.read_bytes()).hexdigest() for file in folder.iterdir()}
    monkeypatch.setattr(cifar, "published_checksums", lambda title: sums)
    images = open_images(tmp_path, "train")
    assert (len(images), images.label_N[3].item(), images.classes[1]) == (20, 9, "class1")


def test_even_with_a_matching_checksum_a_pickle_cannot_run_code(tmp_path, monkeypatch):
    folder = make.cifar10_pickled(tmp_path)

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "evil"),)

    (folder / "test_batch").write_bytes(pickle.dumps({b"data": Evil()}, protocol=2))
    sums = {file.name: hashlib.md5(file.read_bytes()).hexdigest() for file in folder.iterdir()}
    monkeypatch.setattr(cifar, "published_checksums", lambda title: sums)
    with pytest.raises(UserError, match="is damaged"):
        open_images(tmp_path, "test")
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize("compressed", [True, False])
def test_idx_files(tmp_path, compressed):
    folder = make.idx(tmp_path / "fashion-mnist", compressed)
    images = open_images(folder, "test")
    assert "Fashion-MNIST" in images.summary
    assert images.read(0).shape == (3, 28, 28)
    assert images.classes[int(images.label_N[9])] == "ankle boot"


def test_image_folder_with_splits(tmp_path):
    make.image_folder(tmp_path)
    train, test = open_images(tmp_path, "train"), open_images(tmp_path, "test")
    assert train.classes == test.classes == make.CLASSES
    assert (len(train), len(test)) == (9, 6)
    assert torch.equal(test.read(3), decode((tmp_path / "val" / "dog" / "1.png").read_bytes(), ""))


def test_class_folders_without_splits_hold_out_the_same_tenth_every_time(tmp_path):
    make.class_folders(tmp_path, per_class=40)
    train, test = open_images(tmp_path, "train"), open_images(tmp_path, "test")
    names = [{split.name(i) for i in range(len(split))} for split in (train, test)]
    assert not names[0] & names[1]
    assert len(train) + len(test) == 120
    assert 3 <= len(test) <= 25
    assert "10% held out" in test.summary


def test_file_names_need_not_be_utf_8(tmp_path):
    make.class_folders(tmp_path, per_class=1)
    strange = os.fsdecode(b"menu\xe9.png")
    for number, name in enumerate(make.CLASSES):
        for i in range(9):
            (tmp_path / name / f"{i}{strange}").write_bytes(make.picture(1000 + 10 * number + i))
    train, test = open_images(tmp_path, "train"), open_images(tmp_path, "test")
    names = [split.name(i) for split in (train, test) for i in range(len(split))]
    assert len(names) == 30
    assert sum(name.endswith(r"menu\xe9.png") for name in names) == 27
    assert check([train, test]).is_clean
    (tmp_path / "cat" / strange).touch()
    broken = check([open_images(tmp_path, split) for split in ("train", "test")])
    assert rb"menu\xe9.png is empty" in broken.report().encode("utf-8")


def test_tiny_imagenet_reads_its_table_of_labels(tmp_path):
    make.tiny_imagenet(tmp_path)
    train, test = open_images(tmp_path, "train"), open_images(tmp_path, "test")
    assert train.classes == ["n02", "n01"]
    assert [Path(test.name(i)).name for i in range(3)] == ["val_1.JPEG", "val_0.JPEG", "val_2.JPEG"]
    assert test.label_N.tolist() == [0, 1, 1]


def test_shards_are_read_at_random(tmp_path):
    make.shards(tmp_path)
    images = open_images(tmp_path, "train")
    assert len(images) == 12
    assert "2 shards" in images.summary
    assert torch.equal(images.read(8), decode(make.picture(8), ""))
    assert images.label_N[8] == 8 % 3
    assert open_images(tmp_path, "test").classes == images.classes


@pytest.mark.parametrize(
    ("names", "below"),
    [
        (("train-000", "train-001", "val-000"), "./"),
        (("train-000", "train-001", "val-000"), "part.1/"),
        (("imagenet1k-train-0000", "imagenet1k-train-0001", "imagenet1k-validation-0000"), ""),
        (("train/0000", "train/0001", "val/0000"), ""),
    ],
)
def test_shards_as_people_name_and_pack_them(tmp_path, names, below):
    make.shards(tmp_path, names=names, below=below)
    train, test = open_images(tmp_path, "train"), open_images(tmp_path, "test")
    assert (len(train), len(test)) == (12, 6)
    assert torch.equal(train.read(8), decode(make.picture(8), ""))
    assert test.label_N.tolist() == [i % 3 for i in range(20, 26)]


def test_shards_are_indexed_once(tmp_path, monkeypatch):
    make.shards(tmp_path)
    opened, tar_open = [], tarfile.open
    monkeypatch.setattr(tarfile, "open", lambda file, *rest: opened.append(Path(file).name) or tar_open(file, *rest))
    train, test = open_images(tmp_path, "train"), open_images(tmp_path, "test")
    assert train.classes == test.classes == ["0", "1", "2"]
    assert sorted(opened) == ["train-000.tar", "train-001.tar", "val-000.tar"]
    make.shards(tmp_path, label=lambda i: i % 4)
    opened.clear()
    assert open_images(tmp_path, "test").classes == ["0", "1", "2", "3"], "a shard that changed is indexed anew"


def test_classes_txt_names_the_classes_of_shards(tmp_path):
    make.shards(tmp_path, names=("train/0", "train/1", "val/0"))
    (tmp_path / "classes.txt").write_text("cat\ndog\nowl\nyak\n\n")
    assert open_images(tmp_path, "test").classes == [*make.CLASSES, "yak"]


def test_archives_beside_class_folders_are_not_shards(tmp_path):
    make.image_folder(tmp_path)
    for name in ("ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar", "train/n01440764.tar"):
        (tmp_path / name).touch()
    assert (len(open_images(tmp_path, "train")), len(open_images(tmp_path, "test"))) == (9, 6)
    make.class_folders(tmp_path / "unsplit")
    (tmp_path / "unsplit" / "backup.tar").touch()
    assert "; 1 other files ignored" in open_images(tmp_path / "unsplit", "train").summary


def test_of_val_and_test_shards_val_is_taken(tmp_path):
    for name in ("set-train-0.tar", "val-0.tar", "test-0.tar", "trainer-0.tar", "train-0.tar.gz"):
        (tmp_path / name).touch()
    found = shards.find(tmp_path)
    assert {split: [file.name for file in files] for split, files in found.items()} == {
        "train": ["set-train-0.tar"],
        "test": ["val-0.tar"],
    }


def test_check_finds_what_is_wrong(tmp_path):
    make.image_folder(tmp_path)
    (tmp_path / "val" / "owl" / "copy.png").write_bytes((tmp_path / "train" / "cat" / "0.png").read_bytes())
    (tmp_path / "train" / "cat" / "again.png").write_bytes((tmp_path / "train" / "cat" / "0.png").read_bytes())
    (tmp_path / "train" / "dog" / "broken.jpg").write_bytes(make.picture(1, format="JPEG")[:100])
    findings = check([open_images(tmp_path, "train"), open_images(tmp_path, "test")])
    assert not findings.is_clean
    assert [Path(b).name for _, b in findings.leaked] == ["copy.png"]
    assert [Path(b).name for _, b in findings.repeated] == ["again.png"]
    assert len(findings.unreadable) == 1
    assert "broken.jpg cannot be decoded" in findings.report()
    assert findings.class_counts["train"] == {"cat": 4, "dog": 4, "owl": 3}


def test_check_reads_any_number_of_images_in_portions(capsys):
    images = open_images("digits")
    assert len(images) > _PORTION, "so that there is more than one"
    findings = check([images])
    assert sum(findings.sizes.values()) == sum(findings.class_counts["train"].values()) == len(images)
    assert capsys.readouterr() == ("", ""), "the bar is for terminals only"
