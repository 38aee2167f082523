"""One way to train anything: a recipe, the data, the folder of the run, and a loop that reads from top to bottom.

A run is a pure function of its configuration: every step begins by seeding torch from (seed, epoch, step, process), the
learning rate follows from the step, and batches from (seed, epoch). So a checkpoint needs no memory of the past, and a
run that was killed anywhere ends exactly as if nothing had happened.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from ermoe import cpu
from ermoe.errors import UserError
from ermoe.files import Json, StrPath, to_json
from ermoe.models.calibrate import settle_offsets
from ermoe.nn import retract
from ermoe.train.checkpoint import State
from ermoe.train.compute import Compute
from ermoe.train.loader import Source, some_batches
from ermoe.train.run_folder import Log, RunFolder
from ermoe.train.settings import Changes, Training
from ermoe.train.trainer import AUTOCAST, Position, Trainer


class Task(Protocol):
    """A model, its data and what is wanted of it. Whatever has these names can be trained.

    Those who inherit from it settle and remember nothing unless they say what.

    ``goal`` names the figure of `evaluate` by which the best epoch is chosen; larger is better. ``judged_after`` are
    epochs, counted from 1, after which `evaluate` is called besides those that the settings ask for. ``lr_scales`` are
    factors on the learning rate of parts of the model, by what the names of their parameters begin with.
    """

    model: nn.Module
    goal: str
    judged_after: tuple[int, ...] = ()
    lr_scales: Mapping[str, float] = MappingProxyType({})

    @property
    def steps_per_epoch(self) -> int:
        """Optimiser steps in an epoch."""

    def batches(self, epoch: int, first_step: int) -> Iterator[list[Any]]:
        """This process's share of every step from ``first_step`` on, in parts to accumulate."""

    def loss(self, network: nn.Module, batch: Any) -> Tensor:
        """The mean loss of a batch; ``network`` is the model, wrapped for training."""

    def settle(self) -> str | None:
        """Fits what is not learned by gradients, such as offsets, to the weights that are about to be judged and kept.

        Says on what, for the record; None if nothing was settled. Training goes on from the offsets it had.
        """
        return None

    def evaluate(self) -> dict[str, float]:
        """Figures of the model as it is, over all processes; called on every one of them."""

    def state_dict(self) -> State:
        """What the task itself must remember: tensors and plain values."""
        return {}

    def load_state_dict(self, state: State) -> None:
        """Takes that back."""
        return None


class TrainingData(Protocol):
    """What is learnt from and judged on."""

    def identity(self) -> Json:
        """What tells these data from others, for config.json."""

    def beside(self) -> Json:
        """Files that belong into the run folder, by name: what those who use the model must know of the data."""
        return {}


DataT = TypeVar("DataT", bound=TrainingData, contravariant=True)


class Recipe(Protocol[DataT]):
    """Everything but the data: a frozen dataclass of plain values, so that config.json can hold it."""

    @property
    def training(self) -> Training:
        """The numbers of the loop."""

    def task(self, data: DataT, compute: Compute) -> Task:
        """The model before training, with its data and what is wanted of it."""


def train(
    recipe: Recipe[DataT],
    data: DataT,
    folder: StrPath,
    *,
    compute: Compute | None = None,
    resume: str = "auto",
) -> dict[str, float]:
    """Trains what a recipe makes of data in a run folder, or goes on with the run there; returns its last evaluation.

    ``resume`` is "auto", "must" or "never"; see `fit`.
    """
    compute = Compute() if compute is None else compute
    config = {**to_json(recipe), **data.identity()}
    task = recipe.task(data, compute)
    return fit(task, recipe.training, folder, config=config, beside=data.beside(), compute=compute, resume=resume)


def fit(
    task: Task,
    settings: Training,
    folder: StrPath,
    *,
    config: Json | None = None,
    beside: Json | None = None,
    compute: Compute | None = None,
    resume: str = "auto",
) -> dict[str, float]:
    """Trains ``task`` in a run folder and returns its last evaluation.

    Args:
        task: what is trained; its model is changed in place.
        settings: the recipe.
        folder: of the run, ``runs/NAME``. A run that stopped there goes on.
        config: what identifies the run beside ``settings``: data, model, …; plain values.
        beside: files that belong to the run as its configuration does, by name.
        compute: where, and who is told the figures (``callbacks``); by default in this process alone, and TensorBoard.
            Without a console, the progress bar is on standard error.
        resume: "auto" goes on if there is something to go on from, "must" insists on it, "never" refuses to.
    """
    compute = Compute() if compute is None else compute
    group = compute.group
    if settings.precision in AUTOCAST and group.device.type == "cpu" and (problem := cpu.problem()):
        raise UserError(f"precision={settings.precision}: {problem}")
    run = RunFolder(Path(folder))
    with run.locked(group):
        found = run.open({**(config or {}), "training": to_json(settings)}, resume, group, beside=beside)
        return _fit(task, settings, run, compute, is_begun=found)


def _fit(task: Task, settings: Training, run: RunFolder, compute: Compute, *, is_begun: bool) -> dict[str, float]:
    group = compute.group
    trainer = Trainer.build(task, settings, compute)
    where = trainer.resume(run.last) if is_begun else Position()
    steps_per_epoch, figures = task.steps_per_epoch, where.figures
    first_step, total_steps = where.epoch * steps_per_epoch + where.step, settings.epochs * steps_per_epoch
    log = Log(
        run, group.is_main, first_step, total_steps, batch_size=settings.batch_size, console=compute.console,
        callbacks=compute.callbacks,
    )  # fmt: skip
    with run.guarded(), log.going_on(), trainer.saving():
        for epoch in range(where.epoch, settings.epochs):
            first_step = where.step if epoch == where.epoch else 0
            for step, parts in enumerate(task.batches(epoch, first_step), first_step):
                now = epoch * steps_per_epoch + step + 1
                logs = now % settings.log_every == 0
                line = trainer.step(parts, epoch, step, watch=logs)
                if logs:
                    log.write(now, "train", trainer.agree(line, now))
                log.step(now)
                ends = step + 1 == steps_per_epoch
                retracts, saves = (_is_due(every, step) for every in (settings.retract_every, settings.save_every))
                if ends or retracts or saves:
                    trainer.check_weights(now)
                if retracts:
                    retract(task.model, report=False)
                if saves and not ends:
                    trainer.save(run, Position(epoch, step + 1, where.best, figures))
            if settings.retract:
                retract(task.model, report=False)
            with trainer.as_kept() as settled_on:
                figures = trainer.evaluate() if _is_judged(task, settings, epoch + 1) else {}
                log.write((epoch + 1) * steps_per_epoch, "test", figures, settled_on)
                where = Position(epoch + 1, 0, max(where.best, figures.get(task.goal, -math.inf)), figures)
                trainer.keep_models(run, epoch + 1, is_best=figures.get(task.goal) == where.best)
            trainer.save(run, where)
    return figures


def _is_judged(task: Task, settings: Training, epoch: int) -> bool:
    """After every so many epochs, after the last, and after those that a task asks for besides."""
    return epoch % settings.evaluate_every == 0 or epoch in (settings.epochs, *task.judged_after)


def _is_due(every: int, step: int) -> bool:
    """Whether this step of an epoch is one of every so many; 0 for never."""
    return every > 0 and (step + 1) % every == 0


def means_among(options: Changes, compute: Compute | None = None) -> tuple[Compute, Changes]:
    """The means to compute with, ``compute`` or those that are among the options of a call, and the other options.

    >>> means_among({"workers": 2, "epochs": 3})[1]
    {'epochs': 3}
    """
    means = {name: value for name, value in options.items() if name in Compute.__slots__}
    if compute is not None and means:
        raise UserError(f"compute= and {', '.join(means)}=: give one compute, with all that is asked of it")
    return compute or Compute(**means), {name: value for name, value in options.items() if name not in means}


def settle_on(model: nn.Module, source: Source[Any], device: torch.device) -> str | None:
    """Solves the offsets of ``model`` for some batches of ``source``, the same on every process; says for which.

    None if the model has no offsets. Batches have their images as ``image``.
    """
    weight, sizes = next(model.parameters()), []

    def images() -> Iterator[Tensor]:
        for batch in some_batches(source, device):
            sizes.append(len(batch.image))
            yield batch.image.to(weight.dtype)

    if not settle_offsets(model, images()):
        return None
    return f"{sum(sizes):,} training images without augmentation, drawn by a hash"
