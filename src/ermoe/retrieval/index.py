"""A folder of images, encoded once, to be searched by words or by an image as often as you like.

An index is a folder: ``index.json`` names the files and the model, ``features.safetensors`` holds unit vectors (I, D).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from ermoe.analysis.page import Page, table, tiles
from ermoe.data.folders import SUFFIXES
from ermoe.data.images import Images, ImagesInFiles
from ermoe.errors import UserError
from ermoe.files import (
    LARGEST_TEXT,
    StrPath,
    is_hidden,
    naming_what_cannot_be_read,
    printable,
    read_object,
    replacing,
    write_json,
)
from ermoe.models.weights.stored import read_checkpoint
from ermoe.retrieval.build import load_clip, save_id
from ermoe.retrieval.clip.model import CLIP
from ermoe.retrieval.encode import encode_images, encode_texts
from ermoe.retrieval.figures import nearest
from ermoe.retrieval.report import thumbnail
from ermoe.train.compute import Compute

_FILES, _FEATURES = "index.json", "features.safetensors"


@dataclass(frozen=True, slots=True)
class Hit:
    """One image that was found."""

    file: str
    cosine: float


@dataclass(frozen=True, slots=True)
class Index:
    """Encoded images, where they lie, and the model that encoded them."""

    root: Path
    files: list[str]
    feature_ID: Tensor
    model: CLIP

    def search(self, query: str, *, top: int = 5) -> list[Hit]:
        """The images nearest to words."""
        if not query.strip():
            raise UserError("the query is empty: say what to look for")
        return self._nearest(encode_texts(self.model, [query])[0], top)

    def search_like(self, image: StrPath, *, top: int = 5) -> list[Hit]:
        """The images nearest to an image."""
        return self._nearest(encode_images(self.model, image_files(Path(), [os.fspath(image)]))[0], top)

    def _nearest(self, query_D: Tensor, top: int) -> list[Hit]:
        if top < 1:
            raise UserError(f"top={top}: need at least 1")
        return [Hit(self.files[place], cosine) for place, cosine in nearest(query_D, self.feature_ID, top)]


def build_index(
    model: StrPath, images: StrPath, out: StrPath, *, batch_size: int = 100, compute: Compute | None = None
) -> Index:
    """Encodes every image file below a folder and writes the index."""
    compute = Compute() if compute is None else compute
    root = Path(images)
    seen = (path for path in root.rglob("*") if path.suffix.lower() in SUFFIXES and not is_hidden(path, below=root))
    files = sorted(path.relative_to(root).as_posix() for path in seen)
    if not files:
        raise UserError(f"{root} holds no image files: name a folder of images")
    if odd := [file for file in files if printable(file) != file]:
        raise UserError(f"{printable(odd[0])} in {root} is not named in plain letters of UTF-8: rename it")
    clip = load_clip(model, device=compute.device)
    feature_ID = encode_images(clip, image_files(root, files), batch_size=batch_size, compute=compute)
    content = {"model": _lasting(model), "save": save_id(model), "root": str(root.resolve()), "files": files}
    if compute.group.is_main:
        with replacing(Path(out) / _FEATURES) as features:
            save_file({"image": feature_ID}, features)
        write_json(Path(out) / _FILES, content)
    return Index(root, files, feature_ID, clip)


def open_index(
    folder: StrPath, *, model: StrPath | None = None, images: StrPath | None = None, device: torch.device | str = "cpu"
) -> Index:
    """An index that `build_index` wrote; ``model`` and ``images`` say where these lie now, if they moved."""
    place = Path(folder)
    if not (place / _FILES).exists() or not (place / _FEATURES).exists():
        raise UserError(f"{place} is no index: make one with ermoe retrieve index MODEL IMAGES --out {place}")
    made_by, save, root, files, feature_ID = _stored(place)
    where = made_by if model is None else model
    with naming_what_cannot_be_read():
        is_gone = Path(where).is_absolute() and not Path(where).exists()
    if is_gone:
        raise UserError(f"{where}, which made {place}, is no longer there: say where it lies now with --model")
    if save_id(where) != save:
        raise UserError(f"{where} is not the model that made {place}, or was trained since: make the index anew")
    clip = load_clip(where, device=device)
    if feature_ID.shape != (len(files), clip.embed_dim) or not bool(feature_ID.isfinite().all()):
        raise UserError(f"{place} is damaged ({len(files)} files, vectors {tuple(feature_ID.shape)}): make it anew")
    return Index(Path(root if images is None else images), files, feature_ID, clip)


def _stored(folder: Path) -> tuple[str, str | None, str, list[str], Tensor]:
    """Model, its save, root, files and vectors of an index, as its two files have them."""
    anew = "make the index anew"
    content = read_object(folder / _FILES, anew, limit=LARGEST_TEXT)
    feature_ID = read_checkpoint(folder / _FEATURES).get("image")
    made_by, save, root, files = (content.get(name) for name in ("model", "save", "root", "files"))
    texts = [made_by, root, "" if save is None else save, *(files if isinstance(files, list) else [None])]
    if not all(isinstance(text, str) for text in texts) or feature_ID is None or feature_ID.dtype != torch.float32:
        raise UserError(f"{folder} is damaged: {anew}")
    return str(made_by), save, str(root), texts[3:], feature_ID


def image_files(root: Path, files: list[str]) -> Images:
    """Image files without labels."""
    label_N = torch.zeros(len(files), dtype=torch.long)
    return ImagesInFiles(root, files, summary=f"{len(files)} files", split="all", classes=["", ""], label_N=label_N)


def write_hits(index: Index, query: str, hits: list[Hit], path: StrPath) -> Path:
    """A small page that shows what was found."""
    page = Page(f"“{query}”", f"The {len(hits)} nearest of {len(index.files):,} images.")
    if gone := [hit.file for hit in hits if not (index.root / hit.file).is_file()]:
        raise UserError(f"{gone[0]} is no longer in {index.root}: say where the images lie now with --images")
    found = image_files(index.root, [hit.file for hit in hits])
    shown = [(thumbnail(found, place), hit.file) for place, hit in enumerate(hits)]
    rows = [[str(place), hit.file, f"{hit.cosine:.3f}"] for place, hit in enumerate(hits, 1)]
    page.section("Found", "Best first.", [tiles(shown), table(["", "file", "cosine"], rows)])
    return page.write(path)


def _lasting(model: StrPath) -> str:
    """A path that means the same from another folder; a hub name stays as it is."""
    return str(Path(model).resolve()) if Path(model).exists() else os.fspath(model)
