"""What the demo computes, each thing once: what has a line in the records of its folder is not computed again."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from ermoe.data.order import Order
from ermoe.files import to_json
from ermoe.images.presets import ImageRecipe, recipe
from ermoe.images.run import Classification, LabelledImages, transform_for
from ermoe.models.io import load, save
from ermoe.models.slim import slim
from ermoe.models.upcycle import Options, upcycle
from ermoe.studies.bench.measure import Measurement, compare, inferring, take_turns
from ermoe.studies.bench.step import training_step_of
from ermoe.studies.demo_table import Row
from ermoe.studies.record import RECORDS, Job, run_queue
from ermoe.train import loop
from ermoe.train.compute import Compute, Processes, device_named
from ermoe.train.loader import Loader, some_batches
from ermoe.train.run_folder import RunFolder, model_folder
from ermoe.train.settings import Training

ERMOE: Options = {"shared": "dense", "top_k": 1}
"""The dense network stays, so that nothing changes; small experts, one a token, add to it what they learn."""
METHODS: dict[str, Options | None] = {"dense": None, "V-MoE": {"router": "v-moe"}, "ERMoE": ERMOE}
"""How the models that go on learning are made of the dense one."""
AT_ONCE = 256
"""Digits that are answered together when answers are timed."""
_WIDTH = 96  # twice that of the preset, so that slimming saves time and not only operations
_BUDGET = 0.5
_ROUNDS = 15
_TO_FIT = 512  # digits to which experts are fitted


def demo_recipe(epochs: int, seed: int) -> ImageRecipe:
    """How the dense model learns digits."""
    preset = recipe("digits-dense")
    return replace(
        preset,
        validation=0.0,  # the last epoch is read, so none is chosen
        model_args={**preset.model_args, "embed_dim": _WIDTH},
        training=replace(
            preset.training, epochs=epochs, seed=seed, base_lr=2.4e-2, warmup_epochs=epochs / 10, evaluate_every=5
        ),
    )


@dataclass(frozen=True, slots=True)
class Parity:
    """How far scores of a sparse model are from its dense one's at most, their deviation, and predictions changed."""

    largest: float
    deviation: float
    changed: int


@dataclass(frozen=True, slots=True)
class DemoRuns:
    """The runs of one seed, in a folder of their own."""

    folder: Path
    recipe: ImageRecipe
    data: LabelledImages
    compute: Compute
    threads: int

    @classmethod
    def begun(cls, folder: Path, epochs: int, seed: int, threads: int, device: str, console: Console) -> DemoRuns:
        """Nothing computed yet, or what an earlier run left there."""
        torch.set_num_threads(threads)
        compute = Compute(Processes(device=device_named(device)), console=console)
        return cls(folder, demo_recipe(epochs, seed), LabelledImages.open("digits"), compute, threads)

    def learned(self) -> dict[str, Any]:
        """The dense model learns."""
        work = partial(loop.train, self.recipe, self.data, self.folder / "learned", compute=self.compute)
        return self._once("learned", work)

    def parity(self) -> Parity:
        """What becoming sparse changes."""
        dense, digits = self._dense(), self._held_out()
        sparse = upcycle(dense, **ERMOE, generator=self._generator())
        with torch.inference_mode():
            before, after = (torch.cat([model(part) for part in digits]) for model in (dense, sparse))
        changed = int((before.argmax(1) != after.argmax(1)).sum())
        return Parity(float((before - after).abs().max()), float(before.std()), changed)

    def went_on(self, name: str) -> Row:
        """The model that a method makes of the dense one learns on, a third as long."""
        self.compute.say(f"   {name}")
        figures = self._once(name, partial(self._go_on, name), options=METHODS[name])
        return Row.of(name, self.folder / name, figures)

    def _go_on(self, name: str) -> dict[str, float]:
        options, model = METHODS[name], self._dense()
        if options is not None:
            model = upcycle(model, **options, inplace=True, generator=self._generator())
        training = self._later
        task = Classification(model, self.data, replace(self.recipe, training=training), self.compute)
        config = {"method": name, "options": to_json(options), **self.data.identity()}
        return loop.fit(task, training, self.folder / name, config=config, compute=self.compute)

    @property
    def _later(self) -> Training:
        training = self.recipe.training
        epochs = max(1, training.epochs // 3)
        return replace(training, epochs=epochs, base_lr=training.base_lr / 3, warmup_epochs=epochs / 10)

    def slimmed(self) -> Row:
        """The dense model that went on, with fewer operations."""
        return Row.of("slim", self.folder / "slim", self._once("slim", self._slim, budget=_BUDGET))

    def _slim(self) -> dict[str, Any]:
        dense = load(RunFolder(self.folder / "dense").final, device=self.compute.device)
        source = transform_for(dense).of(self.data.train)
        given = {"num_items": len(source), "batch_size": self.recipe.training.batch_size}
        batches = [batch.image for batch in some_batches(source, self.compute.device, **given)]
        epochs = self._later.epochs
        slimmed = slim(
            dense,
            batches,
            budget=_BUDGET,
            routing_cost=0.0,  # 256 digits at once: routing is cheap beside them
            calibration=batches[: _TO_FIT // given["batch_size"]],
            held_out=self._held_out(),
            folder=self.folder / "slim" / "learning",
            compute=self.compute,
            seed=self.recipe.training.seed,
            layer_epochs=max(1, epochs // 2),
            epochs=epochs,
            layer_lr=1e-3,
            lr=1e-3,
        )
        save(slimmed.model, self.folder / "slim")
        figures = Classification(slimmed.model, self.data, self.recipe, self.compute).evaluate()
        return {**figures, "agreement": slimmed.agreement}

    def timed(self, rows: Sequence[Row]) -> list[Row]:
        """With a training step and an answer of each model beside the dense one's; the slim one only answers."""
        learners = [row for row in rows if row.name in METHODS]
        steps = self._timed_once("step", learners, self._step)
        answers = self._timed_once("answer", rows, self._answer)
        return [replace(row, step=steps.get(row.name), answer=answers[row.name]) for row in rows]

    def _timed_once(
        self, kind: str, rows: Sequence[Row], make: Callable[[nn.Module], Callable[[], object]]
    ) -> dict[str, Measurement]:
        name = f"{kind}, {self.compute.device.type}, {self.threads} threads"
        figures = self._once(name, partial(self._time, rows, make), rounds=_ROUNDS, at_once=AT_ONCE)
        return {model: Measurement(**figure) for model, figure in figures.items()}

    def _time(self, rows: Sequence[Row], make: Callable[[nn.Module], Callable[[], object]]) -> dict[str, Any]:
        candidates = {row.name: make(load(model_folder(row.place), device=self.compute.device)) for row in rows}
        return {row.name: asdict(row) for row in compare(take_turns(candidates, rounds=_ROUNDS), rows[0].name)}

    def _step(self, model: nn.Module) -> Callable[[], object]:
        """A step of training on batches that are at hand."""
        training = self.recipe.training
        order = Order(len(self.data.train), training.batch_size, training.seed)
        loader = Loader(transform_for(model).of(self.data.train), order, compute=self.compute)
        ready = [(part.image, part.label) for part in itertools.islice(loader, 4)]
        return training_step_of(model, itertools.cycle(ready))

    def _answer(self, model: nn.Module) -> Callable[[], object]:
        """A pass over many digits at once, until its scores have arrived."""
        model.eval()
        return inferring(lambda digits: model(digits).cpu(), torch.cat(self._held_out())[:AT_ONCE])

    def _once(self, name: str, work: Callable[[], dict[str, Any]], **settings: Any) -> dict[str, Any]:
        """The figures of a run, from its line in the records if it has one."""
        job = Job(name, self.recipe.training.seed, work, {**asdict(self.recipe), **settings})
        (record,) = run_queue("demo", [job], self.folder / RECORDS, console=Console(quiet=True))
        return dict(record["figures"])

    def _dense(self) -> nn.Module:
        """What was learned first."""
        return load(RunFolder(self.folder / "learned").final, device=self.compute.device).eval()

    def _held_out(self) -> list[Tensor]:
        loader = Loader(transform_for(self._dense()).of(self.data.test), compute=self.compute)
        return [batch.image for batch in loader]

    def _generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.recipe.training.seed)
