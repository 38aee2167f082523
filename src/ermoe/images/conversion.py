"""``ermoe upcycle`` and ``ermoe slim``: dense image classifiers made sparse, from the command line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from ermoe.console import say
from ermoe.errors import UserError
from ermoe.train.settings import Augmentation, Machine

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor, nn

    from ermoe.train.compute import Compute

_Word = tyro.conf.Positional
_HELD_OUT = 0.1


@dataclass(frozen=True, slots=True)
class Upcycle:
    """Make a dense ViT sparse: exactly, or with experts fitted to groups of tokens from unlabelled images."""

    model: Annotated[str, _Word, tyro.conf.arg(metavar="MODEL")]
    """A name that timm knows, with --weights; a run folder, a model folder, or a repository of the Hugging Face hub."""
    data: str | None = None
    """Images for --init clusters or a lower rank: a folder, or a name, as for ermoe image. Labels are ignored."""
    out: Path = Path("sparse")
    """The folder for the sparse model."""
    weights: Path | None = None
    """Weights for a model that is named: a safetensors file, or a checkpoint."""
    init: Literal["dense", "clusters"] = "dense"
    """dense: every expert starts as the dense network; clusters: each as the best one for a group of tokens."""
    num_experts: int = 8
    """Experts of each layer."""
    top_k: int = 2
    """Experts a token."""
    blocks: str = "every-2"
    """Which blocks get experts: every-n, last-n or all."""
    rank: int | None = None
    """Rank of expert weights; full by default, and a quarter of the model's width beside a shared network."""
    hidden_dim: int | None = None
    """Hidden width of experts; that of the dense network by default, and half the model's width beside a shared one."""
    shared: Literal["dense"] | None = None
    """dense: the dense network stays, and experts of small width and rank add to it."""
    images: int = 1000
    """Images of DATA that are looked at."""
    seed: int = 0
    """Of the groups, and of the images that are drawn."""
    machine: Machine = field(default_factory=Machine)

    def __call__(self, console: Console) -> None:
        import torch

        from ermoe.models.io import save
        from ermoe.models.upcycle import upcycle

        if self.data is None and (self.init == "clusters" or (self.hidden_dim is not None and self.shared is None)):
            raise UserError("experts are fitted to images: name a folder of images with --data")
        with self.machine.started(console) as compute:
            dense = dense_model(self.model, self.weights, compute)
            batches = None if self.data is None else _plain(dense, self.data, self.images, self.seed, compute)
            names = ("init", "num_experts", "top_k", "blocks", "rank", "hidden_dim", "shared")
            options: dict[str, Any] = {name: getattr(self, name) for name in names}
            options["generator"] = torch.Generator().manual_seed(self.seed)
            sparse: Any = upcycle(dense, calibration=batches, **options)
        for name, fit in sparse.group_fits.items():
            errors = f"relative error {fit.error:.3f}, of one such expert for all tokens {fit.one_expert_error:.3f}"
            say(console, f"{name}: {errors}, load CV² {fit.load_cv2:.3f}")
        save(sparse, self.out)
        say(console, f"written: {self.out}")


@dataclass(frozen=True, slots=True)
class Slim:
    """Make a dense ViT sparse and faster: narrow experts, one a token, within a budget of the dense operations.

    They are fitted to groups of tokens, then learn the dense model's answers; no labels are used. A tenth of the images
    is held out to compare the two models on.
    """

    model: Annotated[str, _Word, tyro.conf.arg(metavar="MODEL")]
    """A name that timm knows, with --weights; a run folder, a model folder, or a repository of the Hugging Face hub."""
    data: Annotated[str, _Word, tyro.conf.arg(metavar="DATA")]
    """Images in a layout of docs/how-to/own-images.md; of their training split. Labels are ignored."""
    out: Path = Path("slim")
    """The folder for the slim model, its report and, in OUT/learning, checkpoints to go on from."""
    budget: float = 0.8
    """Operations over those of the dense model."""
    weights: Path | None = None
    """Weights for a model that is named: a safetensors file, or a checkpoint."""
    num_experts: int = 8
    """Experts of each layer; they cost memory, not operations."""
    routed: float = 1.0
    """Share of the dense hidden width that each expert has to itself; all tokens share what else is kept. 0.125 makes a
    model that is smaller and faster, and farther from the dense one."""
    cut: Literal["width", "rank"] = "width"
    """What networks are made smaller by: fewer hidden units, or all of them at a lower rank, which errs more."""
    routing_cost: float = 0.1
    """What routing has to save beyond its operations, over those of the dense network, for a block to get experts and
    not one network for all tokens. 0 counts operations alone."""
    layer_epochs: int = 0
    """Passes over the images in which every layer learns its dense network's outputs."""
    epochs: int = 5
    """Passes in which the whole model learns the dense model's answers, and what its blocks say on the way."""
    layer_lr: float = 1e-4
    """Highest learning rate of the former."""
    lr: float = 1.5e-5
    """Highest learning rate of the latter. Few images want a low one: they are soon known by heart."""
    state_weight: float = 3.0
    """Weight of what the blocks say, beside the answers."""
    batch_size: int = 32
    """Images of a step."""
    augmentation: Augmentation = field(default_factory=lambda: Augmentation(crop="resized", least_area=0.35))
    images: int = 1000
    """Images to which experts are fitted, at most; all of them are learned from."""
    seed: int = 0
    """Of the groups, the order of images and their augmentation."""
    machine: Machine = field(default_factory=Machine)

    def __call__(self, console: Console) -> None:
        from ermoe.data.order import Order
        from ermoe.files import write_json
        from ermoe.images.run import LabelledImages, open_images, transform_for
        from ermoe.models.io import save
        from ermoe.models.slim import slim
        from ermoe.train.loader import Loader

        with self.machine.started(console) as compute:
            dense = dense_model(self.model, self.weights, compute)
            images = open_images(self.data, "train")
            say(console, images.summary)
            learned, held_out = LabelledImages(self.data, images, images).without_validation(_HELD_OUT)
            varied = transform_for(dense, self.augmentation, self.seed).of(learned)
            plain = transform_for(dense)
            slimmed = slim(
                dense,
                Loader(varied, Order(len(learned), min(self.batch_size, len(learned)), self.seed), compute=compute),
                budget=self.budget,
                num_experts=self.num_experts,
                routed=self.routed,
                routing_cost=self.routing_cost,
                cut=self.cut,
                calibration=PlainBatches(plain.of(learned), self.images, self.seed, compute),
                held_out=None if held_out is None else PlainBatches(plain.of(held_out), len(held_out), 0, compute),
                folder=self.out / "learning",
                compute=compute,
                seed=self.seed,
                layer_epochs=self.layer_epochs,
                epochs=self.epochs,
                layer_lr=self.layer_lr,
                lr=self.lr,
                state_weight=self.state_weight,
            )
        save(slimmed.model, self.out)
        write_json(self.out / "slimming.json", slimmed.as_json())
        say(console, slimmed.table())
        say(console, f"written: {self.out}")


class PlainBatches:
    """At most so many images of a source, drawn by a hash, batch by batch and as often as one likes."""

    def __init__(self, source: Any, num_images: int, seed: int, compute: Compute) -> None:
        self._given = {"num_items": min(num_images, len(source)), "batch_size": 50, "seed": seed}
        self._source, self._device = source, compute.device

    def __iter__(self) -> Iterator[Tensor]:
        from ermoe.train.loader import some_batches

        return (batch.image for batch in some_batches(self._source, self._device, **self._given))


def _plain(model: nn.Module, data: str, num_images: int, seed: int, compute: Compute) -> PlainBatches:
    from ermoe.images.run import open_images, transform_for

    images = open_images(data, "train")
    compute.say(images.summary)
    return PlainBatches(transform_for(model).of(images), num_images, seed, compute)


def dense_model(name: str, weights: Path | None, compute: Compute) -> nn.Module:
    """A model that timm knows by this name, with the weights of a file; or one that was saved, here or on the hub."""
    import timm

    from ermoe.models.io import load
    from ermoe.models.weights.foreign import load_weights
    from ermoe.train.run_folder import model_folder

    if weights is None:
        if timm.is_model(name) and not Path(name).exists():
            raise UserError(f"{name} is a name without weights: give --weights FILE, or name a saved model")
        return load(model_folder(name), device=compute.device).eval()
    if not timm.is_model(name):
        raise UserError(
            f"--weights {weights}: {name} is no model that timm knows; leave --weights out for saved models"
        )
    model: nn.Module = timm.create_model(name)
    load_weights(model, weights)
    return model.to(compute.device).eval()
