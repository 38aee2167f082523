"""`explore`: from models and pictures to an explorer, for the command line and for notebooks."""

from __future__ import annotations

import contextlib
import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from timm.data import ImageNetInfo
from torch import Tensor, nn

from ermoe.data.images import Images, ImagesInMemory
from ermoe.errors import UserError, library
from ermoe.explorer.pictures import Pictures, open_pictures, sample_pictures
from ermoe.explorer.places import is_brain_age, is_index, model_names
from ermoe.explorer.search import open_search, tower
from ermoe.explorer.serve import Served
from ermoe.explorer.subject import Subject
from ermoe.files import StrPath, read_text
from ermoe.images.predicting import class_names
from ermoe.images.run import transform_for
from ermoe.models.backbones import known_family
from ermoe.models.io import load
from ermoe.train.run_folder import model_folder

_WORDS = "words.txt"
_IMAGENET = 1000


def open_explorer(
    models: Sequence[str],
    data: str | None = None,
    *,
    captions: StrPath | None = None,
    device: torch.device | str = "cpu",
    card_images: int = 300,
    command: str = "",
) -> Any:
    """The explorer of models (run folders, model folders, hub names, an index) and of the test images of a data set.

    An index brings its model and its images along.
    """
    if not models:
        raise UserError("no model given: ermoe explore MODEL… --data DATA")
    server = _server()
    options: dict[str, Any] = {"card_images": card_images, "command": command}
    if len(models) == 1 and is_brain_age(models[0]):
        from ermoe.explorer.brains import open_brains

        return open_brains(models[0], data, device=device, command=command)
    if indices := [place for place in models if is_index(place)]:
        if len(models) > 1 or data is not None:
            raise UserError(f"{indices[0]} is an index, which brings its model and images along: explore it alone")
        search, images = open_search(indices[0], captions, device=device)
        return server.Explorer([search.subject], Pictures(images), search=search, **options)
    if captions is not None:
        raise UserError("--captions describe the experts of an index: ermoe explore INDEX --captions FILE")
    images = sample_pictures() if data is None else open_pictures(data)
    images.classes = in_words(images.classes, data)
    subjects = []
    for name, place in zip(model_names(models), models, strict=True):
        model: Any = load(model_folder(place), device=device)
        if known_family(model) == "clip":
            subjects.append(tower(name, model, images))
            continue
        classes = _classes(model, images if data is not None else None, place)
        subjects.append(Subject(name, model, transform_for(model), classes, images.classes))
    return server.Explorer(subjects, Pictures(images), **options)


def _server() -> Any:
    for needed in ("starlette", "uvicorn"):
        library(needed, "the explorer is a small web server", "explore")
    from ermoe.explorer import server

    return server


def _classes(model: nn.Module, images: Images | None, folder: StrPath | None) -> list[str]:
    """Names of what a model's outputs mean: those of the data, of its run, ImageNet's for a thousand, or numbers."""
    number = int(getattr(model, "num_classes", 0) or 0)
    if images is not None and len(images.classes) == number and any(images.classes):
        return images.classes
    numbers = [str(n) for n in range(number)]
    known = numbers if folder is None else class_names(folder, number)
    if known == numbers and number == _IMAGENET:
        names = ImageNetInfo("imagenet-1k")
        return [names.index_to_description(n).split(",")[0] for n in range(number)]
    return known


def in_words(classes: Sequence[str], data: str | None) -> list[str]:
    """Class names in words, where a file words.txt beside the data says them: ImageNet's folders have numbers."""
    path = Path(data or "") / _WORDS
    if data is None or not path.is_file():
        return list(classes)
    pairs = (line.split("\t", 1) for line in read_text(path).splitlines() if "\t" in line)
    words = {name: said.split(",")[0].replace("_", " ").strip() for name, said in pairs}
    return [words.get(name) or name for name in classes]


class Shown:
    """An explorer in a notebook: the last line of a cell shows it, ``url`` is its address, ``close()`` ends it."""

    def __init__(self, served: Served, height: int) -> None:
        self.served, self.url, self.height = served, served.url, height

    def close(self) -> None:
        """Answers no more."""
        self.served.close()

    def _repr_html_(self) -> str:
        return (
            f'<iframe src="{html.escape(self.url)}" width="100%" height="{self.height}" '
            'style="border: 1px solid #d0d5dd; border-radius: 8px" title="ermoe explorer"></iframe>'
        )

    def __repr__(self) -> str:
        return f"ermoe explorer at {self.url}"


def explore(
    model: nn.Module | dict[str, nn.Module],
    images: Images | Tensor | str | None = None,
    *,
    classes: Sequence[str] | None = None,
    height: int = 820,
    card_images: int = 300,
) -> Shown:
    """Shows what the experts of a model do with images, in a notebook or at the address it prints.

    Args:
        model: a sparse image classifier, or several by name, to be put side by side.
        images: a data set (`ermoe.open_images`, or what that takes), a folder of photographs or one of them, or bytes
            (N, 3, H, W) as uint8.
        classes: what the model's outputs mean, if the images do not say it.
        height: of the page in the notebook, in pixels.
        card_images: images from which the experts' cards are made, while nothing else is asked for.
    """
    server = _server()
    shown = _images(images)
    subjects = []
    for name, own in (model if isinstance(model, dict) else {"model": model}).items():
        if not isinstance(own, nn.Module):
            raise UserError(
                f"{name} is a {type(own).__name__}: give the model itself, ermoe.load(FOLDER) for a saved one"
            )
        known = list(classes) if classes is not None else _classes(own, None if images is None else shown, None)
        subjects.append(Subject(name, own, transform_for(own), known, shown.classes))
    served = Served(server.Explorer(subjects, Pictures(shown), card_images=card_images), framed=True)
    served.start()
    return Shown(served, height)


def _images(images: Images | Tensor | str | None) -> Images:
    if images is None:
        return sample_pictures()
    if isinstance(images, Images):
        return images
    if isinstance(images, Tensor):
        if images.dtype != torch.uint8 or images.dim() != 4 or images.shape[1] not in (1, 3):
            raise UserError(
                f"images are {images.dtype} {tuple(images.shape)}: need uint8 (N, 3, H, W), bytes as in files"
            )
        label_N = torch.zeros(len(images), dtype=torch.long)
        return ImagesInMemory(images, summary=f"{len(images)} images", split="test", classes=["", " "], label_N=label_N)
    with contextlib.suppress(TypeError):
        return open_pictures(images)
    raise UserError(f"images are a {type(images).__name__}: give a data set, its path, or uint8 (N, 3, H, W)")
