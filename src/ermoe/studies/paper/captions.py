"""What the retrieval studies share: generated scenes or a real set, towers trained once, test splits read once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from ermoe.studies.figures import cell, figures_of, verdict
from ermoe.studies.paper.study import Findings, Job, Record, Setup, Study, slug
from ermoe.train.settings import NO_AUGMENTATION

CUTS = ("i2t_r1", "i2t_r5", "i2t_r10", "t2i_r1", "t2i_r5", "t2i_r10")
METHODS = {
    "dense": "CLIP, dense image tower",
    "v-moe": "CLIP with V-MoE",
    "ermoe-none": "CLIP-ERMoE (paper's rule)",
    "ermoe": "CLIP-ERMoE with offsets",
}
_SCENE_SEEDS = {"coco": 0, "flickr": 1}
_SCENES = {"img_size": 48, "patch_size": 8, "embed_dim": 96, "depth": 4, "num_heads": 3, "global_pool": "avg"}


def place_of(setup: Setup, study: str) -> str:
    """--data, or generated scenes, others for every study."""
    if setup.data is not None:
        return setup.data
    if setup.is_full:
        raise UserError("--scale full wants the real data: name its folder with --data")
    return str(write_shapes(setup.work / f"shapes-{study}", seed=_SCENE_SEEDS[study]))


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


def trained(setup: Setup, study: str, protocol: str, method: str, seed: int, *, tuned: bool = False) -> Path:
    """The run folder of one model. A frozen text tower is the one that a dense model learned, or CLIP's own."""
    data = place_of(setup, study)
    folder = setup.trained(slug(data)) / f"{method}-{'tuned' if tuned else 'frozen'}-{seed}"
    options: dict[str, Any] = {"protocol": protocol, "cache": not setup.is_full, "compute": setup.compute()}
    if setup.is_full:
        options |= {"weights": setup.weights, "image_weights": setup.pretrain}
    elif not tuned:
        options["text_from"] = str(trained(setup, study, protocol, "dense", seed, tuned=True))
    train(recipe_of(setup, method if tuned else f"{method}-frozen", seed), data, folder, **options)
    return folder


def measure(setup: Setup, study: str, protocol: str, method: str, seed: int, *, tuned: bool = False) -> dict[str, Any]:
    """Recall on the test split, with chance beside it."""
    folder = trained(setup, study, protocol, method, seed, tuned=tuned)
    record = evaluate(folder, place_of(setup, study), protocol, compute=setup.compute()).record
    return {"figures": record["figures"], "chance": record["chance"], "num_images": record["num_images"]}


def protocol_for(setup: Setup, full: str) -> str:
    """The paper's pool at full scale; otherwise whatever is there, by its own size."""
    return full if setup.is_full else "custom"


def describe(study: str, protocol: str, setup: Setup) -> str:
    """Data and towers, in a sentence."""
    chosen = recipe_of(setup, "dense", 1)
    data = open_captions(place_of(setup, study), protocol_for(setup, protocol), "test")
    towers = (
        "ImageNet's ViT-B/16 and CLIP's text tower"
        if setup.is_full
        else f"small towers from scratch ({chosen.image_args['img_size']} pixels), {chosen.training.epochs} epochs; "
        "the frozen text tower is the one that a dense model learned"
    )
    made = f"generated shapes, {len(data):,} test images with {len(data.texts):,} captions"
    return f"{data.summary if setup.data else made}; {towers}; {setup.in_seeds}."


def study_of(name: str, title: str, paper: str, protocol: str, quoted: Mapping[str, Sequence[str]]) -> Study:
    """A table of recalls: the paper's rows as they are printed, then ours."""

    def jobs(setup: Setup) -> list[Job]:
        chosen = protocol_for(setup, protocol)
        return [
            Job(method, seed, partial(measure, setup, name, chosen, method, seed))
            for seed in setup.each_seed()
            for method in METHODS
        ]

    def findings(setup: Setup, records: Sequence[Record]) -> Findings:
        header = ["model", *(cut.upper().replace("_", " ") for cut in CUTS)]
        rows = [[f"paper: {row}", *values] for row, values in quoted.items()]
        rows += [
            [label, *(cell(figures_of(records, method, "figures", cut), ".1%") for cut in CUTS)]
            for method, label in METHODS.items()
        ]
        chance = [cell(figures_of(records, "dense", "chance", cut)[:1], ".1%") for cut in CUTS]
        rows.append(["chance", *chance])
        value = partial(figures_of, records)
        sentences = [
            verdict(
                value("ermoe-none", "figures", cut),
                value(other, "figures", cut),
                larger="ERMoE",
                smaller=METHODS[other],
                what=cut.upper().replace("_", " "),
                form=".1%",
            )
            for other in ("dense", "v-moe")
            for cut in ("i2t_r1", "t2i_r1")
        ]
        return Findings(header, rows, sentences)

    return Study(name, title, paper, partial(describe, name, protocol), jobs, findings)
