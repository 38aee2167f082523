"""Caption files in JSON: COCO's own (2014, 2017), Karpathy's splits of COCO and Flickr, and plain lists of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ermoe.errors import UserError
from ermoe.files import read_text
from ermoe.retrieval.captions.schema import Annotation, checked_caption, is_broken, one_split


def read(path: Path) -> list[Annotation]:
    """The images of a JSON file in the order in which it lists them."""
    content = _json(path)
    try:
        if isinstance(content, list):
            return _plain_list(content, path)
        if "annotations" in content:
            return _coco(content, path)
        if "images" in content:
            return _karpathy(content, path)
    except UserError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError) as problem:
        raise UserError(f"{path}: an entry lacks {problem}; it is no caption file, or a damaged one") from problem
    raise UserError(
        f"{path} is no caption file: need COCO's {{images, annotations}}, Karpathy's {{images: [{{sentences}}]}} or a "
        "list of {image, caption}"
    )


def _json(path: Path) -> Any:
    try:
        return json.loads(read_text(path))
    except json.JSONDecodeError as problem:
        raise UserError(
            f"{path} is no valid JSON (line {problem.lineno}: {problem.msg}): copy or download it again"
        ) from problem
    except RecursionError as problem:
        raise UserError(f"{path} is nested too deeply for a caption file: name another") from problem


def _coco(content: dict[str, Any], path: Path) -> list[Annotation]:
    """Captions in the order of their annotation ids, which is the order that "the first five" means."""
    captions: dict[int, list[str]] = {image["id"]: [] for image in content["images"]}
    for entry in sorted(content["annotations"], key=lambda entry: int(entry["id"])):
        if entry["image_id"] not in captions:
            raise UserError(f"{path}: annotation {entry['id']} is of image {entry['image_id']}, which is not listed")
        captions[entry["image_id"]].append(checked_caption(entry["caption"], f"{path}, image {entry['image_id']}"))
    return [_with_captions(image["file_name"], captions[image["id"]], path) for image in content["images"]]


def _karpathy(content: dict[str, Any], path: Path) -> list[Annotation]:
    listed = []
    for image in content["images"]:
        name = "/".join(part for part in (image.get("filepath", ""), image["filename"]) if part)
        captions = [checked_caption(sentence["raw"], f"{path}, image {name}") for sentence in image["sentences"]]
        listed.append(_with_captions(name, captions, path, image.get("split", "")))
    return listed


def _plain_list(content: list[Any], path: Path) -> list[Annotation]:
    """[{image, caption}] with one caption an entry or a list of them; entries of one image are joined."""
    captions: dict[str, list[str]] = {}
    splits: dict[str, str] = {}
    for entry in content:
        name, given = entry["image"], entry["caption"]
        texts = given if isinstance(given, list) else [given]
        captions.setdefault(name, []).extend(checked_caption(text, f"{path}, image {name}") for text in texts)
        one_split(splits, name, entry.get("split", ""), str(path))
    return [_with_captions(name, own, path, splits[name]) for name, own in captions.items()]


def _with_captions(name: str, captions: list[str], path: Path, split: str = "") -> Annotation:
    if not isinstance(name, str) or is_broken(name):
        raise UserError(f"{path}: the file name of an image is {name!r}, not text; mend the file")
    if not captions:
        raise UserError(f"{path}: image {name} has no caption; write one, or remove its entry")
    return Annotation(name, tuple(captions), split)
