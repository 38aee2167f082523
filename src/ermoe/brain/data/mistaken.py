"""Files that are no images, or are not named as what they are: each has a remedy of its own."""

from __future__ import annotations

import os
from pathlib import Path

from ermoe.files import is_hidden

_ANNEX = ("annex/objects", "annex\\objects")
_MOST_LOOKED_AT = 200


def remedy_for(path: Path) -> tuple[str, str] | None:
    """What a file is instead of a NIfTI image, and what to do about it; None if nothing is known to be wrong.

    Remedies name no file, so that those of many files are one line.
    """
    if os.path.islink(path) and not os.path.exists(path):
        if any(folder in os.readlink(path) for folder in _ANNEX):
            return "is a link of git-annex whose content is not here", "fetch it with `datalad get FILE`"
        return "is a link to a file that is not there", "restore the file it leads to"
    start = _start(path)
    if start.startswith(b"/annex/objects/"):
        return "is a pointer of git-annex, not the scan", "fetch it with `datalad get FILE`"
    if start.startswith(b"version https://git-lfs"):
        return "is a pointer of Git LFS, not the scan", "fetch it with `git lfs pull`"
    if start[128:132] == b"DICM":
        return "is a DICOM file", "convert its folder with `dcm2niix -z y FOLDER` and name the .nii.gz"
    return _misnamed(path, start)


def _misnamed(path: Path, start: bytes) -> tuple[str, str] | None:
    """An image whose ending says that it is packed where it is not, or the other way round."""
    name, is_packed = path.name, start.startswith(b"\x1f\x8b")
    if name.casefold().endswith(".nii") and is_packed:
        return "is packed by gzip and its name does not say so", "let its name end in .nii.gz"
    if name.casefold().endswith(".nii.gz") and not is_packed and start[344:347] in (b"n+1", b"ni1"):
        return "is not packed by gzip, as its name says", "let its name end in .nii, or pack it with gzip"
    return None


def _start(path: Path) -> bytes:
    """The first bytes of a plain file; of anything else none."""
    if not os.path.isfile(path):
        return b""
    with open(path, "rb") as file:
        return file.read(352)


def dicom_below(folder: Path) -> Path | None:
    """The first DICOM file of a folder, among the first files in it."""
    files = (path for path in folder.rglob("*") if not is_hidden(path, below=folder) and path.is_file())
    for _, path in zip(range(_MOST_LOOKED_AT), files, strict=False):
        if _start(path)[128:132] == b"DICM":
            return path
    return None
