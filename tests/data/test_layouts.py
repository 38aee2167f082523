"""Every layout is recognised and read as what it is."""

import hashlib
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from data import make
from ermoe.data import cifar
from ermoe.data.catalogue import open_images
from ermoe.data.check import check
from ermoe.data.decode import decode
from ermoe.errors import UserError


def test_cifar_binary_is_read_record_by_record(tmp_path):
    folder = make.cifar10(tmp_path)
    images = open_images(tmp_path, "train")
    assert "CIFAR-10 (binary release)" in images.found
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
    assert "CIFAR-100" in images.found


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
    with pytest.raises(pickle.UnpicklingError, match="not part of an array"):
        open_images(tmp_path, "test")
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize("compressed", [True, False])
def test_idx_files(tmp_path, compressed):
    folder = make.idx(tmp_path / "fashion-mnist", compressed)
    images = open_images(folder, "test")
    assert "Fashion-MNIST" in images.found
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
    assert "10% held out" in test.found


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
    assert "2 shards" in images.found
    assert torch.equal(images.read(8), decode(make.picture(8), ""))
    assert images.label_N[8] == 8 % 3
    assert open_images(tmp_path, "test").classes == images.classes


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


@pytest.mark.skipif("ERMOE_DATA" not in os.environ, reason="needs ERMOE_DATA, a folder with the packed data sets")
def test_the_real_cifar_10(tmp_path):
    unpack = Path(os.environ["ERMOE_DATA"], "unpack.py")
    subprocess.run([sys.executable, str(unpack), "cifar10", str(tmp_path)], check=True)
    test = open_images(tmp_path, "test")
    assert set(test.class_counts().values()) == {1000}
    assert test.classes[0] == "airplane"
    assert 100 < test.image_NCHW.float().mean() < 140
