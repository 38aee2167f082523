"""Prepared volumes on disk, so that epochs never unpack gzip and memory does not grow with the cohort."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ermoe.brain.data.preprocess import Float, Volume, prepare
from ermoe.brain.data.scans import Preprocessing, Problem, Scan, ScanError
from ermoe.files import cache_folder, replacing, to_json, write_json

_FORMAT = 1  # to be raised when `prepare` changes what it returns
_SHARE_LEVELS = 255
_LONGEST_NAME = 100


class VolumeCache:
    """Prepares a scan the first time it is asked for and maps it from disk ever after.

    An entry belongs to the files of the scan as they are (path, size and time of change) and to the preprocessing, so
    a changed file or option is prepared anew. Several processes may share a folder. A volume of 96 × 112 × 96 voxels
    takes 5 MB, and 3 MB more with tissue, which is kept in steps of 1/255.
    """

    def __init__(self, folder: str | os.PathLike[str], preprocessing: Preprocessing) -> None:
        self.folder = Path(folder)
        self.preprocessing = preprocessing

    def volume(self, scan: Scan, *, with_tissue: bool = False) -> Volume:
        """The volume of a scan; its arrays are copy-on-write maps of files, so writing to them harms nothing.

        ``tissue_3XYZ`` is None unless ``with_tissue`` and the scan has tissue maps.
        """
        stem = self.folder / self.key(scan)
        about = _about(stem)
        if about is None:
            about = self._store(scan, stem)
        tissue_3XYZ: Float | None = None
        if with_tissue and about["has_tissue"]:
            tissue_3XYZ = np.divide(_map(stem, "tissue"), _SHARE_LEVELS, dtype=np.float32)
        return Volume(
            _map(stem, "t1"), _map(stem, "mask"), tissue_3XYZ, about["mask_source"], np.array(about["affine"])
        )

    def kept(self, scan: Scan, name: str, make: Callable[[Volume], NDArray[Any]]) -> NDArray[Any]:
        """What was once made of the volume of a scan, from a file beside it."""
        stem = self.folder / self.key(scan)
        try:
            return np.load(f"{stem}.{name}.npy", allow_pickle=False)
        except (OSError, ValueError, EOFError):  # none yet, or a damaged one
            found = make(self.volume(scan))
            _write(stem, name, found)
            return found

    def fill(
        self, scans: Sequence[Scan], *, on_scan: Callable[[int, int], None] = lambda done, total: None
    ) -> list[Problem]:
        """Prepares all scans; what is wrong with those that cannot be is returned."""
        problems = []
        for done, scan in enumerate(scans, start=1):
            try:
                self.volume(scan)
            except ScanError as wrong:
                problems.append(wrong.problem)
            on_scan(done, len(scans))
        return problems

    def key(self, scan: Scan) -> str:
        """Name of the scan's entry."""
        content = {
            "format": _FORMAT,
            "preprocessing": to_json(self.preprocessing),
            "files": [_state(path) for path in scan.files],
            "tissue": to_json(getattr(scan.tissue, "codes", None)),
            "mask": "file" if scan.mask or scan.labels else f"stripped, {_mask_tool()}",
        }
        digest = hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=12).hexdigest()
        name = re.sub(r"[^\w.-]", "_", scan.key)[:_LONGEST_NAME].lstrip(".")  # ids are what tables and folders say
        return f"{name}-{digest}"

    def _store(self, scan: Scan, stem: Path) -> dict[str, Any]:
        volume = prepare(scan, self.preprocessing, with_tissue=True)
        _write(stem, "t1", volume.t1_XYZ)
        _write(stem, "mask", volume.mask_XYZ)
        if volume.tissue_3XYZ is not None:
            _write(stem, "tissue", np.rint(volume.tissue_3XYZ * _SHARE_LEVELS).astype(np.uint8))
        about = {
            "mask_source": volume.mask_source,
            "has_tissue": volume.tissue_3XYZ is not None,
            "affine": volume.affine.tolist(),
        }
        # Last, because an entry counts as complete when this file is there.
        write_json(f"{stem}.json", about)
        return about


@dataclass(frozen=True, slots=True)
class Archive:
    """A folder of what can be made again and is kept for the next run: volumes, phantoms, and what they taught."""

    folder: Path

    @classmethod
    def at(cls, folder: str | os.PathLike[str] | None) -> Archive:
        """In a folder, or among the user's caches."""
        return cls(cache_folder("brain") if folder is None else Path(folder))

    def volumes(self, preprocessing: Preprocessing) -> VolumeCache:
        """The prepared volumes."""
        return VolumeCache(self.folder / "volumes", preprocessing)


def _about(stem: Path) -> dict[str, Any] | None:
    try:
        return json.loads(Path(f"{stem}.json").read_text())
    except (FileNotFoundError, ValueError):
        return None


def _map(stem: Path, part: str) -> NDArray[Any]:
    return np.load(f"{stem}.{part}.npy", mmap_mode="c", allow_pickle=False)


def _write(stem: Path, part: str, array: NDArray[Any]) -> None:
    with replacing(f"{stem}.{part}.npy") as draft:
        np.save(draft, array, allow_pickle=False)


def _state(path: Path) -> tuple[str, int, int]:
    try:
        state = path.stat()
    except OSError:
        return str(path.resolve()), -1, -1
    return str(path.resolve()), state.st_size, state.st_mtime_ns


def _mask_tool() -> str:
    try:
        return f"deepbet {version('deepbet')}"
    except PackageNotFoundError:
        return "stripped"
