"""Small data sets in the layouts of the real ones, made for tests."""

import gzip
import io
import pickle
import tarfile

import numpy as np
from PIL import Image

CLASSES = ["cat", "dog", "owl"]


def picture(seed, size=(12, 10), mode="RGB", format="PNG"):
    """The bytes of an image file."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(buffer, format)
    return buffer.getvalue()


def class_folders(root, classes=CLASSES, per_class=3, first_seed=0):
    for number, name in enumerate(classes):
        (root / name).mkdir(parents=True, exist_ok=True)
        for i in range(per_class):
            (root / name / f"{i}.png").write_bytes(picture(first_seed + 100 * number + i))
    return root


def image_folder(root, **options):
    class_folders(root / "train", **options)
    class_folders(root / "val", per_class=2, first_seed=1000)
    return root


def cifar10(root, num_train=20, num_test=10):
    folder = root / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for name, number in (("data_batch_1", num_train), ("data_batch_2", num_train), ("test_batch", num_test)):
        records = rng.integers(0, 256, (number, 3073), dtype=np.uint8)
        records[:, 0] %= 10
        (folder / f"{name}.bin").write_bytes(records.tobytes())
    (folder / "batches.meta.txt").write_text("\n".join(f"class{i}" for i in range(10)) + "\n\n")
    return folder


def cifar10_pickled(root):
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        batch = {b"data": rng.integers(0, 256, (4, 3072), dtype=np.uint8), b"labels": [0, 1, 2, 9]}
        (folder / name).write_bytes(pickle.dumps(batch, protocol=2))
    meta = {b"label_names": [f"class{i}".encode() for i in range(10)]}
    (folder / "batches.meta").write_bytes(pickle.dumps(meta, protocol=2))
    return folder


def idx(root, compressed=True, num=12):
    root.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    for part in ("train", "t10k"):
        images = rng.integers(0, 256, (num, 28, 28), dtype=np.uint8)
        labels = np.arange(num, dtype=np.uint8) % 10
        for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
            head = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
            data = head + array.tobytes()
            name = f"{part}-{kind}-ubyte" + (".gz" if compressed else "")
            (root / name).write_bytes(gzip.compress(data) if compressed else data)
    return root


def shards(root, label=lambda i: i % 3, names=("train-000", "train-001", "val-000"), below=""):
    for name, numbers in zip(names, (range(6), range(6, 12), range(20, 26)), strict=True):
        shard(root / f"{name}.tar", numbers, label, below)
    return root


def uneven_shards(root, sizes):
    """Training shards of those sizes, and one to judge by."""
    first = 0
    for number, count in enumerate(sizes):
        shard(root / f"train-{number:03}.tar", range(first, first + count))
        first += count
    shard(root / "val-000.tar", range(first, first + 7))
    return root


def shard(file, numbers, label=lambda i: i % 3, below=""):
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, "w") as tar:
        for i in numbers:
            for suffix, data in (("png", picture(i)), ("cls", str(label(i)).encode())):
                member = tarfile.TarInfo(f"{below}{i:06d}.{suffix}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))


def tiny_imagenet(root):
    wnids = ["n02", "n01"]
    for wnid in wnids:
        (root / "train" / wnid / "images").mkdir(parents=True)
        for i in range(3):
            (root / "train" / wnid / "images" / f"{wnid}_{i}.JPEG").write_bytes(
                picture(10 * int(wnid[1:]) + i, format="JPEG")
            )
    (root / "val" / "images").mkdir(parents=True)
    lines = []
    for i, wnid in enumerate(["n01", "n02", "n01"]):
        (root / "val" / "images" / f"val_{i}.JPEG").write_bytes(picture(500 + i, format="JPEG"))
        lines.append(f"val_{i}.JPEG\t{wnid}\t0\t0\t62\t62\n")
    (root / "val" / "val_annotations.txt").write_text("".join(lines))
    (root / "wnids.txt").write_text("\n".join(wnids) + "\n")
    return root
