"""What the experts of models do: one pass over a data set for each model, and one report of all of them.

Letters: N images, P pictures.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn

from ermoe.analysis.recorder import RoutingRecorder, record_routing
from ermoe.data.augment import Batch, Transform
from ermoe.data.images import Images, open_images, some_of
from ermoe.errors import UserError
from ermoe.explorer.cards import Cards
from ermoe.explorer.commands import Settings
from ermoe.explorer.inspection import AtK, Inspection, inspection_page, short
from ermoe.explorer.patches import Patched, patch_experts, patch_grid
from ermoe.explorer.places import is_brain_age, is_index, model_names
from ermoe.files import StrPath, several
from ermoe.images.run import transform_for
from ermoe.models.io import load
from ermoe.nn import Router, moe_layers
from ermoe.train.compute import Compute, Processes
from ermoe.train.loader import Loader
from ermoe.train.run_folder import RunFolder, model_folder, read_lines

_K_VALUES = (1, 2, 3, 4, 6)
_log = logging.getLogger("ermoe")


def inspect(
    models: StrPath | Sequence[StrPath],
    data: StrPath | None = None,
    out: StrPath = "runs/inspect",
    *,
    captions: StrPath | None = None,
    settings: Settings | None = None,
    device: torch.device | str = "cpu",
    console: Console | None = None,
) -> Path:
    """Looks into the routing of models and writes ``out``/report.html, which it returns, and ``out``/figures.

    Args:
        models: run folders, model folders or repositories of the hub, one or several, which are shown side by side; one
            index of `ermoe.retrieval.build_index`; or one run of `ermoe.brain.train`.
        data: images, whose test split is routed, as for `ermoe.open_images`; of a brain model, scans. An index brings
            its own.
        out: folder for the report; an older one in it is replaced.
        captions: captioned images, which describe the experts of an index.
        settings: how closely to look.
        device: where models run.
        console: for a bar; None shows nothing.
    """
    settings = Settings() if settings is None else settings
    places = several(models)
    if not places:
        raise UserError("no model given: ermoe inspect MODEL… --data DATA")
    write = partial(_write, out=Path(out), settings=settings)
    if special := next((place for place in places if is_index(place) or is_brain_age(place)), None):
        if len(places) > 1:
            raise UserError(f"{special} is no classifier of images to put beside others: inspect it alone")
        if is_index(special):
            return write(*_of_index(special, data, captions, settings, device, console))
    if captions is not None:
        raise UserError("--captions describe the experts of an index: ermoe inspect INDEX --captions FILE")
    if data is None:
        scans = special is not None
        raise UserError(f"no {'scans' if scans else 'images'} given: ermoe inspect {places[0]} --data DATA")
    if special is not None:
        from ermoe.explorer.inspect_brains import of_brains

        return write(*of_brains(special, data, device=device, console=console), noun="scan")
    named = zip(model_names(places), places, strict=True)
    loaded = {name: load(model_folder(place), device=device) for name, place in named}
    for name, model in loaded.items():
        if not moe_layers(model):
            raise UserError(
                f"{name} has no mixture-of-experts layer to look into: inspect a sparse model, or make this one sparse "
                "with ermoe.upcycle"
            )
    images = open_images(data, "test")
    found = {}
    for (name, model), place in zip(loaded.items(), places, strict=True):
        found[name] = look_into(model, images, settings, name=name, epochs=epochs_of(place), console=console)
    return write(found, images.summary, len(images))


def _write(
    found: dict[str, Inspection], data: str, number: int, *, out: Path, settings: Settings, noun: str = "image"
) -> Path:
    page = inspection_page(
        found,
        data=data,
        num_images=number,
        figures=out / "figures",
        num_k_images=len(_spread_out(number, settings.k_images)),
        noun=noun,
    )
    return page.write(out / "report.html")


def _of_index(
    index: str,
    data: StrPath | None,
    captions: StrPath | None,
    settings: Settings,
    device: torch.device | str,
    console: Console | None,
) -> tuple[dict[str, Inspection], str, int]:
    """The tower that sees, of the model of an index, on its images, with captions for its experts."""
    from ermoe.explorer.search import open_search

    if data is not None:
        raise UserError(f"{index} is an index, which brings its images along: leave --data out")
    search, images = open_search(index, captions, device=device)
    subject = search.subject
    seen = look_into(subject.model, images, settings, name=subject.name, transform=subject.transform, console=console)
    return {subject.name: replace(seen, words=search.words)}, images.summary, len(images)


def look_into(
    model: nn.Module,
    images: Images,
    settings: Settings,
    *,
    name: str = "",
    epochs: Sequence[dict[str, float]] = (),
    transform: Transform | None = None,
    console: Console | None = None,
) -> Inspection:
    """Everything about one model: a recorded pass over all images, and two short ones over a few.

    ``transform`` is how it wants images, unless it says so itself; images may have no classes, or unnamed ones.
    """
    has_classes = any(images.classes)
    knows = has_classes and getattr(model, "num_classes", None) == len(images.classes)
    if has_classes and not knows:
        _log.warning("%s knows other classes than %s: accuracy is left out", name or "the model", images.summary)
    compute = Compute(Processes(device=next(model.parameters()).device), workers=settings.workers)
    transform = transform_for(model) if transform is None else transform
    loader = Loader(transform.of(images), batch_size=settings.batch_size, compute=compute)
    side = transform.size
    cards = Cards(model, patch_grid(model, torch.empty(1, 3, side, side)), images.classes)
    with record_routing(model, classes=images.classes if has_classes else None) as recorder:
        logit_NC = _pass(model, transform, loader, recorder, cards, name, console)
    guess_N = logit_NC.argmax(1) if knows else None
    patched = _patched(model, transform, images, settings, guess_N)
    if guess_N is None:
        return Inspection(recorder, patched, epochs=epochs, cards=cards)
    accuracy = float((guess_N == images.label_N).double().mean())
    return Inspection(recorder, patched, accuracy, _by_k(model, images, settings, guess_N), epochs, cards)


@torch.inference_mode()
def _pass(
    model: nn.Module,
    transform: Transform,
    loader: Loader[Batch],
    recorder: RoutingRecorder,
    cards: Cards,
    name: str,
    console: Console | None,
) -> Tensor:
    """All logits, (N, C), with a progress bar."""
    model.eval()
    total = math.ceil(len(loader.source) / loader.batch_size)
    parts = []
    for batch in track(loader, name, total, console=console, transient=True, disable=console is None):
        if recorder.class_names:
            recorder.labels(batch.label)
        pixel_B3SS = transform.pixels(batch.image)
        parts.append(cards.add(replace(batch, image=_as_model(model, batch.image)), pixel_B3SS).float().cpu())
    return torch.cat(parts)


def _logits(model: nn.Module, image: Tensor) -> Tensor:
    logit_NC: Tensor = model(_as_model(model, image)).float().cpu()
    return logit_NC


def _as_model(model: nn.Module, image: Tensor) -> Tensor:
    parameter = next(model.parameters())
    return image.to(parameter.device, parameter.dtype)


def _spread_out(num_images: int, wanted: int) -> np.ndarray:
    """Evenly spaced indices, because many data sets are sorted by class.

    >>> _spread_out(10, 3).tolist()
    [0, 3, 6]
    """
    wanted = min(wanted, num_images)
    return np.arange(wanted) * num_images // max(wanted, 1)


@torch.inference_mode()
def _by_k(model: nn.Module, images: Images, settings: Settings, own_N: Tensor) -> list[AtK]:
    """Accuracy with other numbers of experts a token, on a few images; the model's own number needs no second pass."""
    routers = routers_with_k(model)
    index_P = _spread_out(len(images), settings.k_images)
    if not routers or not len(index_P):
        return []
    own, most = routers[0].top_k or 0, min(router.num_experts for router in routers)
    few = some_of(images, index_P)
    batches = list(Loader(transform_for(model).of(few), batch_size=settings.batch_size))
    own_P, found = own_N[torch.from_numpy(index_P)], []
    for top_k in sorted({k for k in _K_VALUES if k <= most} | {own}):
        guess_P = own_P
        if top_k != own:
            with experts_a_token(model, top_k):
                guess_P = torch.cat([_logits(model, batch.image).argmax(1) for batch in batches])
        accuracy = float((guess_P == few.label_N).double().mean())
        half_width = 1.96 * math.sqrt(accuracy * (1 - accuracy) / len(few))
        found.append(AtK(top_k, accuracy, half_width, float((guess_P == own_P).double().mean())))
    return found


def routers_with_k(model: nn.Module) -> list[Router]:
    """The routers of all layers, if each token chooses a number of experts in every one of them."""
    layers = moe_layers(model).values()
    routers = [layer.router for layer in layers if layer.router is not None and layer.router.top_k is not None]
    return routers if len(routers) == len(layers) else []


@contextmanager
def experts_a_token(model: nn.Module, top_k: int) -> Iterator[None]:
    """Within it, every token of the model meets ``top_k`` experts."""
    before = {router: router.top_k for router in routers_with_k(model)}
    try:
        for router in before:
            router.top_k = top_k
        yield
    finally:
        for router, value in before.items():
            router.top_k = value


def _patched(
    model: nn.Module, transform: Transform, images: Images, settings: Settings, guess_N: Tensor | None
) -> Patched:
    """A few images of different classes, as the model sees them, and the experts of their patches."""
    index_P = _one_of_each(images.label_N, settings.pictures)
    pixel_P3SS = transform.host(images, index_P, 0)
    image_P3SS = transform.device(pixel_P3SS, images.label_N[torch.from_numpy(index_P)], index_P, 0).image
    parameter = next(model.parameters())
    experts = patch_experts(model, image_P3SS.to(parameter.device, parameter.dtype), patch_grid(model, image_P3SS))
    labels = images.label_N[torch.from_numpy(index_P)].tolist()
    mistakes = [""] * len(index_P)
    if guess_N is not None:
        guesses = guess_N[torch.from_numpy(index_P)].tolist()
        mistakes = ["" if g == label else images.classes[g] for g, label in zip(guesses, labels, strict=True)]
    return Patched(
        pictures=[Image.fromarray(pixel_3SS.permute(1, 2, 0).numpy()) for pixel_3SS in pixel_P3SS],
        captions=[images.classes[label] for label in labels],
        experts={short(layer): expert.numpy() for layer, expert in experts.items()},
        num_experts=max(layer.experts.num_experts for layer in moe_layers(model).values()),
        mistakes=mistakes,
    )


def _one_of_each(label_N: Tensor, wanted: int) -> np.ndarray:
    """The first image of every class; of evenly spaced classes where there are too many, more of each if too few."""
    label, order = label_N.numpy(), []
    classes = np.unique(label)
    chosen = classes[_spread_out(len(classes), wanted)]
    rounds = math.ceil(wanted / len(chosen))
    for turn in range(rounds):
        order += [rows[turn] for rows in (np.flatnonzero(label == c) for c in chosen) if len(rows) > turn]
    return np.array(order[:wanted])


def epochs_of(model: StrPath) -> list[dict[str, float]]:
    """The evaluations that the run at ``model`` wrote down, one a row with its epoch; empty for a mere model."""
    folder = next((f for f in (Path(model), *Path(model).parents[:2]) if (f / "metrics.jsonl").is_file()), None)
    if folder is None:
        return []
    lines = [line for line in read_lines(RunFolder(folder).metrics) if line.get("kind") == "test"]
    return [{**line, "epoch": number} for number, line in enumerate(lines, 1)]
