"""Caption files of one line a caption: Flickr's token files, and tables separated by commas, bars or tabs.

A table may have a header; its columns are found by their names. Captions may hold the separator: what is left of the
line belongs to the last column.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ermoe.data.folders import SUFFIXES
from ermoe.data.reading import read_text
from ermoe.errors import UserError
from ermoe.retrieval.captions.schema import Annotation, checked_caption, one_split

_TOKEN = re.compile(r"^(?P<file>[^\t]+)#(?P<number>\d+)\t(?P<caption>.*)$")
_FILE = ("image", "image_name", "filepath", "file_path", "filename", "file_name", "file", "img", "image_path")
_CAPTION = ("caption", "comment", "title", "text", "raw", "sentence", "captions")
_SEPARATORS = ("\t", "|", ",")
_Line = tuple[int, str]


@dataclass(frozen=True, slots=True)
class _Columns:
    """Where in a row the file, the caption and perhaps the split are."""

    file: int
    caption: int
    split: int | None
    count: int


def read(path: Path) -> list[Annotation]:
    """The images of a token file or a table, in the order in which they first appear."""
    text = read_text(path).replace("\r\n", "\n").replace("\r", "\n")
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise UserError(f"{path} is empty: name a caption file")
    rows = _tokens(lines, path) if _TOKEN.match(lines[0][1]) else _table(lines, path)
    captions: dict[str, list[str]] = {}
    splits: dict[str, str] = {}
    for number, file, caption, split in rows:
        where = f"{path}, line {number}, image {file}"
        texts = _several(caption) or [caption]
        captions.setdefault(file, []).extend(checked_caption(text, where) for text in texts)
        one_split(splits, file, split, where)
    return [Annotation(file, tuple(own), splits[file]) for file, own in captions.items()]


def _tokens(lines: list[_Line], path: Path) -> Iterator[tuple[int, str, str, str]]:
    """NAME.jpg#0<tab>caption."""
    for number, line in lines:
        if (match := _TOKEN.match(line)) is None:
            raise UserError(f"{path}, line {number}: {line[:60]!r} is not NAME#NUMBER<tab>CAPTION; mend that line")
        yield number, match["file"], match["caption"], ""


def _table(lines: list[_Line], path: Path) -> Iterator[tuple[int, str, str, str]]:
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
        yield number, cells[columns.file].strip(), cells[columns.caption].strip(), split


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
            f"{path} has the columns {', '.join(names)}: need one of {', '.join(_FILE)}, and one of "
            f"{', '.join(_CAPTION)}"
        )
    return _Columns(file, caption, names.index("split") if "split" in names else None, len(names)), True


def _several(cell: str) -> list[str]:
    """Some tables keep all captions of an image in one cell, as a JSON list."""
    if not cell.startswith('["'):
        return []
    try:
        return list(json.loads(cell))
    except ValueError:
        return []
