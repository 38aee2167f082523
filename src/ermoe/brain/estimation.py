"""The task: a network is trained to tell the age of the person from a volume."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ermoe.brain.age_head import AgeHead
from ermoe.brain.batches import ScanSet, VolumeBatch, VolumeLoader
from ermoe.brain.data.augment import VolumeAugmentation
from ermoe.brain.metrics import figures
from ermoe.data.order import Order
from ermoe.train.compute import Processes
from ermoe.train.settings import Training

WATCHED = ("mae", "rmse", "r", "slope")


class Estimation:
    """Trains ``model`` to tell ages; see `ermoe.train.task.Task`.

    Args:
        model: outputs (B, K) of volumes and masks, as many as ``head`` reads.
        head: how outputs mean ages.
        train: what is learnt from.
        validation: by which the best epoch is chosen; without it the last one is taken.
        watched: held-out scans whose error is written down for the learning curve and decides nothing.
        volumes_per_epoch: an epoch goes over a small training set as often as it takes to see so many.
        drop_cubes: share of the cubes, of edge ``patch_size`` in the network's input, that are hidden in training.
        input_noise: deviation of normal noise that is added to the network's input in training.
        evaluate_every: epochs between evaluations; there is always one after the last.
    """

    goal = "minus_validation_mae"

    def __init__(
        self,
        model: nn.Module,
        head: AgeHead,
        train: ScanSet,
        settings: Training,
        *,
        validation: ScanSet | None = None,
        watched: ScanSet | None = None,
        augmentation: VolumeAugmentation | None = None,
        volumes_per_epoch: int = 0,
        drop_cubes: float = 0.0,
        patch_size: int = 1,
        input_noise: float = 0.0,
        evaluate_every: int = 1,
        group: Processes | None = None,
        workers: int = 0,
    ) -> None:
        group = Processes() if group is None else group
        self.model, self.head, self.settings = model, head, settings
        self.drop_cubes, self.patch_size, self.input_noise = drop_cubes, patch_size, input_noise
        self.evaluate_every = evaluate_every
        self._epoch = 0
        passes = max(1, math.ceil(volumes_per_epoch / len(train)))
        place: dict[str, Any] = {"workers": workers, "device": group.device}
        self.loader = VolumeLoader(
            train,
            augmentation,
            Order(passes * len(train), settings.batch_size, settings.seed),
            seed=settings.seed,
            num_parts=settings.accumulate,
            rank=group.rank,
            num_processes=group.num,
            **place,
        )
        held_out = {"validation": validation, "test": watched}
        self.held_out = {
            name: VolumeLoader(volumes, **place) for name, volumes in held_out.items() if volumes is not None
        }

    @property
    def steps_per_epoch(self) -> int:
        assert self.loader.order is not None
        return self.loader.order.steps_per_epoch

    def batches(self, epoch: int, first_step: int) -> Iterator[list[VolumeBatch]]:
        self._epoch = epoch
        return self.loader.epoch(epoch, first_step=first_step)

    def loss(self, network: nn.Module, batch: VolumeBatch) -> Tensor:
        """The head's loss; noise and hidden cubes are drawn from torch's generator, which the loop seeds every step."""
        volume, mask = batch.input_BCXYZ, batch.mask_BXYZ
        if self.input_noise:
            volume = volume + self.input_noise * torch.randn_like(volume) * mask.unsqueeze(1)
        if self.drop_cubes:
            shown = ~hidden_cubes(mask, self.patch_size, self.drop_cubes)
            volume, mask = volume * shown.unsqueeze(1), mask & shown
        return self.head.loss(network(as_model(self.model, volume), mask).float(), batch.age_B)

    def evaluate(self) -> dict[str, float]:
        """Errors on the validation and the watched scans; every process goes over all of them."""
        done = self._epoch + 1
        if done % self.evaluate_every and done != self.settings.epochs:
            return {}
        found: dict[str, float] = {}
        for name, loader in self.held_out.items():
            output_NK, age_N = outputs_of(self.model, loader)
            own = figures(age_N, self.head.age(output_NK))
            found |= {f"{name}_{figure}": own[figure] for figure in WATCHED if not math.isnan(own[figure])}
        if "validation_mae" in found:
            found[self.goal] = -found["validation_mae"]
        return found

    def settle(self) -> None:
        """Offsets stay those of training, whose augmentation leaves scans much as they are."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing to remember."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to take back."""


def hidden_cubes(mask_BXYZ: Tensor, patch_size: int, share: float) -> Tensor:
    """A random choice of cubes, (B, X, Y, Z), True for their voxels."""
    grid = [math.ceil(edge / patch_size) for edge in mask_BXYZ.shape[1:]]
    chosen = torch.rand(len(mask_BXYZ), *grid, device=mask_BXYZ.device) < share
    for axis in (1, 2, 3):
        chosen = chosen.repeat_interleave(patch_size, axis)
    x, y, z = mask_BXYZ.shape[1:]
    return chosen[:, :x, :y, :z]


@torch.no_grad()
def outputs_of(model: nn.Module, loader: VolumeLoader) -> tuple[Tensor, Tensor]:
    """Outputs (N, K) of all volumes of a loader and their ages (N,), on the CPU."""
    model.eval()
    outputs, ages = [], []
    for (batch,) in loader.epoch():
        outputs.append(model(as_model(model, batch.input_BCXYZ), batch.mask_BXYZ).float().cpu())
        ages.append(batch.age_B.cpu())
    return torch.cat(outputs), torch.cat(ages)


def as_model(model: nn.Module, volume: Tensor) -> Tensor:
    """A volume in the precision of the model's weights."""
    return volume.to(next(model.parameters()).dtype)
