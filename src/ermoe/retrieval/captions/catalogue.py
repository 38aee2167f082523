"""`open_captions`: one call for every format, which says what it found and refuses what does not fit the protocol."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

from ermoe._moved import renamed
from ermoe.data.images import Images, ImagesInFiles
from ermoe.errors import UserError
from ermoe.files import StrPath, naming_what_cannot_be_read, read_bytes, read_text
from ermoe.retrieval.captions import webdataset
from ermoe.retrieval.captions.files import read_annotations
from ermoe.retrieval.captions.protocols import Protocol, protocol_of
from ermoe.retrieval.captions.schema import Annotation, CaptionSet, bytes_id, id_hash, named_id

_BELOW = ("", "annotations", "Flickr8k_text", "karpathy")
_IMAGES = (
    "", "images", "Images", "Flicker8k_Dataset", "Flickr8k_Dataset", "flickr30k-images", "flickr30k_images",
    "flickr30k_images/flickr30k_images", "train2014", "val2014", "train2017", "val2017",
)  # fmt: skip
_FORMATS = {".json", ".token", ".csv", ".tsv"}
_OWN_NAMES = {"train": ("train", "restval"), "dev": ("val", "dev", "valid", "validation"), "test": ("test",)}
_LISTS = {split: (f"Flickr_8k.{split}Images.txt", f"{split}_images.txt", f"{split}.lst") for split in _OWN_NAMES}


@renamed(place="path")
def open_captions(
    path: StrPath, protocol: str = "custom", split: str = "test", *, images: StrPath | None = None
) -> CaptionSet:
    """One split of a protocol from the files at ``path``.

    ``path`` is the folder of a data set, or a caption file: COCO's or Karpathy's JSON, a Flickr token file, a table
    (csv, tsv, bars), or a folder of webdataset's tar shards. ``images`` is the folder of the image files where it is
    not one of the usual ones. Every image that is listed must be there, every caption must say something, and the
    numbers of both must be the protocol's.
    """
    with naming_what_cannot_be_read():
        return _at(Path(os.path.expanduser(path)), protocol_of(protocol, split), split, images)


def _at(data: Path, protocol: Protocol, split: str, images: StrPath | None) -> CaptionSet:
    if not data.exists():
        raise UserError(f"{data} does not exist: name the folder of a data set, or a caption file")
    pictures: Images | None = None
    if shards := webdataset.find(data, split):
        source, unused = f"{len(shards)} shards in {data}", 0
        annotations, ids, pictures = webdataset.read(shards, split)
    else:
        path = _caption_file(data, protocol, split)
        listed = read_annotations(path)
        source, unused = str(path), _unused(listed, path, protocol)
        annotations = _of_split(listed, path, protocol, split)
    captions = [own.captions[: protocol.first_captions] for own in annotations]
    num_texts = sum(map(len, captions))
    protocol.check(split, len(captions), num_texts, source)
    if pictures is None:
        ids, pictures = _image_files(annotations, path, data if data.is_dir() else path.parent, images, split)
    repeated = len(ids) - len(set(ids))
    if repeated and protocol.sizes:
        raise UserError(
            f"{source}: {repeated} images of the split {split!r} are there twice, which {protocol.name} is not"
        )
    summary = f"{protocol.name}, {split}: {len(ids):,} images, {num_texts:,} captions from {source}"
    summary += f"; {unused} images of the file are in no split" if unused else ""
    summary += f"; {repeated} images are there twice" if repeated else ""
    return CaptionSet(ids, captions, pictures, protocol=protocol.name, split=split, summary=summary)


def _caption_file(data: Path, protocol: Protocol, split: str) -> Path:
    if data.is_file():
        return data
    names = protocol.files[split]
    if names == ("*",):
        return _only_caption_file(data)
    candidates = [data / folder / f"{name}{gz}" for name in names for folder in _BELOW for gz in ("", ".gz")]
    found = next((path for path in candidates if path.is_file()), None)
    if found is None:
        raise UserError(
            f"{data} has no caption file for {protocol.name}, split {split!r}: need {' or '.join(names)}, in the "
            "folder itself or below annotations/; or name the file"
        )
    return found


def _only_caption_file(data: Path) -> Path:
    found = [
        path
        for folder in _BELOW
        if (data / folder).is_dir()
        for path in sorted((data / folder).glob("[!.]*"))
        if Path(path.name.removesuffix(".gz")).suffix in _FORMATS
        or path.name.removesuffix(".gz") in ("captions.txt", "Flickr8k.token.txt")
    ]
    if len(found) != 1:
        listed = ", ".join(path.name for path in found) or "none"
        raise UserError(f"{data} should hold one caption file, and there are {len(found)} ({listed}): name the file")
    return found[0]


def _of_split(listed: list[Annotation], path: Path, protocol: Protocol, split: str) -> list[Annotation]:
    """By the splits in the file, by lists beside it, by a hash where the protocol says so, or all of it."""
    if not listed:
        raise UserError(f"{path} names no image: name a caption file")
    if split == "all" or protocol.is_whole:
        return listed
    if any(own.split for own in listed):
        _refuse_unknown_splits(listed, path)
        chosen = [own for own in listed if own.split.lower() in _OWN_NAMES[split]]
    elif (names := _split_list(path, split)) is not None:
        chosen = _by_list(listed, names, path)
    elif split in protocol.hashed_splits:
        low, high = protocol.hashed_splits[split]
        chosen = [own for own in listed if low <= id_hash(named_id(own.file) or own.file) / 2**63 < high]
    elif path.name.removesuffix(".gz") in protocol.own_files(split):
        chosen = listed
    else:
        raise UserError(
            f"{path} does not say which of its images are {protocol.name}'s {split}: put the lists of the splits "
            f"beside it, {_LISTS[split][0]} and others, or take a file that knows its splits"
        )
    if not chosen:
        raise UserError(f"{path} has no image for the split {split!r}: look at its splits; eval has --split all")
    return chosen


def _refuse_unknown_splits(listed: list[Annotation], path: Path) -> None:
    known = {name for names in _OWN_NAMES.values() for name in names}
    if strange := next((own for own in listed if own.split and own.split.lower() not in known), None):
        raise UserError(
            f"{path}: image {strange.file} is in the split {strange.split!r}; use {', '.join(sorted(known))}, or none"
        )


def _split_list(path: Path, split: str) -> list[str] | None:
    found = next((path.with_name(name) for name in _LISTS[split] if path.with_name(name).is_file()), None)
    return None if found is None else [line.strip() for line in read_text(found).splitlines() if line.strip()]


def _by_list(listed: list[Annotation], names: Sequence[str], path: Path) -> list[Annotation]:
    by_name = {own.file: own for own in listed}
    if twice := next((name for name, number in Counter(names).items() if number > 1), None):
        raise UserError(f"the list of a split beside {path} names {twice} twice: mend the list")
    if lacking := [name for name in names if name not in by_name]:
        raise UserError(
            f"{path} has no caption for {lacking[0]}, which the list of its split names ({len(lacking)} such): the two "
            "files do not belong together, or one is incomplete"
        )
    return [by_name[name] for name in names]


def _unused(listed: list[Annotation], path: Path, protocol: Protocol) -> int:
    """Images of the file that are in no split, by its own column or by the lists beside it."""
    if protocol.is_whole:
        return 0
    if any(own.split for own in listed):
        return sum(not own.split for own in listed)
    lists = [_split_list(path, split) for split in _LISTS]
    named = {name for names in lists if names is not None for name in names}
    return len({own.file for own in listed} - named) if named else 0


def _image_files(
    annotations: list[Annotation], path: Path, data: Path, given: StrPath | None, split: str
) -> tuple[list[str], Images]:
    """The ids of the images, and the images, which all have to be there."""
    root = _image_folder(annotations, path, data, given)
    files = [own.file for own in annotations]
    label_N = torch.arange(len(files))
    images = ImagesInFiles(root, files, summary=str(path), split=split, classes=[*files, ""], label_N=label_N)
    return [named_id(file) or bytes_id(read_bytes(root / file)) for file in files], images


def _image_folder(annotations: list[Annotation], path: Path, data: Path, given: StrPath | None) -> Path:
    """The folder below which all images are; one that lacks some is an error that says how many."""
    bases = [data, data.parent] if data.name == "annotations" else [data]
    roots = [Path(given)] if given is not None else [base / name for base in bases for name in _IMAGES]
    sample = annotations[:: max(1, len(annotations) // 50)]
    root = max(roots, key=lambda root: sum((root / own.file).is_file() for own in sample))
    missing = [own.file for own in annotations if not (root / own.file).is_file()]
    if len(missing) == len(annotations):
        where = str(given) if given is not None else f"{data} or its usual folders (images, val2017, …)"
        raise UserError(
            f"none of the {len(missing):,} images that {path} names is in {where}, not even {missing[0]}: name their "
            "folder with --images"
        )
    if missing:
        raise UserError(
            f"{len(missing):,} of the {len(annotations):,} images that {path} names are not in {root}, the first is "
            f"{missing[0]}: add them; figures of what is left would be another protocol's"
        )
    return root
