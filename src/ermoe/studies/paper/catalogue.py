"""All studies by name. Nothing here imports torch, so that the list appears at once."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, get_args

from ermoe.errors import UserError
from ermoe.studies.paper.setup import Scale

if TYPE_CHECKING:
    from ermoe.studies.paper.study import Study


@dataclass(frozen=True, slots=True)
class Entry:
    """Module and name of a study, which part of the paper it repeats, what that part claims, and what data it wants.

    ``tiny`` is where it starts from real weights; a study without a ``place`` has that scale alone.
    """

    place: str | None
    shows: str
    claims: str
    data: str
    tiny: str | None = None

    def at(self, scale: str) -> str | None:
        """Module and name of the study at a scale, if it has it."""
        return self.tiny if scale == "tiny" else self.place

    @property
    def scales(self) -> list[str]:
        """Those it has."""
        return [scale for scale in get_args(Scale) if self.at(scale) is not None]


_IMAGES, _CAPTIONS, _BRAINS, _NOTHING = "images", "captions", "brains", "–"

ENTRIES: dict[str, Entry] = {
    "imagenet": Entry(
        "accuracy.imagenet",
        "Tab. 1",
        "accuracy of ERMoE, V-MoE, Single-gated MoE and DeepMoE",
        _IMAGES,
        "converted.imagenet",
    ),
    "few-shot": Entry("accuracy.few_shot", "Tab. 2", "5- and 10-shot linear probes", _IMAGES, "converted.few_shot"),
    "coco": Entry("captions.coco", "Tab. 3", "COCO retrieval with an ERMoE image tower", _CAPTIONS),
    "flickr": Entry("captions.flickr", "Tab. 4", "Flickr30k retrieval with an ERMoE image tower", _CAPTIONS),
    "brain-age": Entry("brains.brain_age", "Tab. 5", "mean absolute error of brain age, by sex", _BRAINS),
    "region-routing": Entry("tissues.region_routing", "Tab. 6, Fig. S1", "tissues find their experts", _BRAINS),
    "train-heatmaps": Entry(
        "usage.train_heatmaps",
        "Fig. 3",
        "classes prefer experts, more so in deep layers",
        _IMAGES,
        "over_training.train_heatmaps",
    ),
    "balance": Entry(
        "usage.balance", "Fig. 4", "load of BASE, Soft MoE, V-MoE and ERMoE", _IMAGES, "finetuning.balance"
    ),
    "brain-scatter": Entry("brains.brain_scatter", "Fig. 2, Fig. S2", "brain age against age, test and train", _BRAINS),
    "calibration": Entry("brains.calibration", "Suppl. 5", "linear calibration of brain age", _BRAINS),
    "threshold": Entry(
        "sweeps.threshold",
        "Suppl. 6",
        "fallback is near zero below T = 0.5 and rises above",
        _IMAGES,
        "sweeps.threshold",
    ),
    "lambda": Entry("sweeps.lambda_", "Suppl. 7", "validation loss is lowest at λ = 5e-5", _IMAGES, "parts.lambda_"),
    "top-k": Entry("sweeps.top_k", "Suppl. 8", "two experts a token are best", _IMAGES, "parts.top_k"),
    "efficiency": Entry(
        "costs.efficiency", "Suppl. 9", "parameters, operations and time of an image", _NOTHING, "converted.efficiency"
    ),
    "ablation": Entry(
        "accuracy.ablation", "Suppl. 10", "normal weights, learned logits, λ = 0", _IMAGES, "parts.ablation"
    ),
    "routing-cost": Entry("costs.routing_cost", "Suppl. 11", "what the routing decision costs", _NOTHING),
    "expert-scaling": Entry("costs.expert_scaling", "Suppl. 12", "memory of 8 and of 32 experts", _NOTHING),
    "expert-choice": Entry(
        "accuracy.expert_choice", "Suppl. 13", "accuracy of expert choice", _IMAGES, "finetuning.expert_choice"
    ),
    "text-tuning": Entry("captions.text_tuning", "Suppl. 14", "tuning the text tower helps text-to-image", _CAPTIONS),
    "finetune": Entry(None, "Tab. 1", "from pretrained weights, ERMoE is above V-MoE", _IMAGES, "finetuning.finetune"),
    "stability": Entry(None, "title", "tokens keep their experts", _IMAGES, "over_training.stability"),
}


def find(name: str, scale: str = "mini") -> Study:
    """The study called ``name``, as it is at a scale."""
    if name not in ENTRIES:
        raise UserError(f"there is no study {name!r}: use one of {', '.join(ENTRIES)}")
    place = ENTRIES[name].at(scale)
    if place is None:
        raise UserError(f"--scale {scale}: {name} has no such scale; use {' or '.join(ENTRIES[name].scales)}")
    module, attribute = place.split(".")
    study: Study = getattr(import_module(f"ermoe.studies.paper.{module}"), attribute)
    return study
