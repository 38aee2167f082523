"""Retrieval with an ERMoE image tower: COCO and Flickr30k (Tab. 3, 4), and tuning the text tower (Suppl. 14).

Generated scenes or a real set; towers are trained once for all of them, and test splits are read once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ermoe.errors import UserError
from ermoe.retrieval.captions.catalogue import open_captions
from ermoe.retrieval.evaluation import evaluate
from ermoe.retrieval.presets import RetrievalRecipe, recipe
from ermoe.retrieval.run import train
from ermoe.retrieval.shapes import write_shapes
from ermoe.studies.figures import Runs, cell
from ermoe.studies.paper.setup import Setup, slug
from ermoe.studies.paper.study import Findings, Job, every, in_pairs, study
from ermoe.train.settings import NO_AUGMENTATION

CUTS = ("i2t_r1", "i2t_r5", "i2t_r10", "t2i_r1", "t2i_r5", "t2i_r10")
METHODS = {
    "dense": "CLIP, dense image tower",
    "v-moe": "CLIP with V-MoE",
    "ermoe-none": "CLIP-ERMoE (paper's rule)",
    "ermoe": "CLIP-ERMoE with offsets",
}
_PROTOCOLS = {"coco": "coco-karpathy-5k", "flickr": "flickr30k-karpathy-1k"}
_SCENE_SEEDS = {"coco": 0, "flickr": 1}
_SCENES = {"img_size": 48, "patch_size": 8, "embed_dim": 96, "depth": 4, "num_heads": 3, "global_pool": "avg"}


def place_of(setup: Setup, name: str) -> str:
    """--data, or generated scenes, others for every study."""
    if setup.data is not None:
        return setup.data
    if setup.is_full:
        raise UserError("--scale full wants the real data: name its folder with --data")
    return str(write_shapes(setup.work / f"shapes-{name}", seed=_SCENE_SEEDS[name]))


def recipe_of(setup: Setup, method: str, seed: int) -> RetrievalRecipe:
    """The paper's towers, the small ones for 96 pixels, or still smaller ones for generated scenes."""
    chosen = recipe(f"{'imagenet-b16' if setup.is_full else 'small'}-{method}")
    training = replace(chosen.training, seed=seed)
    if setup.data is None:
        text = replace(chosen.text, width=64, heads=2, layers=2)
        training = replace(training, epochs=12, batch_size=100, base_lr=4e-3)
        # A crop would cut off shapes that the caption names.
        chosen = replace(chosen, image_args=_SCENES, text=text, embed_dim=64, augmentation=NO_AUGMENTATION)
    return replace(chosen, training=replace(training, epochs=setup.epochs or training.epochs), preset="own")


def _protocol(setup: Setup, name: str) -> str:
    """The paper's pool at full scale; otherwise whatever is there, by its own size."""
    return _PROTOCOLS[name] if setup.is_full else "custom"


def trained(setup: Setup, name: str, method: str, seed: int, *, tuned: bool = False) -> Path:
    """The run folder of one model. A frozen text tower is the one that a dense model learned, or CLIP's own."""
    data = place_of(setup, name)
    folder = setup.trained(slug(data)) / f"{method}-{'tuned' if tuned else 'frozen'}-{seed}"
    options: dict[str, Any] = {"protocol": _protocol(setup, name), "cache": not setup.is_full}
    if setup.is_full:
        options |= {"weights": setup.weights, "image_weights": setup.pretrain}
    elif not tuned:
        options["text_from"] = str(trained(setup, name, "dense", seed, tuned=True))
    chosen = recipe_of(setup, method if tuned else f"{method}-frozen", seed)
    train(chosen, data, folder, compute=setup.compute(), **options)
    return folder


def _recalls(setup: Setup, name: str, method: str, seed: int, *, tuned: bool = False) -> dict[str, Any]:
    """Recall on the test split, with chance beside it."""
    folder = trained(setup, name, method, seed, tuned=tuned)
    record = evaluate(folder, place_of(setup, name), _protocol(setup, name), compute=setup.compute()).record
    return {"figures": record["figures"], "chance": record["chance"], "num_images": record["num_images"]}


def _methods_on(name: str) -> Callable[[Setup], Sequence[Job]]:
    """Every method with a frozen text tower."""
    return every(METHODS, lambda setup, method, seed: _recalls(setup, name, method, seed))


def _describe(name: str, setup: Setup) -> str:
    """Data and towers, in a sentence."""
    chosen = recipe_of(setup, "dense", 1)
    data = open_captions(place_of(setup, name), _protocol(setup, name), "test")
    towers = (
        "ImageNet's ViT-B/16 and CLIP's text tower"
        if setup.is_full
        else f"small towers from scratch ({chosen.image_args['img_size']} pixels), {chosen.training.epochs} epochs; "
        "the frozen text tower is the one that a dense model learned"
    )
    made = f"generated shapes, {len(data):,} test images with {len(data.texts):,} captions"
    return f"{data.summary if setup.data else made}; {towers}; {setup.in_seeds}."


def _titles(cuts: Iterable[str]) -> list[str]:
    return [cut.upper().replace("_", " ") for cut in cuts]


def _recall_table(runs: Runs, quoted: Mapping[str, Sequence[str]]) -> Findings:
    """The paper's rows as they are printed, then ours."""
    rows = [[f"paper: {row}", *values] for row, values in quoted.items()]
    for method, label in METHODS.items():
        rows.append([label, *(runs.cell(method, "figures", cut, style=".1%") for cut in CUTS)])
    rows.append(["chance", *(cell(runs.of("dense", "chance", cut)[:1], ".1%") for cut in CUTS)])
    sentences = [
        runs.verdict(("ermoe-none", "ERMoE"), (other, METHODS[other]), "figures", cut, what=title, form=".1%")
        for other in ("dense", "v-moe")
        for cut, title in zip(("i2t_r1", "t2i_r1"), ("I2T R1", "T2I R1"), strict=True)
    ]
    return Findings(["model", *_titles(CUTS)], rows, sentences)


@study(
    "image–text retrieval on COCO",
    "COCO, 5,000 test images (it does not say which), an ImageNet image tower, CLIP's text tower frozen.",
    partial(_describe, "coco"),
    _methods_on("coco"),
)
def coco(runs: Runs) -> Findings:
    """Table 3."""
    quoted = {
        "Long-CLIP": ("62.8", "85.1", "91.2", "46.3", "70.8", "79.8"),
        "Fix-CLIP": ("62.3", "85.4", "91.4", "49.1", "73.8", "82.4"),
        "CLIP-MoE": ("65.0", "86.0", "92.0", "46.8", "71.7", "80.4"),
        "CLIP-ERMoE": ("65.4", "88.3", "94.7", "46.5", "72.9", "81.6"),
    }
    return _recall_table(runs, quoted)


@study(
    "image–text retrieval on Flickr30k",
    "Flickr30k (1,000 or all 31,783 images, it does not say), an ImageNet image tower, CLIP's text tower frozen.",
    partial(_describe, "flickr"),
    _methods_on("flickr"),
)
def flickr(runs: Runs) -> Findings:
    """Table 4."""
    quoted = {
        "Long-CLIP": ("53.4", "77.5", "85.3", "41.2", "64.1", "72.6"),
        "Fix-CLIP": ("60.5", "89.0", "89.8", "49.6", "66.9", "77.4"),
        "CLIP-MoE": ("60.5", "82.3", "88.8", "42.1", "64.7", "73.2"),
        "CLIP-ERMoE": ("63.4", "89.3", "89.8", "42.4", "64.9", "74.0"),
    }
    return _recall_table(runs, quoted)


_TEXT_TOWERS = {"frozen": ("49.1", "73.8", "82.4"), "tuned": ("50.3", "74.0", "82.6")}


def _with_text_tower(setup: Setup, row: str, seed: int) -> dict[str, Any]:
    """The paper's rule with either text tower; the frozen ones are Table 3's."""
    return _recalls(setup, "coco", "ermoe-none", seed, tuned=row == "tuned")


@study(
    "text-to-image recall with a frozen and with a tuned text tower",
    "Fix-CLIP on COCO, text tower frozen and tuned.",
    partial(_describe, "coco"),
    every(_TEXT_TOWERS, _with_text_tower),
)
def text_tuning(runs: Runs) -> Findings:
    """A row for each text tower."""
    cuts = CUTS[3:]
    header = ["text tower", *in_pairs([f"paper: {title}" for title in _titles(cuts)], _titles(cuts))]
    rows = [
        [row, *in_pairs(quoted, [runs.cell(row, "figures", cut, style=".1%") for cut in cuts])]
        for row, quoted in _TEXT_TOWERS.items()
    ]
    towers = ("tuned", "the tuned tower"), ("frozen", "the frozen one")
    sentences = [
        runs.verdict(*towers, "figures", "t2i_r1", what="T2I R1", form=".1%"),
        "The paper's figures are of Fix-CLIP, not of ERMoE; ours are of CLIP-ERMoE.",
    ]
    return Findings(header, rows, sentences)
