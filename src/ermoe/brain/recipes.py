"""Named recipes: sizes, methods and training, each preset a function that says what it is for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ermoe.brain.age_head import AgeBins, AgeHead, AgeRegression
from ermoe.brain.contrast import num_channels, reduction
from ermoe.brain.data.augment import VolumeAugmentation
from ermoe.brain.data.preprocess import Preprocessing
from ermoe.brain.rivals.sfcn import SFCN
from ermoe.brain.rivals.swin3d import Swin3D
from ermoe.errors import UserError
from ermoe.models.scratch import FROM_SCRATCH, restart_ffns
from ermoe.models.upcycle import upcycle
from ermoe.models.vit3d import ViT3D
from ermoe.train.settings import STEADY_BASES, Training

NETWORKS = ("ermoe", "ermoe-context", "vit3d", "swin3d", "sfcn")
"""ERMoE-ba with the prototype score of Alg. 2 or the context score of Eq. 5, and what it is compared with."""
WITHOUT_CUBES = ("swin3d", "sfcn")
"""These need every voxel."""
HEADS = ("bins", "bins-l1", "regression")


@dataclass(frozen=True, slots=True)
class Phantoms:
    """The synthetic cohort a model may start from, and how long it learns from it."""

    subjects: int = 240
    epochs: int = 20
    base_lr: float = 1e-3
    variants: int = 4
    ages: tuple[float, float] = (20.0, 90.0)
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything but the data.

    Args:
        method: one of `NETWORKS`.
        size: options of the transformer: embed_dim, depth, num_heads, mlp_ratio, patch_size, global_pool, ….
        sparsity: options of `ermoe.upcycle` for the methods with experts.
        rivals: options of SFCN and Swin3D, by method.
        head: "bins" (soft labels), "bins-l1" (cross-entropy plus absolute error) or "regression".
        sigma: width of soft labels in years; ``step`` is that of a bin.
        l1: weight of the absolute error in years beside soft labels.
        input: "t1", "contrast" or "blocks", see `ermoe.brain.contrast`; convolutions and Swin see "contrast"
            where transformers see "blocks".
        volumes_per_epoch: an epoch of a small cohort goes round until it has seen so many.
        augmentation: of volumes, None for none; ``variants`` inputs of each scan are made once and kept, 0 makes them
            anew every time.
        drop_cubes, input_noise: of the network's input, drawn anew at every step.
        warm_start_epochs: over isolated tissues, with forced routing; 0 for none.
        rate_after_warm_start: of whole scans that follow a warm start, in units of the learning rate.
        probe_epochs: after which, besides the last, isolated tissues show which experts they would choose.
        phantoms: what ``init="phantom"`` learns from.
    """

    method: str
    size: dict[str, Any]
    sparsity: dict[str, Any]
    training: Training
    rivals: dict[str, dict[str, Any]] = field(default_factory=dict)
    preprocessing: Preprocessing = field(default_factory=Preprocessing)
    augmentation: VolumeAugmentation | None = field(default_factory=VolumeAugmentation)
    head: str = "bins"
    step: float = 1.0
    sigma: float = 1.0
    l1: float = 0.0
    input: str = "t1"
    volumes_per_epoch: int = 0
    evaluate_every: int = 1
    variants: int = 0
    drop_cubes: float = 0.0
    input_noise: float = 0.0
    warm_start_epochs: int = 0
    rate_after_warm_start: float = 1.0
    probe_epochs: tuple[int, ...] = (1, 5)
    phantoms: Phantoms = field(default_factory=Phantoms)

    def __post_init__(self) -> None:
        if self.method not in NETWORKS:
            raise UserError(f"there is no method {self.method!r}: use one of {', '.join(NETWORKS)}")
        if self.head not in HEADS:
            raise UserError(f"there is no head {self.head!r}: use one of {', '.join(HEADS)}")
        num_channels(self.input)
        if self.method in WITHOUT_CUBES and self.input == "blocks":
            raise UserError(f"{self.method} needs every voxel: use input 'contrast' or 't1'")
        if self.patch_size < 1 or self.patch_size % reduction(self.input):
            block = reduction(self.input)
            raise UserError(
                f"patch_size={self.patch_size}: blocks of {block} voxels must fill a cube, as in {2 * block}"
            )

    @property
    def has_experts(self) -> bool:
        """Whether the method routes."""
        return self.method.startswith("ermoe")

    def after_warm_start(self) -> Recipe:
        """For whole scans once region experts have been taught: gently, if what they were taught is to stay."""
        training = replace(self.training, base_lr=self.rate_after_warm_start * self.training.base_lr)
        return replace(self, training=training)

    def age_head(self, ages: Iterable[float]) -> AgeHead:
        """The head for people of these ages: bins reach five years beyond them, and over the phantoms' range."""
        known = [*ages, *self.phantoms.ages]
        if self.head == "regression":
            return AgeRegression(mean=sum(known) / len(known), scale=max(1.0, (max(known) - min(known)) / 4))
        low, high = 5 * math.floor((min(known) - 5) / 5), 5 * math.ceil((max(known) + 5) / 5)
        if self.head == "bins-l1":
            return AgeBins(low, high, self.step, labels="hard", l1=self.l1 or 0.1)
        return AgeBins(low, high, self.step, sigma=self.sigma, l1=self.l1)

    def build(self, head: AgeHead) -> nn.Module:
        """The network before training; its weights are a function of the seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.training.seed)
            network = self._network(head.num_outputs)
        generator = torch.Generator().manual_seed(self.training.seed)
        if self.method not in WITHOUT_CUBES:
            restart_ffns(network, generator)
        if not self.has_experts:
            return network
        score = "eigenbasis" if self.method == "ermoe-context" else "prototype"
        return upcycle(network, init="same", inplace=True, generator=generator, score=score, **self.sparsity)

    def _network(self, num_outputs: int) -> nn.Module:
        common: dict[str, Any] = {"num_classes": num_outputs, "in_chans": num_channels(self.input)}
        own = self.rivals.get(self.method, {})
        if self.method == "sfcn":
            return SFCN(**common, **own)
        if self.method == "swin3d":
            return Swin3D(**common, **own)
        coarser = reduction(self.input)
        volume_size = [math.ceil(edge / coarser) for edge in self.preprocessing.shape]
        return ViT3D(volume_size, **common, **{**self.size, "patch_size": self.patch_size // coarser})

    @property
    def patch_size(self) -> int:
        """Edge of a cube in voxels, also of what the occlusion map hides of networks without cubes."""
        return int(self.size["patch_size"])

    def as_json(self) -> dict[str, Any]:
        """Plain values, for config.json."""
        return {**asdict(self), "preprocessing": self.preprocessing.to_dict()}


_EIGHT_EXPERTS: dict[str, Any] = {**FROM_SCRATCH, "num_experts": 8, "top_k": 2, "blocks": "every-2"}


def small(method: str) -> Recipe:
    """For two cores and a few dozen people: 252 cubes of 32 mm, width 64, depth 4, experts in blocks 1 and 3.

    Run: ``ermoe brain train BIDS``. Few and small steps, from the usual age: with so few people, a network that goes
    further learns them by heart. The head reads the mean of the cubes, which learns within far fewer steps than a class
    token. What was tried: docs/brain-age.md.
    """
    return Recipe(
        method,
        size={
            "patch_size": 16, "embed_dim": 64, "depth": 4, "num_heads": 4, "mlp_ratio": 2.0, "global_pool": "avg",
            "drop_path_rate": 0.1,
        },
        sparsity={**_EIGHT_EXPERTS, "route_rank": 16},
        rivals={
            "sfcn": {"channels": (16, 32, 64, 128, 128, 64), "drop_rate": 0.3},
            "swin3d": {"embed_dim": 12, "depths": (1, 1, 2, 1), "num_heads": (2, 4, 8, 16)},
        },
        training=Training(
            epochs=16, batch_size=16, base_lr=1e-2, warmup_epochs=4.0, ema=0.95, clip=1.0, log_every=10,
            **STEADY_BASES,
        ),
        head="bins",
        sigma=4.0,
        l1=1.0,
        input="contrast" if method in WITHOUT_CUBES else "blocks",
        volumes_per_epoch=64,
        evaluate_every=4,
        augmentation=None,
        variants=1,
        drop_cubes=0.2,
        input_noise=0.1,
        warm_start_epochs=3,
        phantoms=Phantoms(base_lr=1e-2),
    )  # fmt: skip


def paper(method: str) -> Recipe:
    """The paper's recipe: 16³ cubes, 8 experts of which 3 have a tissue, T = 0.5, no offsets, class token, 300 epochs.

    Run: ``ermoe brain train BIDS --preset paper`` with a GPU. The paper does not print the transformer's size; this is
    ViT-B's, with the ranks of the image model. Batch 100, 1e-4 × batch / 256, 5 epochs of warm-up, λ = 5e-5.
    """
    return Recipe(
        method,
        size={"patch_size": 16, "embed_dim": 768, "depth": 12, "num_heads": 12},
        sparsity={"num_experts": 8, "top_k": 2, "blocks": "every-2", "rank": 504, "route_rank": 56, "balance": "none"},
        rivals={"swin3d": {"embed_dim": 48, "window_size": 7, "depths": (2, 2, 6, 2)}},
        training=Training(),
        warm_start_epochs=5,
        phantoms=Phantoms(subjects=1000, epochs=50, base_lr=1e-4),
    )


def tiny(method: str) -> Recipe:
    """For tests and the demonstration: 32³ voxels of 6 mm, 64 cubes of 8³, width 32; a run takes seconds."""
    return replace(
        small(method),
        size={
            "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "mlp_ratio": 2.0, "global_pool": "avg"
        },
        sparsity={**_EIGHT_EXPERTS, "route_rank": 8},
        rivals={
            "sfcn": {"channels": (4, 4, 8, 8, 8, 8)},
            "swin3d": {"embed_dim": 6, "window_size": 2, "depths": (1,) * 4, "num_heads": (1, 2, 2, 2)},
        },
        preprocessing=Preprocessing(spacing_mm=6.0, shape=(32, 40, 32)),
        training=Training(epochs=2, batch_size=4, base_lr=0.1, warmup_epochs=0.2, ema=0.9, log_every=5, **STEADY_BASES),
        volumes_per_epoch=16,
        evaluate_every=1,
        augmentation=VolumeAugmentation(),
        variants=2,
        warm_start_epochs=1,
        phantoms=Phantoms(subjects=8, epochs=1, base_lr=0.1),
    )  # fmt: skip


PRESETS: dict[str, Callable[[str], Recipe]] = {"small": small, "paper": paper, "tiny": tiny}


def recipe(preset: str, method: str = "ermoe", **changes: Any) -> Recipe:
    """The recipe of a preset for a method; ``changes`` are fields of `Recipe` or of its `Training`.

    >>> recipe("small", "vit3d", epochs=3, head="regression").training.epochs
    3
    """
    if preset not in PRESETS:
        raise UserError(f"there is no preset {preset!r}: use one of {', '.join(PRESETS)}")
    chosen = PRESETS[preset](method)
    of_training = {name: value for name, value in changes.items() if name in Training.__slots__}
    of_recipe = {name: value for name, value in changes.items() if name not in of_training}
    return replace(chosen, training=replace(chosen.training, **of_training), **of_recipe)
