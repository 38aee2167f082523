"""The demonstration: one small ViT on handwritten digits, dense and sparse, trained side by side.

All contenders start from the same weights and take every step on the same batch, one after the other. So they share
the budget exactly, and a busy machine slows all of them alike.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from timm.models import VisionTransformer
from torch import Tensor, nn

from ermoe.analysis.recorder import RoutingRecorder, record_routing
from ermoe.data.digits import NUM_CLASSES, SIDE, Split, digits
from ermoe.models.count import count
from ermoe.models.scratch import FROM_SCRATCH
from ermoe.models.upcycle import upcycle
from ermoe.nn import orthogonality_loss, retract, update_balance
from ermoe.nn.rivals.losses import auxiliary_loss
from ermoe.train.optim import build_optimizer
from ermoe.train.settings import Training

PATCH = 2
"""Pixels."""
GRID = (SIDE // PATCH, SIDE // PATCH)
"""Patches."""
NUM_EXPERTS = 8
LAMBDA = 5e-5
SPARSE: dict[str, dict[str, Any]] = {
    "learned gate": {"router": "logit"},
    "V-MoE": {"router": "v-moe"},
    "ERMoE": {"router": "eigen", "init": "same", **FROM_SCRATCH},
}
_BASIS_SPEED = 0.25
_WARMUP = 0.15
_MEAN, _STD = 0.305, 0.376  # of the training pixels


@dataclass(slots=True, frozen=True)
class Budget:
    """What every contender gets."""

    epochs: int = 20
    batch_size: int = 64
    learning_rate: float = 2e-3
    seed: int = 0

    def steps(self, num_images: int) -> int:
        """Optimiser steps; the images that do not fill a batch wait for another epoch."""
        return self.epochs * (num_images // self.batch_size)


@dataclass(slots=True)
class Contender:
    """A model in training, and how long its steps took."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    seconds: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, name: str, model: nn.Module, budget: Budget, num_steps: int) -> Contender:
        """With AdamW and a learning rate that rises briefly and falls."""
        rate = budget.learning_rate * 256 / budget.batch_size
        optimizer = build_optimizer(model, Training(batch_size=budget.batch_size, base_lr=rate, basis_lr=_BASIS_SPEED))
        peaks = [budget.learning_rate * group["lr_scale"] for group in optimizer.param_groups]
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, peaks, total_steps=num_steps, pct_start=_WARMUP)
        return cls(name, model, optimizer, schedule)

    def step(self, image: Tensor, label: Tensor) -> None:
        """One optimiser step, with all that belongs to it."""
        start = time.perf_counter()
        loss = F.cross_entropy(self.model(image), label, label_smoothing=0.1)
        loss = loss + LAMBDA * orthogonality_loss(self.model) + auxiliary_loss(self.model)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        update_balance(self.model)
        self.seconds.append(time.perf_counter() - start)


@dataclass(slots=True, frozen=True)
class Result:
    """What became of a contender."""

    name: str
    model: nn.Module
    accuracy: float
    parameters: int
    active_parameters: int
    step_seconds: float
    routing: RoutingRecorder | None

    def mean(self, measure: str) -> float:
        """A measure, averaged over the MoE layers; NaN for a dense model."""
        if self.routing is None:
            return math.nan
        return statistics.fmean(figures[measure] for figures in self.routing.summary().values())


def small_vit(seed: int = 0) -> VisionTransformer:
    """A ViT for 8 × 8 pixels: 16 patches and a class token, width 64, 4 blocks."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = VisionTransformer(
            img_size=SIDE,
            patch_size=PATCH,
            in_chans=1,
            num_classes=NUM_CLASSES,
            embed_dim=64,
            depth=4,
            num_heads=4,
            mlp_ratio=2,
        )
        # The usual 0.02 drowns in patches of four pixels: it takes hundreds of steps until positions are noticed.
        assert model.pos_embed is not None
        nn.init.normal_(model.pos_embed, std=0.5)
    return model


def contenders(budget: Budget, num_steps: int) -> list[Contender]:
    """The dense model, and its sparse versions with 8 experts in blocks 1 and 3, of which each token meets 2."""
    dense = small_vit(budget.seed)
    models: dict[str, nn.Module] = {"dense": dense}
    for name, options in SPARSE.items():
        generator = torch.Generator().manual_seed(budget.seed)
        options = {"num_experts": NUM_EXPERTS, "top_k": 2, "init": "random", **options}
        models[name] = upcycle(dense, generator=generator, **options)
    return [Contender.of(name, model, budget, num_steps) for name, model in models.items()]


def batches(split: Split, budget: Budget) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(epoch, images, labels), in an order drawn from the seed."""
    generator = torch.Generator().manual_seed(budget.seed)
    for epoch in range(budget.epochs):
        order = torch.randperm(len(split), generator=generator)
        for index in order.split(budget.batch_size):
            if len(index) == budget.batch_size:
                yield epoch, standardised(split.image[index]), split.label[index]


def standardised(image: Tensor) -> Tensor:
    """Mean 0 and variance 1 over the training pixels."""
    return (image - _MEAN) / _STD


def run(budget: Budget, on_step: Callable[[int, int], None] = lambda done, total: None) -> list[Result]:
    """Trains all contenders and puts them to the test; ``on_step(done, total)`` is called after every step."""
    train, test = digits()
    num_steps = budget.steps(len(train))
    with _one_thread(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(budget.seed)  # V-MoE adds noise to its gates
        group = contenders(budget, num_steps)
        last_epoch = 0
        for done, (epoch, image, label) in enumerate(batches(train, budget), start=1):
            if epoch != last_epoch:
                _retract_all(group)
                last_epoch = epoch
            for contender in group:
                contender.step(image, label)
            on_step(done, num_steps)
        _retract_all(group)
        return [examine(contender, test) for contender in group]


@contextmanager
def _one_thread() -> Iterator[None]:
    """Products this small do not repay a second thread: waiting for it takes longer than the work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _retract_all(group: list[Contender]) -> None:
    for contender in group:
        retract(contender.model)


@torch.no_grad()
def examine(contender: Contender, test: Split) -> Result:
    """Accuracy and routing on held-out digits."""
    model = contender.model.eval()
    routing = None
    if contender.name == "dense":
        prediction = model(standardised(test.image)).argmax(-1)
    else:
        with record_routing(model, classes=NUM_CLASSES) as routing:
            routing.labels(test.label)
            prediction = model(standardised(test.image)).argmax(-1)
    size = count(model, SIDE)
    return Result(
        name=contender.name,
        model=model,
        accuracy=float((prediction == test.label).float().mean()),
        parameters=size.total_parameters,
        active_parameters=size.active_parameters,
        step_seconds=statistics.median(contender.seconds),
        routing=routing,
    )
