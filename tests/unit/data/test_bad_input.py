"""Ten kinds of bad input: each ends in a clear sentence, or is converted as docs/how-to/own-images.md promises."""

import io
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ermoe.data.augment import Transform
from ermoe.data.decode import decode
from ermoe.data.images import open_images
from ermoe.errors import UserError
from ermoe.images.check import check
from ermoe.images.run import LabelledImages
from ermoe.retrieval.captions.catalogue import open_captions
from ermoe.train.compute import Compute
from ermoe.train.loader import Loader
from support import pictures as make


def encoded(image, format="PNG"):
    buffer = io.BytesIO()
    image.save(buffer, format)
    return buffer.getvalue()


def only_unreadable(root):
    """The one thing `check` finds wrong."""
    findings = check([open_images(root, "train"), open_images(root, "test")])
    assert not findings.leaked
    (problem,) = findings.unreadable
    return problem


def test_an_empty_folder(tmp_path):
    with pytest.raises(UserError, match="no class folders"):
        open_images(tmp_path, "train")
    (tmp_path / "train" / "cat").mkdir(parents=True)
    (tmp_path / "train" / "dog").mkdir(parents=True)
    with pytest.raises(UserError, match="there are no images in it"):
        open_images(tmp_path, "train")


def test_a_path_that_is_not_there_or_an_archive(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        open_images(tmp_path / "nothing", "train")
    (tmp_path / "cifar.tar.gz").touch()
    with pytest.raises(UserError, match="unpack it"):
        open_images(tmp_path / "cifar.tar.gz", "train")
    with pytest.raises(UserError, match="use 'train' or 'test'"):
        open_images("digits", "everything")


def test_only_one_class(tmp_path):
    make.class_folders(tmp_path / "train", classes=["cat"])
    with pytest.raises(UserError, match="only one class, 'cat'"):
        open_images(tmp_path, "train")


def test_a_corrupt_jpeg(tmp_path):
    make.image_folder(tmp_path)
    (tmp_path / "train" / "cat" / "bad.jpg").write_bytes(make.picture(7, (64, 64), format="JPEG")[:400])
    assert "bad.jpg cannot be decoded" in only_unreadable(tmp_path)
    images = open_images(tmp_path, "train")
    with pytest.raises(UserError, match=r"bad\.jpg cannot be decoded: .*; replace or remove it"):
        images.read(3)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_corrupt_image_is_one_sentence_also_from_a_worker(tmp_path, workers):
    make.image_folder(tmp_path)
    (tmp_path / "train" / "dog" / "bad.jpg").write_bytes(make.picture(7, (64, 64), format="JPEG")[:400])
    batches = Loader(Transform(8).of(open_images(tmp_path)), batch_size=3, compute=Compute(workers=workers)).epoch()
    assert len(next(batches)[0]) == 3, "what comes before it is delivered"
    with pytest.raises(UserError, match=r"^\S+bad\.jpg cannot be decoded: .*; replace or remove it$"):
        list(batches)


def test_a_file_of_another_format_named_like_an_image_starts_no_program(monkeypatch):
    started = []
    monkeypatch.setattr(subprocess, "Popen", lambda *arguments, **options: started.append(arguments))
    with pytest.raises(UserError, match=r"cat\.png cannot be decoded: whatever its name says, it is none of JPEG"):
        decode(encoded(Image.new("RGB", (8, 8)), "EPS"), "cat.png")
    assert started == []


def test_the_twins_that_macos_leaves_are_no_images(tmp_path):
    make.image_folder(tmp_path)
    before = len(open_images(tmp_path, "train"))
    (tmp_path / "train" / "cat" / "._0.png").write_bytes(b"\0\5\x16\7")
    assert len(open_images(tmp_path, "train")) == before


def test_a_truncated_binary_batch(tmp_path):
    file = make.cifar10(tmp_path) / "data_batch_2.bin"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"data_batch_2\.bin has .* truncated"):
        open_images(tmp_path, "train")


@pytest.mark.parametrize("compressed", [True, False])
def test_a_truncated_idx_file(tmp_path, compressed):
    make.idx(tmp_path, compressed)
    file = next(tmp_path.glob("train-images*"))
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(UserError, match="download it again"):
        open_images(tmp_path, "train")


@pytest.mark.parametrize("size", [0, 3, 4, 10, 15])
def test_an_idx_file_cut_inside_its_header(tmp_path, size):
    make.idx(tmp_path, compressed=False)
    file = tmp_path / "train-images-idx3-ubyte"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(UserError, match=r"train-images-idx3-ubyte is .*: download it again"):
        open_images(tmp_path, "train")


@pytest.mark.parametrize("size", [0, 512, 700, 1024, 2048, 3 * 1024])
def test_a_truncated_shard(tmp_path, size):
    """An image and its label take 512 + 512 and 512 + 512 bytes here: some of the cuts are between members."""
    make.shards(tmp_path)
    file = tmp_path / "train-001.tar"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(UserError, match=r"train-001\.tar .*copy it again"):
        open_images(tmp_path, "train")


def test_a_shard_damaged_in_the_middle(tmp_path):
    make.shards(tmp_path)
    file = tmp_path / "train-001.tar"
    data = bytearray(file.read_bytes())
    data[4096 : 4096 + 512] = bytes([255]) * 512
    file.write_bytes(data)
    with pytest.raises(UserError, match=r"train-001\.tar is truncated or damaged after 4,096 bytes"):
        open_images(tmp_path, "train")


def test_sixteen_bit_grey_is_scaled():
    values = np.array([[0, 257, 65535]], np.uint16)
    image = decode(encoded(Image.fromarray(values)), "x")
    assert image.tolist() == [[[0, 1, 255]]] * 3


def test_float_images_are_refused_because_nobody_knows_their_white():
    data = encoded(Image.fromarray(np.array([[0.0, 3.5]], np.float32)), "TIFF")
    with pytest.raises(UserError, match="convert it first"):
        decode(data, "x.tif")


def test_cmyk_palette_and_transparent_images_become_rgb():
    red = Image.new("RGB", (4, 4), (255, 0, 0))
    cmyk = decode(encoded(red.convert("CMYK"), "TIFF"), "x")
    palette = decode(encoded(red.convert("P")), "x")
    assert cmyk[:, 0, 0].tolist() == palette[:, 0, 0].tolist() == [255, 0, 0]
    clear = decode(encoded(Image.new("RGBA", (4, 4), (255, 0, 0, 0))), "x")
    assert clear[:, 0, 0].tolist() == [255, 255, 255]


def test_the_orientation_a_camera_noted_is_applied():
    image = Image.new("RGB", (6, 4))
    note = image.getexif()
    note[0x0112] = 6  # turned by a quarter
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", exif=note)
    assert decode(buffer.getvalue(), "x").shape == (3, 6, 4)


def test_a_label_out_of_range(tmp_path):
    file = make.cifar10(tmp_path) / "test_batch.bin"
    data = bytearray(file.read_bytes())
    data[2 * 3073] = 10
    file.write_bytes(data)
    with pytest.raises(UserError, match="image 2 has label 10, outside of the classes 0 to 9"):
        open_images(tmp_path, "test")


def test_a_shard_whose_label_is_no_class(tmp_path):
    make.shards(tmp_path, label=lambda i: "owl" if i == 4 else i % 3)
    with pytest.raises(UserError, match="not the number of a class"):
        open_images(tmp_path, "train")
    (tmp_path / "again").mkdir()
    make.shards(tmp_path / "again", label=lambda i: 7 if i > 20 else i % 3)
    with pytest.raises(UserError, match="has label 7, outside of the classes 0 to 2"):
        open_images(tmp_path / "again", "test")


def test_a_class_folder_only_in_val(tmp_path):
    make.image_folder(tmp_path)
    make.class_folders(tmp_path / "val", classes=["yak"])
    with pytest.raises(UserError, match=r"a class that .*train does not have, 'yak'"):
        open_images(tmp_path, "test")


def test_a_class_without_test_images_is_shown(tmp_path):
    make.image_folder(tmp_path)
    make.class_folders(tmp_path / "train", classes=["yak"])
    assert "1 of them without images here" in open_images(tmp_path, "test").summary


def test_an_unreadable_file(tmp_path, monkeypatch):
    make.image_folder(tmp_path)
    secret = tmp_path / "train" / "cat" / "1.png"
    _refuse(monkeypatch, secret)
    assert "1.png cannot be read: Permission denied" in only_unreadable(tmp_path)


@pytest.mark.parametrize(
    ("layout", "file"),
    [
        (make.cifar10, "cifar-10-batches-bin/data_batch_1.bin"),
        (make.cifar10, "cifar-10-batches-bin/batches.meta.txt"),
        (make.cifar10_pickled, "cifar-10-batches-py/data_batch_1"),
        (make.idx, "train-labels-idx1-ubyte.gz"),
        (make.tiny_imagenet, "wnids.txt"),
        (make.shards, "classes.txt"),
        (make.shards, "train-000.tar"),
    ],
)
def test_a_file_that_is_no_image_and_cannot_be_read(tmp_path, monkeypatch, layout, file):
    layout(tmp_path)
    (tmp_path / file).touch()
    _refuse(monkeypatch, tmp_path / file)
    with pytest.raises(UserError, match=rf"{Path(file).name} cannot be read.*Permission denied"):
        open_images(tmp_path, "train")


def test_a_table_of_labels_that_cannot_be_read(tmp_path, monkeypatch):
    table = make.tiny_imagenet(tmp_path) / "val" / "val_annotations.txt"
    table.write_bytes(b"val_0.JPEG\tn01\nval_1.JPEG\t\xe9\n")
    with pytest.raises(UserError, match=r"val_annotations\.txt is not UTF-8 text: byte 26, in line 2"):
        open_images(tmp_path, "test")
    _refuse(monkeypatch, table)
    with pytest.raises(UserError, match=r"val_annotations\.txt cannot be read: Permission denied"):
        open_images(tmp_path, "test")


@pytest.mark.parametrize("below", ["train", "train/cat", "val"])
def test_a_folder_that_cannot_be_listed(tmp_path, monkeypatch, below):
    make.image_folder(tmp_path)
    scandir = os.scandir

    def refuse(path):
        if Path(path) == tmp_path / below:
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(UserError, match=f"{below} cannot be read: Permission denied; look at"):
        open_images(tmp_path, "test" if below == "val" else "train")


@pytest.mark.parametrize("opener", [open_images, open_captions])
def test_a_folder_that_cannot_even_be_looked_at(tmp_path, monkeypatch, opener):
    stat = os.stat

    def refuse(path, **options):
        if Path(path).parent == tmp_path:
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, **options)

    monkeypatch.setattr(os, "stat", refuse)
    with pytest.raises(UserError, match=f"{tmp_path}/.* cannot be read: Permission denied"):
        opener(tmp_path / "set")


def _refuse(monkeypatch, secret):
    """Permissions do not stop the superuser, who may be running this."""
    real = io.open

    def refuse(path, *rest, **options):
        if path == secret or path == str(secret):
            raise PermissionError(13, "Permission denied", str(secret))
        return real(path, *rest, **options)

    monkeypatch.setattr(io, "open", refuse)
    monkeypatch.setattr("builtins.open", refuse)
    monkeypatch.setattr("tarfile.bltn_open", refuse)


def test_a_zero_byte_file(tmp_path):
    make.image_folder(tmp_path)
    (tmp_path / "val" / "dog" / "nothing.png").touch()
    assert "nothing.png is empty (0 bytes)" in only_unreadable(tmp_path)


def test_a_loop_of_folders(tmp_path):
    make.image_folder(tmp_path)
    os.symlink(tmp_path / "train" / "cat", tmp_path / "train" / "cat" / "more")
    with pytest.raises(UserError, match=r"more is a symbolic link .* endless loop"):
        open_images(tmp_path, "train")


def test_a_link_to_itself_is_counted(tmp_path):
    make.image_folder(tmp_path)
    os.symlink("me.png", tmp_path / "train" / "cat" / "me.png")
    assert "me.png cannot be read: Too many levels of symbolic links" in only_unreadable(tmp_path)


def test_other_files_are_counted(tmp_path):
    make.image_folder(tmp_path)
    (tmp_path / "train" / "cat" / "notes.txt").touch()
    (tmp_path / "train" / "loose.png").touch()
    assert "2 other files ignored" in open_images(tmp_path, "train").summary


def test_class_folders_that_are_links_to_nowhere_are_counted(tmp_path):
    make.image_folder(tmp_path)
    os.symlink("self", tmp_path / "train" / "self")
    os.symlink(tmp_path / "gone", tmp_path / "train" / "yak")
    train = open_images(tmp_path, "train")
    assert "2 broken links ignored" in train.summary
    assert train.classes == make.CLASSES
    shutil.copytree(tmp_path / "train" / "cat", tmp_path / "gone")
    assert open_images(tmp_path, "train").classes == [*make.CLASSES, "yak"]


def test_loose_images_without_class_folders(tmp_path):
    (tmp_path / "a.png").write_bytes(make.picture(0))
    with pytest.raises(UserError, match="holds 1 image files and no class folders"):
        open_images(tmp_path, "train")


def test_classes_that_do_not_agree(tmp_path):

    make.cifar10(tmp_path)
    with pytest.raises(UserError, match="classes are not those of the training set"):
        LabelledImages("two", open_images("digits"), open_images(tmp_path, "test"))
