"""The training loop, from top to bottom.

A run is a pure function of its configuration: every step begins by seeding torch from (seed, epoch, step, process), the
learning rate follows from the step, and batches from (seed, epoch). So a checkpoint needs no memory of the past, and a
run that was killed anywhere ends exactly as if nothing had happened.
"""

from __future__ import annotations

import copy
import logging
import math
import os
import statistics
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from ermoe import cpu
from ermoe.analysis.recorder import record_routing
from ermoe.analysis.summary import routing_figures
from ermoe.data.randomness import hashed
from ermoe.errors import UserError
from ermoe.models.io import load_state, save
from ermoe.nn import moe_layers, orthogonality_loss, retract, update_balance
from ermoe.nn.balance import offsets_restored
from ermoe.nn.rivals.losses import auxiliary_loss
from ermoe.nn.sharding import whole
from ermoe.plain import Json, to_json
from ermoe.train import checkpoint
from ermoe.train.average import Average
from ermoe.train.compute import Processes, sum_over_processes, wait_for_all
from ermoe.train.distributed import parallelise, reshard, without_sync
from ermoe.train.optim import build_optimizer, learning_rate, set_learning_rate
from ermoe.train.progress import Log
from ermoe.train.run_folder import RunFolder
from ermoe.train.settings import Training
from ermoe.train.task import Task

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def fit(
    task: Task,
    settings: Training,
    folder: str | os.PathLike[str],
    *,
    config: Json | None = None,
    beside: Mapping[str, Any] | None = None,
    group: Processes | None = None,
    parallel: str = "ddp",
    compile: bool = False,
    resume: str = "auto",
    console: Console | None = None,
) -> dict[str, float]:
    """Trains ``task`` in a run folder and returns its last evaluation.

    Args:
        task: what is trained; its model is changed in place.
        settings: the recipe.
        folder: of the run, ``runs/NAME``. A run that stopped there goes on.
        config: what identifies the run beside ``settings``: data, model, …; plain values.
        beside: files that belong to the run as its configuration does, by name.
        group: the processes that take part; this one alone by default.
        parallel: "ddp" or "fsdp", with several processes.
        compile: run the training steps through `torch.compile`.
        resume: "auto" goes on if there is something to go on from, "must" insists on it, "never" refuses to.
        console: for the progress bar; standard error by default.
    """
    group = Processes() if group is None else group
    if settings.precision in _AUTOCAST and group.device.type == "cpu" and (problem := cpu.problem()):
        raise UserError(f"precision={settings.precision}: {problem}")
    run = RunFolder(Path(folder))
    found = run.open({**(config or {}), "training": to_json(settings)}, resume, group, beside=beside)
    trainer = _Trainer.build(task, settings, group, parallel, compile)
    where = trainer.restore(checkpoint.read(run.last)) if found else _Position()
    steps_per_epoch, figures = task.steps_per_epoch, where.figures
    first_step, total_steps = where.epoch * steps_per_epoch + where.step, settings.epochs * steps_per_epoch
    log = Log(run, group.is_main, first_step, total_steps, batch_size=settings.batch_size, console=console)
    with run.guarded(), log:
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
                    retract(task.model)
                if saves and not ends:
                    trainer.save(run, _Position(epoch, step + 1, where.best, figures))
            if settings.retract:
                retract(task.model)
            with trainer.as_kept() as settled_on:
                figures = trainer.evaluate() if _is_judged(task, settings, epoch + 1) else {}
                log.write((epoch + 1) * steps_per_epoch, "test", figures, settled_on)
                where = _Position(epoch + 1, 0, max(where.best, figures.get(task.goal, -math.inf)), figures)
                trainer.keep_models(run, epoch + 1, is_best=figures.get(task.goal) == where.best)
            trainer.save(run, where)
    return figures


def _is_judged(task: Task, settings: Training, epoch: int) -> bool:
    """After every so many epochs, after the last, and after those that a task asks for besides as ``judged_after``."""
    asked_for = (settings.epochs, *getattr(task, "judged_after", ()))
    return epoch % settings.evaluate_every == 0 or epoch in asked_for


def _is_due(every: int, step: int) -> bool:
    """Whether this step of an epoch is one of every so many; 0 for never."""
    return every > 0 and (step + 1) % every == 0


@dataclass(frozen=True, slots=True)
class _Position:
    """Where a run stands: full epochs, steps of the next one, the best figure so far, and the last evaluation."""

    epoch: int = 0
    step: int = 0
    best: float = -math.inf
    figures: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class _Trainer:
    """A task with everything that moves while it is trained."""

    task: Task
    settings: Training
    group: Processes
    network: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    average: Average | None
    skeleton: nn.Module

    @classmethod
    def build(cls, task: Task, settings: Training, group: Processes, parallel: str, compile: bool) -> _Trainer:
        if settings.precision == "fp16" and parallel == "fsdp" and group.num > 1:
            raise UserError("precision=fp16 with FSDP: shards could disagree about an overflow; use bf16, or ddp")
        if group.is_main and settings.warmup_epochs > settings.epochs:
            _warn_of_warmup(settings)
        if settings.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        model = task.model.to(group.device, torch.float64 if settings.precision == "fp64" else None)
        is_sharded = parallel == "fsdp" and group.num > 1
        skeleton = copy.deepcopy(model).cpu() if is_sharded else model  # ermoe.save wants a whole model
        network = parallelise(model, group, parallel)
        optimizer = build_optimizer(model, settings)
        scaler = torch.amp.GradScaler(group.device.type, enabled=settings.precision == "fp16")
        average = Average(model, settings.ema) if settings.ema else None
        if compile:
            network = torch.compile(network)  # type: ignore[assignment]
        return cls(task, settings, group, network, optimizer, scaler, average, skeleton)

    def step(self, parts: list[Any], epoch: int, step: int, *, watch: bool) -> dict[str, Tensor | float]:
        """One optimiser step; returns its losses, and with ``watch`` what the routers did."""
        settings, model = self.settings, self.task.model
        torch.manual_seed(int(hashed(settings.seed, epoch, step, self.group.rank)[0] >> 1))
        rate = self._learning_rate(epoch * self.task.steps_per_epoch + step)
        set_learning_rate(self.optimizer, rate)
        self.network.train()
        task_loss: Tensor | float = 0.0
        with _watching(model, watch) as routing:
            for number, part in enumerate(parts, 1):
                with without_sync(self.network, unless=number == len(parts)):
                    with self._autocast():
                        loss = self.task.loss(self.network, part)
                    task_loss = task_loss + loss.detach() / len(parts)
                    loss = (loss + auxiliary_loss(model)) / len(parts)
                    if number == len(parts):
                        loss = loss + self._orthogonality(epoch * self.task.steps_per_epoch + step)
                    self.scaler.scale(loss).backward()
        norm = self._clip()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        update_balance(model)
        if self.average is not None:
            self.average.update()
        return {"loss": task_loss, "lr": rate, "gradient_norm": norm, **routing} if watch else {}

    def _learning_rate(self, step: int) -> float:
        settings, per_epoch = self.settings, self.task.steps_per_epoch
        return learning_rate(
            step,
            total_steps=settings.epochs * per_epoch,
            warmup_steps=round(settings.warmup_epochs * per_epoch),
            peak=settings.lr,
        )

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.settings.precision not in _AUTOCAST:
            return nullcontext()
        return torch.autocast(self.group.device.type, _AUTOCAST[self.settings.precision])

    def _orthogonality(self, step: int) -> Tensor | float:
        """Every n-th step it weighs nλ, so that the mean over steps is λ."""
        every, weight = self.settings.orthogonality_every, self.settings.orthogonality
        return every * weight * orthogonality_loss(self.task.model) if weight and step % every == 0 else 0.0

    def _clip(self) -> Tensor:
        self.scaler.unscale_(self.optimizer)
        limit = self.settings.clip or math.inf
        return whole(nn.utils.clip_grad_norm_(self.task.model.parameters(), limit))

    def agree(self, line: dict[str, Tensor | float], step: int) -> dict[str, float]:
        """The figures of a step on this process, with the loss of all; stops a run whose loss is no longer a number."""
        loss = sum_over_processes(torch.as_tensor(line["loss"]).double()) / self.group.num
        if not bool(loss.isfinite()):
            raise _diverged(f"the loss is {loss.item()} at step {step}")
        return {name: float(value) for name, value in {**line, "loss": loss}.items()}

    def check_weights(self, step: int) -> None:
        """Stops a run whose weights are no longer numbers, before they are retracted, evaluated or saved."""
        if not bool(whole(nn.utils.get_total_norm(self.task.model.parameters())).isfinite()):
            raise _diverged(f"the weights are no longer finite numbers after step {step}")

    @contextmanager
    def as_kept(self) -> Iterator[str | None]:
        """Within the block the model is what is judged and kept: the averaged weights, if there are any, settled.

        Yields on what its offsets were settled.
        """
        with self._averaged(), offsets_restored(self.task.model):
            settled_on = self.task.settle()
            reshard(self.task.model)
            yield settled_on

    def _averaged(self) -> AbstractContextManager[None]:
        return nullcontext() if self.average is None else self.average.in_place()

    def evaluate(self) -> dict[str, float]:
        """The task's figures of the model as it is."""
        figures = self.task.evaluate()
        reshard(self.task.model)
        return figures

    def keep_models(self, run: RunFolder, epoch: int, *, is_best: bool) -> None:
        """Writes the models that are kept for use, as folders that `ermoe.load` reads."""
        settings = self.settings
        folders = [run.best] if is_best else []
        folders += [run.kept(epoch)] if settings.keep_every and epoch % settings.keep_every == 0 else []
        folders += [run.final] if epoch == settings.epochs else []
        if not folders:
            return
        model = self._whole_model()
        if self.group.is_main:
            for folder in folders:
                save(model, folder)

    def _whole_model(self) -> nn.Module:
        if self.skeleton is self.task.model:
            return self.skeleton
        state = checkpoint.whole_model(self.task.model)
        if self.group.is_main:
            load_state(self.skeleton, state, source="the shards of this run")
        return self.skeleton

    def save(self, run: RunFolder, where: _Position) -> None:
        """Writes the checkpoint from which the run goes on; called on every process."""
        state = checkpoint.gather(self.task.model, self.optimizer)
        state |= {"position": asdict(where), "scaler": self.scaler.state_dict(), "task": self.task.state_dict()}
        state["average"] = None if self.average is None else self.average.state_dict()
        if self.group.is_main:
            checkpoint.write(run.last, state)
        wait_for_all()

    def restore(self, state: dict[str, Any]) -> _Position:
        """Takes over what `save` wrote, on any number of processes."""
        self.task.load_state_dict(state["task"])  # first: it may freeze parameters, which then have no optimiser state
        checkpoint.scatter(self.task.model, self.optimizer, state)
        if self.scaler.is_enabled():
            self.scaler.load_state_dict(state["scaler"])
        if self.average is not None:
            self.average.load_state_dict(state["average"])
        return _Position(**state["position"])


@contextmanager
def _watching(model: nn.Module, wanted: bool) -> Iterator[dict[str, float]]:
    """Fills what it yields with the worst load CV² and the mean fallback rate of what ran within, on this process."""
    figures: dict[str, float] = {}
    if not wanted or not moe_layers(model):
        yield figures
        return
    with record_routing(model, probe_tokens=0) as recorder:
        yield figures
    layers = [routing_figures(tally) for tally in recorder.tallies.values()]
    for name, summarise in (("load_cv2", max), ("fallback_rate", statistics.fmean)):
        values = [layer[name] for layer in layers if not math.isnan(layer[name])]
        if values:
            figures[name] = summarise(values)


def _diverged(finding: str) -> UserError:
    return UserError(
        f"{finding}: start a new run folder with a lower base_lr, with clip or in fp32; this one would go the same way "
        "again"
    )


def _warn_of_warmup(settings: Training) -> None:
    logging.getLogger("ermoe").warning(
        "warmup_epochs=%g is more than epochs=%d: the learning rate never reaches its peak; lower warmup_epochs",
        settings.warmup_epochs,
        settings.epochs,
    )
