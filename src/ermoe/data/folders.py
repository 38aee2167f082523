"""Folders of image files: one folder a class, with or without splits, and Tiny-ImageNet's own layout.

Nothing is decoded here. Files are listed in a fixed order, and what is neither an image nor a folder is counted.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ermoe.data.images import ImagesInFiles
from ermoe.errors import UserError
from ermoe.files import is_plain_name, naming_what_cannot_be_read, read_text

SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}
SPLIT_NAMES = {"train": ("train", "training"), "test": ("val", "validation", "valid", "test")}
_HELD_OUT = 0.1


@dataclass(slots=True)
class _Listing:
    """Image files by class, relative to the root of the data set, and how many other things there were."""

    paths: dict[str, list[str]] = field(default_factory=dict)
    num_others: int = 0
    num_broken_links: int = 0

    def add(self, root: Path, folder: Path, label: str) -> None:
        """All files below ``folder`` become images of class ``label``."""
        found = self.paths.setdefault(label, [])
        for path in _files(folder):
            if path.suffix.lower() in SUFFIXES:
                found.append(os.path.relpath(path, root))
            else:
                self.num_others += 1

    def add_classes(self, root: Path, folder: Path, classes: list[str]) -> None:
        """The class folders in ``folder``; what lies beside them is counted."""
        for name in classes:
            self.add(root, folder / name, name)
        for entry in _entries(folder):
            if entry.is_symlink() and not os.path.exists(entry.path):  # a link to nothing or to itself
                self.num_broken_links += 1
            elif not os.path.isdir(entry.path):
                self.num_others += 1


def read(root: Path, split: str) -> ImagesInFiles:
    """A split of ``root/train/CLASS/…`` and ``root/val/CLASS/…``, or a share of ``root/CLASS/…``."""
    train = _split_folder(root, "train")
    if train is None:
        return _read_unsplit(root, split)
    classes = _class_folders(train)
    listing = _Listing()
    folder = _split_folder(root, split)
    if folder is None:
        raise UserError(f"{root} has a folder for training, but none of {', '.join(SPLIT_NAMES['test'])}: add one")
    present = _class_folders(folder)
    if unknown := sorted(set(present) - set(classes)):
        raise UserError(
            f"{folder} has a class that {train} does not have, {unknown[0]!r} ({len(unknown)} such): it can't be "
            "learned; move or remove it"
        )
    listing.add_classes(root, folder, present)
    return _images(root, split, classes, listing, f"class folders in {folder}")


def has_splits(root: Path) -> bool:
    """Whether there are class folders in a folder for training."""
    train = _split_folder(root, "train")
    return train is not None and any(os.path.isdir(entry.path) for entry in _entries(train))


def _read_unsplit(root: Path, split: str) -> ImagesInFiles:
    """Without splits, a tenth of the files, chosen by their names and so always the same, is held out."""
    listing = _Listing()
    classes = _class_folders(root)
    listing.add_classes(root, root, classes)
    for name, paths in listing.paths.items():
        listing.paths[name] = [path for path in paths if _is_held_out(path) == (split == "test")]
    summary = f"class folders without splits in {root}, {_HELD_OUT:.0%} held out by a hash of their names"
    return _images(root, split, classes, listing, summary)


def is_tiny_imagenet(root: Path) -> bool:
    """Whether ``root`` has Tiny-ImageNet's layout, whose val labels are in a table."""
    return (root / "wnids.txt").is_file() and (root / "val" / "val_annotations.txt").is_file()


def read_tiny_imagenet(root: Path, split: str) -> ImagesInFiles:
    """Classes in the order of wnids.txt, which is that of the published labels."""
    classes = read_text(root / "wnids.txt").split()
    listing = _Listing()
    if split == "train":
        if odd := next((wnid for wnid in classes if not is_plain_name(wnid)), None):
            raise UserError(f"wnids.txt of {root} has the class {odd!r}, which no folder is called: unpack it again")
        for wnid in classes:
            listing.add(root, root / "train" / wnid / "images", wnid)
    else:
        table, known = root / "val" / "val_annotations.txt", set(classes)
        for number, line in enumerate(read_text(table).splitlines(), 1):
            name, _, rest = line.partition("\t")
            wnid = rest.partition("\t")[0]
            if wnid not in known:
                raise UserError(
                    f"line {number} of {table} gives {name} the class {wnid!r}, which wnids.txt does not have: unpack "
                    "the archive again"
                )
            listing.paths.setdefault(wnid, []).append(os.path.join("val", "images", name))
    return _images(root, split, classes, listing, f"Tiny-ImageNet in {root}")


def _images(root: Path, split: str, classes: list[str], listing: _Listing, summary: str) -> ImagesInFiles:
    paths = [path for name in classes for path in sorted(listing.paths.get(name, []))]
    label = [i for i, name in enumerate(classes) for _ in listing.paths.get(name, [])]
    empty = sum(not listing.paths.get(name) for name in classes)
    summary += f", {split}: {len(paths):,} images, {len(classes)} classes"
    summary += f", {empty} of them without images here" if empty and paths else ""
    summary += f"; {listing.num_others} other files ignored" if listing.num_others else ""
    summary += f"; {listing.num_broken_links} broken links ignored" if listing.num_broken_links else ""
    label_N = torch.tensor(label).long()
    return ImagesInFiles(root, paths, summary=summary, split=split, classes=classes, label_N=label_N)


def _split_folder(root: Path, split: str) -> Path | None:
    return next((root / name for name in SPLIT_NAMES[split] if (root / name).is_dir()), None)


def _class_folders(folder: Path) -> list[str]:
    entries = _entries(folder)
    names = [entry.name for entry in entries if os.path.isdir(entry.path)]
    if not names:
        loose = sum(Path(entry).suffix.lower() in SUFFIXES for entry in entries)
        raise UserError(
            f"{folder} holds {loose} image files and no class folders: put every image into a folder named by its class"
        )
    return names


def _files(folder: Path, above: tuple[str, ...] = ()) -> Iterator[Path]:
    """All files below a folder, also through symbolic links; a link into a folder that contains it is refused."""
    real = os.path.realpath(folder)
    if real in above:
        raise UserError(f"{folder} is a symbolic link to a folder that contains it, an endless loop: remove the link")
    for entry in _entries(folder):
        if os.path.isdir(entry.path):  # unlike entry.is_dir(), it takes a link to itself for no folder
            yield from _files(Path(entry.path), (*above, real))
        else:  # also dangling links and links to themselves: reading them will say so
            yield Path(entry.path)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """What is in a folder, hidden things left out, by name."""
    with naming_what_cannot_be_read(), os.scandir(folder) as entries:
        return sorted((entry for entry in entries if not entry.name.startswith(".")), key=lambda entry: entry.name)


def _is_held_out(path: str) -> bool:
    digest = hashlib.blake2b(os.fsencode(path), digest_size=8).digest()
    return int.from_bytes(digest, "little") < _HELD_OUT * 2**64
