"""Settings alone, which ``config.json`` holds and a command line offers: of training, of augmentation, and of the
machine.

Nothing here imports torch, so that help appears at once.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from ermoe.errors import UserError, unknown_name

if TYPE_CHECKING:
    from rich.console import Console

    from ermoe.models.upcycle import Options
    from ermoe.train.callbacks import Callback
    from ermoe.train.compute import Compute

Changes = dict[str, Any]
"""Values by the name of a field: of a recipe, or of its training."""
Chosen = TypeVar("Chosen")
_PRECISIONS = ("fp32", "bf16", "fp16", "fp64")
_NOT_NEGATIVE = (
    "base_lr", "basis_lr", "weight_decay", "warmup_epochs", "clip", "orthogonality", "retract_every", "save_every",
    "keep_every",
)  # fmt: skip

STEADY_BASES: Changes = {"basis_lr": 0.5, "retract_every": 10}
"""For a model that has yet to find its experts: bases that turn slowly and stay orthonormal keep a token with its
experts from one step to the next."""

FROM_SCRATCH: Options = {"context_of": "attention", "context_grad": False, "weight_floor": 1.0}
"""Options of the eigen router for weights that have learned nothing yet: a token is compared with what attention gave
it, attention is not bent to the routing, and no chosen expert is left without a share of the mixture."""


def from_scratch(sparsity: Options | None) -> Options | None:
    """Options of `ermoe.upcycle`, with those of `FROM_SCRATCH` for the eigen router; rivals' are left as they are.

    >>> from_scratch({"balance": "offset"})
    {'context_of': 'attention', 'context_grad': False, 'weight_floor': 1.0, 'balance': 'offset'}
    """
    if sparsity is None or sparsity.get("router", "eigen") != "eigen":
        return sparsity
    return {**FROM_SCRATCH, **sparsity}


@dataclass(frozen=True, slots=True)
class Training:
    """The recipe; defaults are the paper's where it gives one.

    Args:
        epochs: passes over the training set.
        batch_size: samples of one optimiser step, over all processes and accumulation steps.
        base_lr: learning rate for 256 samples; it grows in proportion to the batch.
        weight_decay: never on bases, s, ψ, norms and biases.
        basis_lr: factor on the learning rate of bases. Adam moves every entry of a basis by about the learning rate,
            whatever the gradient; at full speed tokens lose their experts from one step to the next.
        warmup_epochs: of linear growth from zero; then half a cosine back to zero.
        layer_decay: factor on the learning rate from each block to the one before; 1 for none.
        clip: largest norm of the gradient; 0 for no limit.
        accumulate: parts into which a process cuts its share of a batch, to save memory.
        precision: "fp32", "bf16" or "fp16" (autocast), or "fp64".
        ema: decay of the averaged weights that are evaluated and saved; 0 for none.
        orthogonality: λ of the orthogonality loss.
        orthogonality_every: steps between two such losses, n; each then weighs nλ.
        retract: bring bases back to orthonormal after every epoch.
        retract_every: steps between two retractions within an epoch; 0 for none but the one at its end.
        evaluate_every: epochs between evaluations; there is always one after the last.
        deterministic: only algorithms that repeat their results, also on GPUs.
        seed: of everything random.
        log_every: steps between two lines of ``metrics.jsonl``.
        save_every: steps between two checkpoints within an epoch; 0 saves at the end of epochs only.
        keep_every: epochs between two models that are kept for good; 0 keeps the best and the last.
    """

    epochs: int = 300
    batch_size: int = 100
    base_lr: float = 1e-4
    weight_decay: float = 0.05
    basis_lr: float = 1.0
    warmup_epochs: float = 5.0
    layer_decay: float = 1.0
    clip: float = 1.0
    accumulate: int = 1
    precision: Literal["fp32", "bf16", "fp16", "fp64"] = "fp32"
    ema: float = 0.9999
    orthogonality: float = 5e-5
    orthogonality_every: int = 1
    retract: bool = True
    retract_every: int = 0
    evaluate_every: int = 1
    deterministic: bool = False
    seed: int = 0
    log_every: int = 50
    save_every: int = 0
    keep_every: int = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "accumulate", "orthogonality_every", "log_every", "evaluate_every"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)}: need at least 1")
        for name in _NOT_NEGATIVE:
            if getattr(self, name) < 0:
                raise UserError(f"{name}={getattr(self, name)}: need 0 or more")
        if not 0 <= self.ema < 1:
            raise UserError(f"ema={self.ema}: need 0 (no average) up to, but not including, 1")
        if not 0 < self.layer_decay <= 1:
            raise UserError(f"layer_decay={self.layer_decay}: need more than 0, at most 1 (no decay)")
        if self.precision not in _PRECISIONS:
            raise UserError(f"precision={self.precision!r}: use one of {', '.join(_PRECISIONS)}")

    @property
    def lr(self) -> float:
        """The highest learning rate, after warm-up.

        >>> Training(batch_size=512).lr
        0.0002
        """
        return self.base_lr * self.batch_size / 256


def changed(recipe: Chosen, changes: Changes) -> Chosen:
    """A recipe with some of its fields, or of its training's, set anew."""
    own: Any = recipe
    known = [field.name for part in (own, own.training) for field in fields(part)]
    if unknown := [name for name in changes if name not in known]:
        raise unknown_name("option", unknown[0], known)
    of_training = {name: value for name, value in changes.items() if name in Training.__slots__}
    of_recipe = {name: value for name, value in changes.items() if name not in of_training}
    training = replace(of_recipe.pop("training", own.training), **of_training)
    return replace(own, training=training, **of_recipe)  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class Augmentation:
    """How training images are varied.

    Args:
        crop: "pad" shifts by up to an eighth of the side; "resized" takes a random share of the area, as for ImageNet;
            "none".
        least_area: the smallest such share.
        flip: mirror every second image, left to right.
        rand_ops: operations of RandAugment on each image; 0 for none.
        rand_magnitude: their strength, 0 to 30.
        erase: chance that a random rectangle is replaced by noise.
        mixup: α of the Beta distribution by which two images are blended; 0 for none.
        cutmix: the same for a rectangle of the other image; with both, each pair draws one of the two.
    """

    crop: Literal["pad", "resized", "none"] = "pad"
    least_area: float = 0.08
    flip: bool = True
    rand_ops: int = 0
    rand_magnitude: int = 9
    erase: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0

    def __post_init__(self) -> None:
        if self.crop not in ("pad", "resized", "none"):
            raise UserError(f"crop={self.crop!r}: use 'pad', 'resized' or 'none'")
        if not 0 < self.least_area <= 1:
            raise UserError(f"least_area={self.least_area}: need a share of the area above 0, at most 1")
        if not 0 <= self.rand_magnitude <= 30 or self.rand_ops < 0:
            raise UserError(
                f"rand_ops={self.rand_ops}, rand_magnitude={self.rand_magnitude}: need 0 or more operations of "
                "magnitude 0 to 30"
            )
        if not 0 <= self.erase <= 1 or self.mixup < 0 or self.cutmix < 0:
            raise UserError(
                f"erase={self.erase}, mixup={self.mixup}, cutmix={self.cutmix}: need a chance from 0 to 1, and α ≥ 0"
            )

    @property
    def mixes(self) -> bool:
        """Whether images are mixed in pairs, for which a batch must be even."""
        return self.mixup > 0 or self.cutmix > 0


NO_AUGMENTATION = Augmentation(crop="none", flip=False)


def in_words(presets: Mapping[str, Callable[..., Any]], methods: Mapping[str, str], train: str) -> str:
    """A list of presets: by the function that makes them, what it says of itself; and what the methods are."""
    families: dict[Callable[..., Any], list[str]] = {}
    for name, made in presets.items():
        families.setdefault(_maker(made), []).append(name)
    parts = []
    for maker, names in families.items():
        about = textwrap.indent(inspect.cleandoc(maker.__doc__ or "").replace("``", ""), "    ")
        parts.append(textwrap.fill(", ".join(names), 110, break_on_hyphens=False) + f"\n{about}\n")
    width = max(map(len, methods))
    said = "\n".join(f"    {name:{width}}  {about}" for name, about in methods.items())
    return "\n".join([*parts, f"What a name ends in, the method:\n{said}\n"]) + (
        f"\n{train} PRESET DATA trains one; with --print-config it shows every value instead."
    )


def _maker(made: Any) -> Callable[..., Any]:
    """The function below any number of partials."""
    while isinstance(made, partial):
        made = made.func
    return made  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class Machine:
    """Where a command computes.

    Args:
        device: auto is the accelerator if there is one.
        threads: CPU threads of each process; 0 leaves that to torch.
        workers: processes that read files ahead; what fits into memory needs none.
    """

    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    threads: int = 0
    workers: int = 2

    @contextmanager
    def started(self, console: Console | None = None) -> Iterator[Compute]:
        """The means to compute with, while the block lasts."""
        import torch

        from ermoe.train.compute import Compute, processes

        if self.threads:
            torch.set_num_threads(self.threads)
        own = {name: getattr(self, name) for name in Compute.__slots__ if hasattr(self, name)}
        with processes(self.device) as group:
            yield Compute(group=group, console=console, **own)


@dataclass(frozen=True, slots=True)
class TrainingMachine(Machine):
    """Where a run computes. Several processes: torchrun --nproc-per-node=N -m ermoe …, or srun.

    Args:
        parallel: of several processes: copies of the model (ddp), shards of it (fsdp), a part of the experts each with
            copies (ep) or shards (fsdp+ep) of the rest.
        expert_processes: processes that share the experts of a layer (ep, fsdp+ep); 0 for as many as can.
        background_saves: with all but ddp, go on training while a checkpoint is written; costs a copy of each shard.
        compile: run training steps through torch.compile.
        resume: auto goes on if there is a run in the folder, must insists on one, never refuses one.
        trackers: who is told the figures beside metrics.jsonl: an events file of TensorBoard, Weights & Biases.
    """

    parallel: Literal["ddp", "fsdp", "ep", "fsdp+ep"] = "ddp"
    expert_processes: int = 0
    background_saves: bool = False
    compile: bool = False
    resume: Literal["auto", "must", "never"] = "auto"
    trackers: tuple[Literal["tensorboard", "wandb"], ...] = ("tensorboard",)

    @property
    def callbacks(self) -> list[Callback]:
        """The trackers themselves."""
        from ermoe.train.callbacks import TRACKERS

        return [TRACKERS[name]() for name in self.trackers]
