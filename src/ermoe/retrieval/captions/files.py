"""Caption files: JSON of COCO (2014, 2017), of Karpathy's splits and plain lists, Flickr's token files, and tables.

Tables are separated by commas, bars or tabs. They may have a header; columns are found by their names. Captions may
hold the separator: what is left of the line belongs to the last column.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ermoe.data.folders import SUFFIXES
from ermoe.errors import UserError
from ermoe.files import read_text
from ermoe.retrieval.captions.schema import Annotation, checked_caption, is_broken

_TOKEN = re.compile(r"^(?P<file>[^\t]+)#(?P<number>\d+)\t(?P<caption>.*)$")
_FILE = ("image", "image_name", "filepath", "file_path", "filename", "file_name", "file", "img", "image_path")
_CAPTION = ("caption", "comment", "title", "text", "raw", "sentence", "captions")
_SEPARATORS = ("\t", "|", ",")
_Line = tuple[int, str]
_Entry = tuple[str, Any, list[Any], str]
"""Where it stands, the file, its captions, and its split."""


@dataclass(frozen=True, slots=True)
class _Columns:
    """Where in a row the file, the caption and perhaps the split are."""

    file: int
    caption: int
    split: int | None
    count: int


def read_annotations(path: Path) -> list[Annotation]:
    """The images of a caption file of any format, in the order in which it lists them."""
    return _read_json(path) if path.name.removesuffix(".gz").endswith(".json") else _read_lines(path)


def _joined(entries: Iterable[_Entry]) -> list[Annotation]:
    """Images in the order in which they first appear; what several entries say of one belongs together."""
    captions: dict[str, list[str]] = {}
    splits: dict[str, str] = {}
    for where, file, texts, split in entries:
        captions.setdefault(file, []).extend(checked_caption(text, f"{where}, image {file}") for text in texts)
        if splits.setdefault(file, split) != split:
            raise UserError(f"{where}: image {file} is in the splits {splits[file]!r} and {split!r}; decide for one")
    return [Annotation(file, tuple(own), splits[file]) for file, own in captions.items()]


def _read_json(path: Path) -> list[Annotation]:
    content = _json(path)
    try:
        if isinstance(content, list):
            listed = _joined(_plain_list(content, path))
        elif "annotations" in content:
            listed = _coco(content, path)
        elif "images" in content:
            listed = _karpathy(content, path)
        else:
            raise UserError(
                f"{path} is no caption file: need COCO's {{images, annotations}}, Karpathy's "
                "{images: [{sentences}]} or a list of {image, caption}"
            )
    except UserError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as problem:
        raise UserError(f"{path}: an entry lacks {problem}; it is no caption file, or a damaged one") from problem
    return [_checked(own, path) for own in listed]


def _json(path: Path) -> Any:
    text = read_text(path)
    try:
        return json.loads(text)
    except json.JSONDecodeError as problem:
        raise UserError(
            f"{path} is no valid JSON (line {problem.lineno}: {problem.msg}): copy or download it again"
        ) from problem
    except (RecursionError, ValueError) as problem:  # ValueError: a number of thousands of digits
        raise UserError(
            f"{path} is nested too deeply, or has numbers too long, for a caption file: name another"
        ) from problem


def _coco(content: dict[str, Any], path: Path) -> list[Annotation]:
    """Captions in the order of their annotation ids, which is the order that "the first five" means."""
    captions: dict[int, list[str]] = {image["id"]: [] for image in content["images"]}
    for entry in sorted(content["annotations"], key=lambda entry: int(entry["id"])):
        if entry["image_id"] not in captions:
            raise UserError(f"{path}: annotation {entry['id']} is of image {entry['image_id']}, which is not listed")
        captions[entry["image_id"]].append(checked_caption(entry["caption"], f"{path}, image {entry['image_id']}"))
    return [Annotation(image["file_name"], tuple(captions[image["id"]])) for image in content["images"]]


def _karpathy(content: dict[str, Any], path: Path) -> list[Annotation]:
    listed = []
    for image in content["images"]:
        name = "/".join(part for part in (image.get("filepath", ""), image["filename"]) if part)
        captions = [checked_caption(sentence["raw"], f"{path}, image {name}") for sentence in image["sentences"]]
        listed.append(Annotation(name, tuple(captions), image.get("split", "")))
    return listed


def _plain_list(content: list[Any], path: Path) -> Iterator[_Entry]:
    """[{image, caption}] with one caption an entry or a list of them."""
    for entry in content:
        texts = entry["caption"] if isinstance(entry["caption"], list) else [entry["caption"]]
        yield str(path), entry["image"], texts, entry.get("split", "")


def _checked(own: Annotation, path: Path) -> Annotation:
    if not isinstance(own.split, str):
        raise UserError(f"{path}: the split of image {own.file} is {own.split!r}, not text; mend the file")
    if not isinstance(own.file, str) or is_broken(own.file):
        raise UserError(f"{path}: the file name of an image is {own.file!r}, not text; mend the file")
    if not own.captions:
        raise UserError(f"{path}: image {own.file} has no caption; write one, or remove its entry")
    return own


def _read_lines(path: Path) -> list[Annotation]:
    text = read_text(path).replace("\r\n", "\n").replace("\r", "\n")
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise UserError(f"{path} is empty: name a caption file")
    return _joined(_tokens(lines, path) if _TOKEN.match(lines[0][1]) else _table(lines, path))


def _tokens(lines: list[_Line], path: Path) -> Iterator[_Entry]:
    """NAME.jpg#0<tab>caption."""
    for number, line in lines:
        if (match := _TOKEN.match(line)) is None:
            raise UserError(f"{path}, line {number}: {line[:60]!r} is not NAME#NUMBER<tab>CAPTION; mend that line")
        yield f"{path}, line {number}", match["file"], _texts(match["caption"]), ""


def _table(lines: list[_Line], path: Path) -> Iterator[_Entry]:
    separator = next((mark for mark in _SEPARATORS if mark in lines[0][1]), None)
    if separator is None:
        raise UserError(f"{path}: its first line has no tab, bar or comma; name a caption file")
    columns, has_header = _columns(_cells(lines[0][1], separator, f"{path}, line 1"), path)
    for number, line in lines[has_header:]:
        cells = _cells(line, separator, f"{path}, line {number}")
        if len(cells) > columns.count and columns.caption == columns.count - 1:
            cells = line.split(separator, columns.count - 1)  # the caption has unquoted separators
        if len(cells) != columns.count:
            raise UserError(
                f"{path}, line {number}: {len(cells)} columns instead of {columns.count}: {line[:60]!r}; mend that line"
            )
        split = "" if columns.split is None else cells[columns.split].strip()
        where = f"{path}, line {number}"
        yield where, cells[columns.file].strip(), _texts(cells[columns.caption].strip()), split


def _cells(line: str, separator: str, where: str) -> list[str]:
    """Commas may be quoted, as the csv format says; bars and tabs are taken as they are."""
    if separator != ",":
        return line.split(separator)
    try:
        cells = next(csv.reader([line]))
    except csv.Error as problem:
        raise UserError(f"{where}: {problem}; mend that line") from problem
    if line.count('"') % 2 and ',"' in line:
        raise UserError(f"{where}: a quotation mark is opened and not closed; write each caption on one line")
    return cells


def _columns(header: list[str], path: Path) -> tuple[_Columns, bool]:
    names = [cell.strip().lower() for cell in header]
    if Path(names[0]).suffix in SUFFIXES and len(names) >= 2:  # no header: file, perhaps a number, caption
        last = 2 if len(names) > 2 and names[1].isdigit() else 1
        return _Columns(0, last, None, last + 1), False
    file = next((names.index(name) for name in _FILE if name in names), None)
    caption = next((names.index(name) for name in _CAPTION if name in names), None)
    if file is None or caption is None:
        raise UserError(
            f"{path} has the columns {', '.join(names)[:200]}: need one of {', '.join(_FILE)}, and one of "
            f"{', '.join(_CAPTION)}"
        )
    return _Columns(file, caption, names.index("split") if "split" in names else None, len(names)), True


def _texts(cell: str) -> list[str]:
    """One caption; some tables keep all captions of an image in one cell, as a JSON list."""
    if not cell.startswith('["'):
        return [cell]
    try:
        return list(json.loads(cell))
    except (ValueError, RecursionError):
        return [cell]
