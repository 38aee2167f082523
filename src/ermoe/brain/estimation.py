"""The task: a network is trained to tell the age of the person from a volume."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ermoe.brain.ages import AgeHead
from ermoe.brain.batches import ScanSet, VolumeBatch, every_scan
from ermoe.brain.metrics import figures
from ermoe.brain.recipes import BrainRecipe, reduction
from ermoe.data.order import Order
from ermoe.files import Json
from ermoe.train.compute import Compute
from ermoe.train.loader import Loader
from ermoe.train.loop import Task, TrainingData

_WATCHED = ("mae", "rmse", "r", "slope")


@dataclass(frozen=True, slots=True)
class Lesson(TrainingData):
    """One stage of a network's learning.

    Args:
        network: what learns: outputs (B, K) of volumes and masks, as many as ``head`` reads.
        head: how outputs mean ages.
        train: what is learnt from: whole scans, or isolated tissues.
        validation: by which the best epoch is chosen; without it the last one is taken.
        watched: held-out scans whose error is written down for the learning curve and decides nothing.
        probe: held-out people with one tissue retained, to see which experts it chooses.
    """

    network: nn.Module
    head: AgeHead
    train: ScanSet
    validation: ScanSet | None = None
    watched: ScanSet | None = None
    probe: ScanSet | None = None

    def identity(self) -> Json:
        """Which stage it is; whose scans they are, the run that it belongs to has written down."""
        return {"stage": "region warm start" if self.train.regions else "whole scans"}


class Estimation(Task):
    """Trains the network of a lesson to tell ages.

    Offsets stay those of training, whose augmentation leaves scans much as they are.
    """

    goal = "minus_validation_mae"

    def __init__(self, lesson: Lesson, recipe: BrainRecipe, compute: Compute) -> None:
        self.model, self.head, self.recipe = lesson.network, lesson.head, recipe
        self.patch_size = recipe.patch_size // reduction(recipe.input)
        self.lr_scales = {"head.": recipe.head_lr, "place_weight": recipe.head_lr}
        self._epoch = 0
        training, num_volumes = recipe.training, len(lesson.train)
        passes = max(1, math.ceil(recipe.volumes_per_epoch / num_volumes))
        self.loader = Loader(
            lesson.train,
            Order(passes * num_volumes, training.batch_size, training.seed),
            num_parts=training.accumulate,
            compute=compute,
        )
        held_out = {"validation": lesson.validation, "test": lesson.watched}
        self.held_out = {
            name: every_scan(volumes, compute) for name, volumes in held_out.items() if volumes is not None
        }

    @property
    def steps_per_epoch(self) -> int:
        return self.loader.steps_per_epoch

    def batches(self, epoch: int, first_step: int) -> Iterator[list[VolumeBatch]]:
        self._epoch = epoch
        return self.loader.epoch(epoch, first_step=first_step)

    def loss(self, network: nn.Module, batch: VolumeBatch) -> Tensor:
        """The head's loss; noise and hidden cubes are drawn from torch's generator, which the loop seeds every step."""
        volume, mask = batch.input_BCXYZ, batch.mask_BXYZ
        if self.recipe.input_noise:
            volume = volume + self.recipe.input_noise * torch.randn_like(volume) * mask.unsqueeze(1)
        if self.recipe.drop_cubes:
            shown = ~hidden_cubes(mask, self.patch_size, self.recipe.drop_cubes)
            volume, mask = volume * shown.unsqueeze(1), mask & shown
        return self.head.loss(network(as_model(self.model, volume), mask).float(), batch.age_B)

    def evaluate(self) -> dict[str, float]:
        """Errors on the validation and the watched scans; every process goes over all of them."""
        errors: dict[str, float] = {}
        for name, loader in self.held_out.items():
            output_NK, age_N = outputs_of(self.model, loader)
            own = figures(age_N, self.head.age(output_NK))
            errors |= {f"{name}_{figure}": own[figure] for figure in _WATCHED if not math.isnan(own[figure])}
        if "validation_mae" in errors:
            errors[self.goal] = -errors["validation_mae"]
        return errors


def hidden_cubes(mask_BXYZ: Tensor, patch_size: int, share: float) -> Tensor:
    """A random choice of cubes, (B, X, Y, Z), True for their voxels."""
    grid = [math.ceil(edge / patch_size) for edge in mask_BXYZ.shape[1:]]
    return in_voxels(torch.rand(len(mask_BXYZ), *grid, device=mask_BXYZ.device) < share, patch_size, mask_BXYZ)


def in_voxels(cube_Bxyz: Tensor, patch_size: int, like_BXYZ: Tensor) -> Tensor:
    """What is known of cubes, at each of their voxels, of which the last cubes may lack some, (B, X, Y, Z)."""
    for axis in (1, 2, 3):
        cube_Bxyz = cube_Bxyz.repeat_interleave(patch_size, axis)
    x, y, z = like_BXYZ.shape[1:]
    return cube_Bxyz[:, :x, :y, :z]


@torch.no_grad()
def outputs_of(model: nn.Module, loader: Loader[VolumeBatch]) -> tuple[Tensor, Tensor]:
    """Outputs (N, K) of all volumes of a loader and their ages (N,), on the CPU."""
    model.eval()
    outputs, ages = [], []
    for batch in loader:
        outputs.append(model(as_model(model, batch.input_BCXYZ), batch.mask_BXYZ).float().cpu())
        ages.append(batch.age_B.cpu())
    return torch.cat(outputs), torch.cat(ages)


def as_model(model: nn.Module, volume: Tensor) -> Tensor:
    """A volume in the precision of the model's weights."""
    return volume.to(next(model.parameters()).dtype)
