"""A task with everything that moves while it is trained: its optimiser, the average of its weights, its checkpoints."""

from __future__ import annotations

import copy
import logging
import math
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from timm.optim import param_groups_layer_decay, param_groups_weight_decay
from torch import Tensor, nn

from ermoe.analysis.recorder import record_routing
from ermoe.analysis.summary import over_layers, routing_figures
from ermoe.data.order import hashed
from ermoe.errors import UserError
from ermoe.models.io import save_state, weightless_copy
from ermoe.nn import moe_layers, no_weight_decay, orthogonality_loss, retract, update_balance
from ermoe.nn.balance import offsets_restored
from ermoe.nn.orthogonality import bases
from ermoe.nn.parallel import clip_gradients, parallelise, reshard, total_norm, without_sync
from ermoe.nn.precision import double, widest
from ermoe.nn.rivals.losses import auxiliary_loss
from ermoe.nn.sharding import by_mesh, is_sharded, sharded_as, unshard
from ermoe.train import checkpoint, parts
from ermoe.train.checkpoint import Checkpoint, State
from ermoe.train.compute import Compute, Processes, sum_over_processes, wait_for_all
from ermoe.train.run_folder import RunFolder
from ermoe.train.settings import Training

if TYPE_CHECKING:
    from ermoe.train.loop import Task

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class Position:
    """Where a run stands: full epochs, steps of the next one, the best figure so far, and the last evaluation."""

    epoch: int = 0
    step: int = 0
    best: float = -math.inf
    figures: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Trainer:
    """A task with everything that moves while it is trained."""

    task: Task
    settings: Training
    group: Processes
    network: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    average: Average | None
    skeleton: nn.Module
    is_shared: bool = False
    background: Background | None = None
    _parts: str | None = None  # of the last checkpoint
    _saving: Future[None] | None = None

    @classmethod
    def build(cls, task: Task, settings: Training, compute: Compute) -> Trainer:
        group = compute.group
        if settings.precision == "fp64" and widest(group.device) != torch.float64:
            raise UserError(f"precision=fp64: {group.device.type} has no such numbers; use --device cpu, or fp32")
        is_shared = compute.parallel != "ddp" and group.num > 1
        if settings.precision == "fp16" and is_shared:
            raise UserError(
                f"precision=fp16 with parallel={compute.parallel}: shards could disagree about an overflow; use bf16, "
                "or ddp"
            )
        if group.is_main and settings.warmup_epochs > settings.epochs:
            logging.getLogger("ermoe").warning(
                "warmup_epochs=%g is more than epochs=%d: the learning rate never reaches its peak; lower "
                "warmup_epochs",
                settings.warmup_epochs,
                settings.epochs,
            )
        if settings.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        model = task.model.to(group.device, torch.float64 if settings.precision == "fp64" else None)
        skeleton = weightless_copy(model) if is_shared else model  # sharding changes the classes of modules
        network = parallelise(model, compute.parallel, group.num, expert_processes=compute.expert_processes)
        optimizer = build_optimizer(model, settings, task.lr_scales)
        scaler = torch.amp.GradScaler(group.device.type, enabled=settings.precision == "fp16")
        average = Average(model, settings.ema) if settings.ema else None
        if compute.compile:
            network = torch.compile(network)  # type: ignore[assignment]
        background = Background() if is_shared and compute.background_saves else None
        return cls(task, settings, group, network, optimizer, scaler, average, skeleton, is_shared, background)

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
        if self.settings.precision not in AUTOCAST:
            return nullcontext()
        return torch.autocast(self.group.device.type, AUTOCAST[self.settings.precision])

    def _orthogonality(self, step: int) -> Tensor | float:
        """Every n-th step it weighs nλ, so that the mean over steps is λ."""
        every, weight = self.settings.orthogonality_every, self.settings.orthogonality
        return every * weight * orthogonality_loss(self.task.model) if weight and step % every == 0 else 0.0

    def _clip(self) -> Tensor:
        self.scaler.unscale_(self.optimizer)
        return clip_gradients(self.task.model, self.settings.clip or math.inf)

    def agree(self, line: dict[str, Tensor | float], step: int) -> dict[str, float]:
        """The figures of a step on this process, with the loss of all; stops a run whose loss is no longer a number."""
        loss = sum_over_processes(double(torch.as_tensor(line["loss"]))) / self.group.num
        if not bool(loss.isfinite()):
            raise _diverged(f"the loss is {loss.item()} at step {step}")
        return {name: float(value) for name, value in {**line, "loss": loss}.items()}

    def check_weights(self, step: int) -> None:
        """Stops a run whose weights are no longer numbers, before they are retracted, evaluated or saved."""
        if not bool(total_norm(self.task.model.parameters()).isfinite()):
            raise _diverged(f"the weights are no longer finite numbers after step {step}")

    @contextmanager
    def as_kept(self) -> Iterator[str | None]:
        """Within the block the model is what is judged and kept: the averaged weights, if there are any, settled.

        Yields on what its offsets were settled.
        """
        with self._averaged(), offsets_restored(self.task.model):
            unshard(self.task.model)
            settled_on = self.task.settle()
            reshard(self.task.model)
            yield settled_on

    def _averaged(self) -> AbstractContextManager[None]:
        return nullcontext() if self.average is None else self.average.in_place()

    def evaluate(self) -> dict[str, float]:
        """The task's figures of the model as it is."""
        unshard(self.task.model)
        figures = self.task.evaluate()
        reshard(self.task.model)
        return figures

    def keep_models(self, run: RunFolder, epoch: int, *, is_best: bool) -> None:
        """Writes the models that are kept for use, as folders that `ermoe.load` reads; called on every process."""
        settings = self.settings
        folders = [run.best] if is_best else []
        folders += [run.kept(epoch)] if settings.keep_every and epoch % settings.keep_every == 0 else []
        folders += [run.final] if epoch == settings.epochs else []
        if self.group.is_main or self.is_shared:
            for folder in folders:
                save_state(self.skeleton, self.task.model.state_dict(), folder)

    def save(self, run: RunFolder, where: Position) -> None:
        """Writes the checkpoint from which the run goes on; called on every process.

        With shared models and ``background``, training goes on meanwhile; `finish_saving` waits.
        """
        self.finish_saving()
        average = None if self.average is None else self.average.state_dict(whole=not self.is_shared)
        rest: State = {
            "position": asdict(where), "scaler": self.scaler.state_dict(), "task": self.task.state_dict(),
            "average": average,
        }  # fmt: skip
        if not self.is_shared:
            model, optimizer = checkpoint.gather(self.task.model, self.optimizer)
            if self.group.is_main:
                checkpoint.write(run.last, cast(Checkpoint, {"model": model, "optimizer": optimizer, **rest}))
                parts.forget(run.last.parent, None)
            wait_for_all()
        elif self.background is None:
            self._write_parts(run, where, self._tensors(), copy.deepcopy(rest), None)
        else:
            tensors = {name: tensor.clone() for name, tensor in self._tensors().items()}
            writing = (run, where, tensors, copy.deepcopy(rest), self.background.group)
            self._saving = self.background.submit(self._write_parts, *writing)

    def _write_parts(
        self, run: RunFolder, where: Position, tensors: dict[str, Tensor], rest: State, group: dist.ProcessGroup | None
    ) -> None:
        """All processes write their parts; then the checkpoint names them, and what it named before is removed."""
        folder = run.last.parent / parts.name_of(where.epoch, where.step)
        if self.group.is_main:
            parts.forget(run.last.parent, self._parts)
        dist.barrier(group)
        parts.write(folder, tensors, group)
        dist.barrier(group)
        self._parts = folder.name
        if self.group.is_main:
            named: State = {"model": {}, "optimizer": {}, "parts": folder.name, **rest}
            checkpoint.write(run.last, cast(Checkpoint, named))
            parts.forget(run.last.parent, folder.name)
        dist.barrier(group)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """After the block, whichever way it ends, no checkpoint is being written any more."""
        try:
            yield
        finally:
            self.finish_saving()

    def finish_saving(self) -> None:
        """Waits for a checkpoint that is being written, and says what went wrong with it."""
        if self._saving is not None:
            saving, self._saving = self._saving, None
            saving.result()

    def _tensors(self) -> dict[str, Tensor]:
        average = {} if self.average is None else {f"average.{n}": t for n, t in self.average.shadow.items()}
        return {**parts.state_of(self.task.model, self.optimizer), **average}

    def resume(self, path: Path) -> Position:
        """Goes on from the checkpoint at ``path``, on any number of processes, however they share the model."""
        state = checkpoint.read(path)
        try:
            return self.restore(state, path.parent)
        except (KeyError, TypeError, AttributeError, IndexError) as problem:
            raise UserError(f"{path} is no checkpoint of this run: restore it, or start a new run folder") from problem

    def restore(self, state: Checkpoint, folder: Path) -> Position:
        """Takes over what `save` wrote; ``folder`` is where parts are, if there are any."""
        self.task.load_state_dict(state["task"])  # first: it may freeze parameters, which then have no optimiser state
        if "parts" in state:
            self._read_parts(folder / state["parts"])
        else:
            checkpoint.scatter(self.task.model, self.optimizer, state)
        if self.scaler.is_enabled():
            self.scaler.load_state_dict(state["scaler"])
        if self.average is not None and state["average"] is not None:
            self.average.load_state_dict(state["average"])
        return Position(**state["position"])

    def _read_parts(self, folder: Path) -> None:
        self._parts = folder.name
        model = self.task.model
        parts.prepare(model, self.optimizer, parts.stored_names(folder))
        tensors = self._tensors()
        parts.read(folder, tensors)
        # What modules read by methods of their own, such as thresholds, is not theirs until they have read it.
        model.load_state_dict({name.removeprefix("model."): t for name, t in tensors.items() if name[:6] == "model."})


class Background:
    """A thread that writes checkpoints, and processes' own line to agree on them, apart from that of training."""

    def __init__(self) -> None:
        self.group = cast(dist.ProcessGroup, dist.new_group(backend="gloo"))
        self.submit = ThreadPoolExecutor(max_workers=1).submit


@contextmanager
def _watching(model: nn.Module, wanted: bool) -> Iterator[dict[str, float]]:
    """Fills what it yields with the worst load CV² and the mean fallback rate of what ran within, on this process."""
    figures: dict[str, float] = {}
    if not wanted or not moe_layers(model):
        yield figures
        return
    with record_routing(model, probe_tokens=0) as recorder:
        yield figures
    layers = {name: routing_figures(tally) for name, tally in recorder.tallies.items()}
    figures |= over_layers(layers, ("load_cv2", "fallback_rate"))


def _diverged(finding: str) -> UserError:
    return UserError(
        f"{finding}: start a new run folder with a lower base_lr, with clip or in fp32; this one would go the same way "
        "again"
    )


def build_optimizer(
    model: nn.Module, settings: Training, lr_scales: Mapping[str, float] | None = None
) -> torch.optim.AdamW:
    """AdamW. Bases, s, ψ, norms, biases and what the backbone itself exempts (position embeddings) do not decay.

    Each group carries ``lr_scale``, by which `set_learning_rate` multiplies: its layer's decay, times ``basis_lr``,
    times what ``lr_scales`` says of parameters whose names begin so.
    """
    exempt = no_weight_decay(model)
    if callable(own := getattr(model, "no_weight_decay", None)):
        exempt |= set(own())
    groups: list[dict[str, Any]]
    if settings.layer_decay < 1:
        groups = param_groups_layer_decay(
            model, settings.weight_decay, no_weight_decay_list=exempt, layer_decay=settings.layer_decay
        )
    else:
        groups = param_groups_weight_decay(model, settings.weight_decay, no_weight_decay_list=exempt)
    for group in groups:
        group.setdefault("lr_scale", 1.0)
    slowed = [({id(basis) for basis in bases(model)}, settings.basis_lr)]
    for start, factor in (lr_scales or {}).items():
        slowed.append(({id(own) for name, own in model.named_parameters() if name.startswith(start)}, factor))
    for chosen, factor in slowed:
        if factor != 1:
            groups = [part for group in groups for part in _apart(group, chosen, factor)]
    groups = [{**group, "params": params} for group in groups for params in by_mesh(group["params"])]
    return torch.optim.AdamW(groups, lr=settings.lr, fused=True)


def _apart(group: dict[str, Any], chosen: set[int], factor: float) -> list[dict[str, Any]]:
    """A group of parameters as two, of which the one with the chosen ones learns at ``factor`` times the rate."""
    own = [parameter for parameter in group["params"] if id(parameter) in chosen]
    others = [parameter for parameter in group["params"] if id(parameter) not in chosen]
    slowed = {**group, "params": own, "lr_scale": factor * group["lr_scale"]}
    return [part for part in ({**group, "params": others}, slowed) if part["params"]]


def learning_rate(step: int, *, total_steps: int, warmup_steps: int, peak: float) -> float:
    """Linear from zero to ``peak``, then half a cosine to zero.

    >>> [round(learning_rate(s, total_steps=10, warmup_steps=2, peak=1.0), 3) for s in (0, 1, 2, 6, 9)]
    [0.5, 1.0, 1.0, 0.5, 0.038]
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    return peak * 0.5 * (1 + math.cos(math.pi * progress))


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Gives every group its share of ``rate``."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["lr_scale"]


class Average:
    """Averages of all parameters and floating-point buffers of a model, offsets included.

    Early on the decay is lower, (1 + n) / (10 + n) after n updates, so that short runs do not average in their start.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model = model
        self.decay = decay
        self.num_updates = 0
        self.shadow = {name: tensor.detach().clone() for name, tensor in _averaged(model).items()}

    @torch.no_grad()
    def update(self) -> None:
        """Takes in the model as it is after a step."""
        self.num_updates += 1
        decay = min(self.decay, (1 + self.num_updates) / (10 + self.num_updates))
        for name, tensor in _averaged(self.model).items():
            _local(self.shadow[name]).lerp_(_local(tensor), 1 - decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within the block the model has the averaged weights, with its bases made orthonormal.

        An average of orthonormal bases is shorter than one; the average itself goes on from where it was.
        """
        own = {name: tensor.detach().clone() for name, tensor in _averaged(self.model).items()}
        try:
            self._put(self.shadow)
            retract(self.model, report=False)
            yield
        finally:
            self._put(own)

    @torch.no_grad()
    def _put(self, values: dict[str, Tensor]) -> None:
        for name, tensor in _averaged(self.model).items():
            _local(tensor).copy_(_local(values[name]))

    def state_dict(self, *, whole: bool = True) -> State:
        """The number of updates and, of a process that holds them ``whole``, all averages."""
        averages = {f"shadow.{name}": tensor.cpu() for name, tensor in self.shadow.items()} if whole else {}
        return {"num_updates": self.num_updates, **averages}

    @torch.no_grad()
    def load_state_dict(self, state: State) -> None:
        """Takes it back, sharded as the model is now; from a checkpoint in parts, the number of updates alone."""
        self.num_updates = int(state["num_updates"])
        for name, tensor in self.shadow.items() if len(state) > 1 else ():
            _local(tensor).copy_(_local(sharded_as(tensor, state[f"shadow.{name}"].to(tensor.device))))


def _averaged(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and the buffers that are saved with them. The others are constants: a mask of −∞ has no average."""
    buffers = {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if buffer.is_floating_point() and name not in module._non_persistent_buffers_set
    }
    return {**dict(model.named_parameters()), **buffers}


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if is_sharded(tensor) else tensor
