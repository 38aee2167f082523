"""The pictures of an explorer: some of a data set, and those that people bring along, which stay in memory."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ermoe.data.decode import decode
from ermoe.data.folders import SUFFIXES
from ermoe.data.images import Images, ImagesInFiles, ImagesInMemory, open_images
from ermoe.errors import UserError
from ermoe.files import StrPath, is_hidden, naming_what_cannot_be_read

LARGEST_UPLOAD = 2**24
"""Bytes of a picture that is sent to the explorer."""
_MOST_UPLOADS, _MOST_BYTES = 64, 2**27
_PREFIX = "upload-"


@dataclass(frozen=True, slots=True)
class Picture:
    """One picture by the name that links have for it: uint8 (3, H, W), and its label, -1 if it has none."""

    name: str
    image_3HW: Tensor
    label: int = -1


class Pictures:
    """A data set and uploads. Pictures of the data set go by their number, uploads by their content."""

    def __init__(self, images: Images) -> None:
        self.images = images
        self._uploads: OrderedDict[str, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def take(self, data: bytes) -> str:
        """Keeps a picture that is one, in memory; returns its name. The oldest make room."""
        if len(data) > LARGEST_UPLOAD:
            raise UserError(f"the file has more than {LARGEST_UPLOAD // 2**20} MB: scale the picture down first")
        decode(data, "the file")
        name = _PREFIX + hashlib.sha256(data).hexdigest()[:16]
        with self._lock:
            self._uploads[name] = data
            self._uploads.move_to_end(name)
            while len(self._uploads) > _MOST_UPLOADS or sum(map(len, self._uploads.values())) > _MOST_BYTES:
                self._uploads.popitem(last=False)
        return name

    def get(self, name: str) -> Picture:
        """The picture of a name."""
        if name.startswith(_PREFIX):
            with self._lock:
                data = self._uploads.get(name)
            if data is None:
                raise UserError("this picture was brought along and is no longer here: bring it again")
            return Picture(name, decode(data, "the file"))
        if not name.isascii() or not name.isdigit() or len(name) > 9 or int(name) >= len(self.images):
            raise UserError(f"there is no picture {name[:40]!r}: they go from 0 to {len(self.images) - 1}")
        return Picture(name, self.images.read(int(name)), int(self.images.label_N[int(name)]))

    def some(self, start: int, count: int) -> list[tuple[str, str]]:
        """Names and labels of ``count`` pictures spread over the data set, from the ``start``-th of them on."""
        total = len(self.images)
        step = max(1, total // min(total, 24))
        order = np.concatenate([np.arange(first, total, step) for first in range(step)])  # sets come sorted by class
        return [(str(i), self.images.classes[int(self.images.label_N[i])]) for i in order[start : start + count]]


def open_pictures(data: StrPath) -> Images:
    """The test images of a data set; or photographs without labels: one file, or a folder that holds nothing else."""
    place = Path(data).expanduser()
    if place.is_file() and place.suffix.lower() in SUFFIXES:
        return _unlabelled(place.parent, [place.name])
    if place.is_dir():
        with naming_what_cannot_be_read():
            entries = [path for path in place.iterdir() if not is_hidden(path, below=place)]
        files = sorted(path.name for path in entries if path.suffix.lower() in SUFFIXES and path.is_file())
        if files and not any(path.is_dir() for path in entries):
            return _unlabelled(place, files)
    return open_images(data, "test")


def _unlabelled(folder: Path, files: list[str]) -> Images:
    summary = f"{len(files):,} photographs in {folder}" if len(files) > 1 else files[0]
    label_N = torch.zeros(len(files), dtype=torch.long)
    return ImagesInFiles(folder, files, summary=summary, split="test", classes=["", ""], label_N=label_N)


def sample_pictures() -> Images:
    """Two photographs that come with scikit-learn, for whoever names no data."""
    from sklearn.datasets import load_sample_images

    photographs = [torch.from_numpy(np.array(image)).permute(2, 0, 1) for image in load_sample_images().images]
    return ImagesInMemory(
        torch.stack(photographs),
        summary="two photographs that come with scikit-learn",
        split="test",
        classes=["temple", "flower"],
        label_N=torch.arange(2),
    )
