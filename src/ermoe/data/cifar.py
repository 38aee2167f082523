"""CIFAR-10 and CIFAR-100, in the binary release or, where its published checksums match, the pickled one."""

from __future__ import annotations

import hashlib
import io
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ermoe.data.images import ImagesInMemory
from ermoe.errors import UserError
from ermoe.files import read_bytes, read_text

_PIXELS = 3 * 32 * 32
_UNPACK = "unpack the whole archive"


@dataclass(frozen=True, slots=True)
class _Release:
    """Where one of the two sets keeps what; a binary record is ``label_bytes`` labels, the last one counts."""

    title: str
    num_classes: int
    label_bytes: int
    class_file: str
    train: tuple[str, ...]
    test: str
    label_key: str
    meta: str
    names_key: str


_BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
_RELEASES = (
    _Release("CIFAR-10", 10, 1, "batches.meta.txt", _BATCHES, "test_batch", "labels", "batches.meta", "label_names"),
    _Release(
        "CIFAR-100", 100, 2, "fine_label_names.txt", ("train",), "test", "fine_labels", "meta", "fine_label_names"
    ),
)
_FOLDERS = ("cifar-10-batches-bin", "cifar-100-binary", "cifar-10-batches-py", "cifar-100-python")


def find(path: Path) -> tuple[Path, _Release, str] | None:
    """The folder, the release and its form ("binary" or "pickled") that lie at or directly below ``path``."""
    for folder in (path, *(path / name for name in _FOLDERS)):
        for release in _RELEASES:
            if (folder / f"{release.test}.bin").is_file() and (folder / release.class_file).is_file():
                return folder, release, "binary"
            if (folder / release.test).is_file() and (folder / release.meta).is_file():
                return folder, release, "pickled"
    return None


def read(folder: Path, release: _Release, form: str, split: str) -> ImagesInMemory:
    """One split. A training set of which some batch files are missing is taken as it is, and its summary says so."""
    if form == "binary":
        names = [f"{stem}.bin" for stem in (release.train if split == "train" else (release.test,))]
        files = [folder / name for name in names if (folder / name).is_file()]
        if not files:
            raise UserError(f"{folder} has no {names[0]}: unpack the whole archive of {release.title}")
        pixels, labels = zip(*(_binary(file, release.label_bytes) for file in files), strict=True)
        classes = read_text(folder / release.class_file, _UNPACK).split()
    else:
        pixels, labels, classes = _pickled(folder, release, split)
    image_NCHW = torch.from_numpy(np.concatenate(pixels).reshape(-1, 3, 32, 32))
    label_N = torch.from_numpy(np.concatenate(labels).astype(np.int64))
    if len(classes) != release.num_classes:
        raise UserError(f"{folder} names {len(classes)} classes instead of {release.num_classes}: unpack it anew")
    summary = f"{release.title} ({form} release) in {folder}, {split}: {len(label_N):,} images, {len(classes)} classes"
    if split == "train" and len(label_N) < 50_000:
        summary += f", {len(label_N) / 50_000:.0%} of the full training set"
    return ImagesInMemory(image_NCHW, summary=summary, split=split, classes=classes, label_N=label_N)


def _binary(file: Path, label_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    data = np.frombuffer(read_bytes(file, _UNPACK), np.uint8)
    record = label_bytes + _PIXELS
    if len(data) == 0 or len(data) % record:
        raise UserError(
            f"{file} has {len(data):,} bytes, which is no whole number of {record}-byte records: it is truncated; "
            "unpack the archive again"
        )
    record_NR = data.reshape(-1, record)
    return record_NR[:, label_bytes:], record_NR[:, label_bytes - 1]


def _pickled(folder: Path, release: _Release, split: str) -> tuple[list[np.ndarray], list[np.ndarray], list[str]]:
    checksums = published_checksums(release.title)
    names = release.train if split == "train" else (release.test,)
    try:
        batches = [_load_checked(folder / name, checksums) for name in names]
        meta = _load_checked(folder / release.meta, checksums)
        pixels = [np.asarray(batch[b"data"], np.uint8).reshape(-1, _PIXELS) for batch in batches]
        labels = [np.asarray(batch[release.label_key.encode()], np.uint8).reshape(-1) for batch in batches]
        return pixels, labels, [name.decode() for name in meta[release.names_key.encode()]]
    except UserError:
        raise
    except Exception as problem:  # of a file that was made to have a published checksum
        raise UserError(f"{folder} is damaged: use the binary release of the set instead") from problem


def published_checksums(title: str) -> dict[str, str]:
    """MD5 sums of the pickled files, as torchvision publishes them."""
    from torchvision.datasets import CIFAR10, CIFAR100

    release = CIFAR10 if title == "CIFAR-10" else CIFAR100
    files = dict((*release.train_list, *release.test_list))
    return files | {release.meta["filename"]: release.meta["md5"]}


def _load_checked(file: Path, checksums: dict[str, str]) -> dict[bytes, Any]:
    """A pickle from the outside runs what its author wants, so only the very files that were published are loaded."""
    data = read_bytes(file, _UNPACK)
    if hashlib.md5(data, usedforsecurity=False).hexdigest() != checksums[file.name]:
        raise UserError(
            f"{file} is a pickle without the published checksum, and pickles can run code: use the binary release of "
            "the set instead"
        )
    content: dict[bytes, Any] = _ArraysOnly(io.BytesIO(data), encoding="bytes").load()
    return content


class _ArraysOnly(pickle.Unpickler):
    """MD5 can be forged, so the unpickler itself knows nothing but arrays."""

    def find_class(self, module: str, name: str) -> Any:
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "_reconstruct":
            return np._core.multiarray._reconstruct  # type: ignore[attr-defined]
        if module == "numpy" and name in ("ndarray", "dtype"):
            return getattr(np, name)
        if (module, name) == ("_codecs", "encode"):  # how Python 3 writes the bytes of an array for Python 2
            import _codecs

            return _codecs.encode
        raise pickle.UnpicklingError(f"{module}.{name} is not part of an array")
