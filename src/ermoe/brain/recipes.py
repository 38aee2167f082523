"""Named recipes: sizes, methods and training, each preset a function that says what it is for.

Nothing here imports torch, so that a command can show the values of a preset at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import tyro

from ermoe.brain.data.scans import Preprocessing
from ermoe.errors import UserError, unknown_name
from ermoe.train.settings import FROM_SCRATCH, STEADY_BASES, Training, changed

if TYPE_CHECKING:
    from ermoe.brain.estimation import Estimation, Lesson
    from ermoe.train.compute import Compute

Method = Literal["ermoe", "ermoe-context", "vit3d", "swin3d", "sfcn", "ridge"]
"""ERMoE-ba with the prototype score of Alg. 2 or the context score of Eq. 5, and what it is compared with; ridge is the
linear estimate without a network."""
METHODS: tuple[Method, ...] = get_args(Method)
NETWORKS = tuple(method for method in METHODS if method != "ridge")
WITHOUT_CUBES = ("swin3d", "sfcn")
"""These need every voxel."""
HeadKind = Literal["bins", "bins-cut", "bins-l1", "regression"]
InputKind = Literal["t1", "contrast", "blocks"]
"""What a network may be given: the normalised T1; shares of white matter and fluid in every voxel; or shares of white
matter, grey matter and fluid in blocks of voxels and in the whole brain."""
BLOCK = 4
"""Voxels along the edge of a block."""
CHANNELS: dict[str, int] = {"t1": 1, "contrast": 2, "blocks": 6}
"""Of each input."""


def reduction(kind: str) -> int:
    """By how much an input is coarser than the volume, along each axis.

    >>> reduction("t1"), reduction("blocks")
    (1, 4)
    """
    return BLOCK if kind == "blocks" else 1


@dataclass(frozen=True, slots=True)
class VolumeAugmentation:
    """Pose and size, bias field, gamma and noise, by MONAI; left–right flips only if asked for, since brains differ.

    Args:
        rotate_degrees: about each axis, up to this.
        scale: of each axis, up to this share.
        shift_mm: along each axis, up to this.
        bias_field: largest coefficient of the polynomial of degree 3 whose exponential multiplies the brain.
        gamma: contrast exponents from 1 / (1 + gamma) to 1 + gamma.
        noise: largest deviation of Gaussian noise, in deviations of the brain's intensity.
        flip: mirror left and right for every second scan.
        probability: of each change.
    """

    rotate_degrees: float = 10.0
    scale: float = 0.05
    shift_mm: float = 6.0
    bias_field: float = 0.3
    gamma: float = 0.25
    noise: float = 0.1
    flip: bool = False
    probability: float = 0.8

    def __post_init__(self) -> None:
        amounts = (self.rotate_degrees, self.scale, self.shift_mm, self.bias_field, self.gamma, self.noise)
        if min(amounts) < 0 or self.scale >= 1:
            raise UserError(f"{self}: need amounts of 0 or more, and a scale below 1")
        if not 0 <= self.probability <= 1:
            raise UserError(f"probability={self.probability}: need 0 to 1")


@dataclass(frozen=True, slots=True)
class Phantoms:
    """The synthetic cohort a model may start from, and how long it learns from it."""

    subjects: int = 240
    epochs: int = 20
    base_lr: float = 1e-3
    variants: int = 4
    ages: tuple[float, float] = (20.0, 90.0)
    ageing: Literal["everywhere", "frontal"] = "everywhere"
    seed: int = 0


@dataclass(frozen=True, slots=True)
class BrainRecipe:
    """Everything but the data.

    Args:
        method: ermoe, prototype score (Alg. 2); ermoe-context, the context score of Eq. 5; vit3d, swin3d and sfcn are
            baselines; ridge is the linear estimate alone, without a network.
        learns: residual, what a ridge on measures of the scan leaves unexplained; age, the age itself, as in the paper.
        size: options of the transformer: embed_dim, depth, num_heads, mlp_ratio, patch_size, global_pool, ….
        sparsity: options of `ermoe.upcycle` for the methods with experts.
        training: the numbers of the loop.
        rivals: options of SFCN and Swin3D, by method.
        preprocessing: of scans.
        augmentation: of volumes, None for none.
        harmonise: "site", or the name of a column such as batch: what it adds to measures is taken off, fitted in each
            fold; nothing is applied to a site that was not in training.
        own_ridges: "auto", a ridge for each site, scanner or batch of the table beside the ridge over all, believed as
            far as its training people say; "none"; or the column that sorts scans.
        head: bins, soft labels; bins-cut, the same without renormalising them at the ends, as SFCN's authors;
            bins-l1, cross-entropy plus absolute error; regression, absolute error.
        ages: range of the bins in years, the same for every cohort, so that one model can start from another; None
            reaches five years beyond the ages at hand.
        step: width of a bin in years.
        sigma: width of soft labels in years.
        l1: weight of the absolute error in years beside the loss of the bins.
        input: what a network sees: normalised T1, tissue shares of voxels, or of blocks of voxels and the whole brain.
            Convolutions and Swin see contrast where transformers see blocks.
        volumes_per_epoch: an epoch of a small cohort goes round until it has seen so many.
        variants: inputs of each scan that are made once and kept; 0 makes them anew every time.
        drop_cubes: share of the network's input that is hidden, drawn anew at every step.
        input_noise: deviation of noise that is added to the network's input, drawn anew at every step.
        warm_start_epochs: epochs over isolated tissues with forced routing; 0 for none.
        rate_after_warm_start: of the learning rate, for the whole scans that follow; 0.1 keeps region experts to their
            tissues.
        head_lr: factor on the learning rate of the last layer, and of the weights that places have before it.
        probe_epochs: after these epochs, and the last, isolated tissues show which experts they choose.
        phantoms: what ``init="phantom"`` learns from.
    """

    method: Annotated[Method, tyro.conf.Suppress]
    size: Annotated[Mapping[str, Any], tyro.conf.Suppress]
    sparsity: Annotated[Mapping[str, Any], tyro.conf.Suppress]
    training: Training
    rivals: Annotated[Mapping[str, Mapping[str, Any]], tyro.conf.Suppress] = field(default_factory=dict)
    preprocessing: Preprocessing = field(default_factory=Preprocessing)
    augmentation: Annotated[VolumeAugmentation | None, tyro.conf.Suppress, tyro.conf.Fixed] = field(
        default_factory=VolumeAugmentation
    )
    learns: Literal["residual", "age"] = "residual"
    harmonise: str | None = None
    own_ridges: str = "auto"
    head: HeadKind = "bins"
    ages: Annotated[tuple[float, float] | None, tyro.conf.Suppress] = (0.0, 100.0)
    step: float = 1.0
    sigma: float = 1.0
    l1: float = 0.0
    input: InputKind = "t1"
    volumes_per_epoch: int = 0
    variants: int = 0
    drop_cubes: float = 0.0
    input_noise: float = 0.0
    warm_start_epochs: int = 0
    rate_after_warm_start: float = 1.0
    head_lr: float = 1.0
    probe_epochs: tuple[int, ...] = (1, 5)
    phantoms: Annotated[Phantoms, tyro.conf.Suppress, tyro.conf.Fixed] = field(default_factory=Phantoms)

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise UserError(f"there is no method {self.method!r}: use one of {', '.join(METHODS)}")
        if self.learns not in ("residual", "age"):
            raise UserError(f"learns={self.learns!r}: use residual, or age for a network without the ridge")
        if self.harmonise is not None and not self.has_ridge:
            raise UserError(
                f"--harmonise {self.harmonise} is about the ridge's measures: leave it out, or --learns residual"
            )
        if self.head not in get_args(HeadKind):
            raise UserError(f"there is no head {self.head!r}: use one of {', '.join(get_args(HeadKind))}")
        if self.head_lr <= 0:
            raise UserError(f"head_lr={self.head_lr}: need a factor above 0")
        if self.input not in CHANNELS:
            raise UserError(f"input={self.input!r}: use one of {', '.join(CHANNELS)}")
        if self.method in WITHOUT_CUBES and self.input == "blocks":
            raise UserError(f"{self.method} needs every voxel: use input 'contrast' or 't1'")
        if self.patch_size < 1 or self.patch_size % reduction(self.input):
            block = reduction(self.input)
            raise UserError(
                f"patch_size={self.patch_size}: blocks of {block} voxels must fill a cube, as in {2 * block}"
            )

    @property
    def has_network(self) -> bool:
        """Whether anything learns by steps."""
        return self.method != "ridge"

    @property
    def has_ridge(self) -> bool:
        """Whether a linear estimate is part of the answer."""
        return self.method == "ridge" or self.learns == "residual"

    @property
    def has_experts(self) -> bool:
        """Whether the method routes."""
        return self.method.startswith("ermoe")

    def after_warm_start(self) -> BrainRecipe:
        """For whole scans once region experts have been taught: gently, if what they were taught is to stay."""
        training = replace(self.training, base_lr=self.rate_after_warm_start * self.training.base_lr)
        return replace(self, training=training)

    def for_regions(self) -> BrainRecipe:
        """For the warm start: isolated tissues, each once an epoch and as they are, for all layers alike."""
        epochs = self.warm_start_epochs
        training = replace(self.training, epochs=epochs, warmup_epochs=0.2 * epochs, layer_decay=1.0)
        return replace(self, training=training, volumes_per_epoch=0, drop_cubes=0.0, input_noise=0.0)

    def task(self, data: Lesson, compute: Compute) -> Estimation:
        """A lesson: isolated tissues for the region experts, or whole scans."""
        from ermoe.brain.regions import ProbedEstimation, RegionWarmStart

        kind = RegionWarmStart if data.train.regions else ProbedEstimation
        return kind(data, self, compute)

    @property
    def patch_size(self) -> int:
        """Edge of a cube in voxels, also of what the occlusion map hides of networks without cubes."""
        return int(self.size["patch_size"])


_EIGHT_EXPERTS: dict[str, Any] = {**FROM_SCRATCH, "num_experts": 8, "top_k": 2, "blocks": "every-2"}


def small(method: Method) -> BrainRecipe:
    """For two cores and a few dozen people: 252 cubes of 32 mm, width 64, depth 4, experts in blocks 1 and 3.

    Run: ``ermoe brain train small-ermoe BIDS``. Few and small steps, from the usual age: with so few people, a network
    that goes further learns them by heart. The head reads the mean of the cubes, which learns within far fewer steps
    than a class token. What other settings gave: docs/maintainers.md.
    """
    return BrainRecipe(
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
            evaluate_every=4, **STEADY_BASES,
        ),
        head="bins",
        sigma=4.0,
        l1=1.0,
        input="contrast" if method in WITHOUT_CUBES else "blocks",
        volumes_per_epoch=64,
        augmentation=None,
        variants=1,
        drop_cubes=0.2,
        input_noise=0.1,
        warm_start_epochs=3,
        phantoms=Phantoms(base_lr=1e-2),
    )  # fmt: skip


def medium(method: Method) -> BrainRecipe:
    """For two cores and some hundred people: as small, but every place has weights of its own before the last layer.

    Run: ``ermoe brain train medium-ermoe BIDS``. What shows in one region alone is lost in a mean over all cubes. The
    last layer and these weights learn ten times as fast as the rest, and the first layers slowest: where they move,
    the tokens of all tissues do, and region experts lose theirs.
    """
    few = small(method)
    return replace(
        few,
        size={**few.size, "global_pool": "places"},
        training=replace(few.training, epochs=16, warmup_epochs=2.0, layer_decay=0.5),
        volumes_per_epoch=0,
        warm_start_epochs=5,
        rate_after_warm_start=0.3,
        head_lr=10.0,
    )


def paper(method: Method) -> BrainRecipe:
    """The paper's recipe: 16³ cubes, 8 experts of which 3 have a tissue, T = 0.5, no offsets, class token, 300 epochs.

    Run: ``ermoe brain train paper-ermoe BIDS`` with a GPU. The paper does not print the transformer's size; this is
    ViT-B's, with the ranks of the image model. Batch 100, 1e-4 × batch / 256, 5 epochs of warm-up, λ = 5e-5.
    """
    return BrainRecipe(
        method,
        size={"patch_size": 16, "embed_dim": 768, "depth": 12, "num_heads": 12},
        sparsity={"num_experts": 8, "top_k": 2, "blocks": "every-2", "rank": 504, "route_rank": 56, "balance": "none"},
        rivals={"swin3d": {"embed_dim": 48, "window_size": 7, "depths": (2, 2, 6, 2)}},
        training=Training(),
        learns="age",
        warm_start_epochs=5,
        phantoms=Phantoms(subjects=1000, epochs=50, base_lr=1e-4),
    )


def tiny(method: Method) -> BrainRecipe:
    """For tests and the demonstration: 32 × 40 × 32 voxels of 6 mm, 64 cubes of 8³, width 32; a run takes seconds."""
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
        augmentation=VolumeAugmentation(),
        variants=2,
        warm_start_epochs=1,
        phantoms=Phantoms(subjects=8, epochs=1, base_lr=0.1),
    )  # fmt: skip


FAMILIES: dict[str, Callable[[Method], BrainRecipe]] = {"small": small, "medium": medium, "paper": paper, "tiny": tiny}
PRESETS: dict[str, Callable[[], BrainRecipe]] = {
    f"{family}-{method}": partial(make, method) for family, make in FAMILIES.items() for method in METHODS
}
ABOUT_METHODS: dict[str, str] = {
    "ermoe": "experts choose by prototypes (Alg. 2)",
    "ermoe-context": "experts choose by the context score of Eq. 5",
    "vit3d": "the same transformer without experts",
    "swin3d": "Swin transformer",
    "sfcn": "SFCN, a convolutional network",
    "ridge": "the linear estimate alone, without a network",
}


def recipe(preset: str, method: str | None = None, **changes: Any) -> BrainRecipe:
    """The recipe of a preset, FAMILY-METHOD; ``changes`` are fields of `BrainRecipe` or of its `Training`.

    A family alone is its "ermoe", or what ``method`` says.

    >>> recipe("small-vit3d", epochs=3, head="regression").training.epochs
    3
    >>> recipe("small", "vit3d") == recipe("small-vit3d")
    True
    """
    if method is not None and method not in METHODS:
        raise UserError(f"there is no method {method!r}: use one of {', '.join(METHODS)}")
    name = f"{preset}-{method or 'ermoe'}" if preset in FAMILIES else preset
    if name not in PRESETS:
        raise unknown_name("preset", preset, PRESETS, listed_by="ermoe brain presets")
    return changed(PRESETS[name](), changes)
