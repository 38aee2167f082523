"""One way to train anything: a recipe, the data, and the folder of the run."""

from __future__ import annotations

import os
from dataclasses import fields, replace
from typing import Any, Protocol, TypeVar

from ermoe.plain import Json, to_json
from ermoe.train.compute import Compute
from ermoe.train.loop import fit
from ermoe.train.settings import Training
from ermoe.train.task import Task


class TrainingData(Protocol):
    """What is learnt from and judged on."""

    def identity(self) -> Json:
        """What tells these data from others, for config.json."""

    def beside(self) -> dict[str, Any]:
        """Files that belong into the run folder, by name: what those who use the model must know of the data."""


Data = TypeVar("Data", bound=TrainingData, contravariant=True)


class Recipe(Protocol[Data]):
    """Everything but the data: a frozen dataclass of plain values, so that config.json can hold it."""

    @property
    def training(self) -> Training:
        """The numbers of the loop."""

    def task(self, data: Data, compute: Compute) -> Task:
        """The model before training, with its data and what is wanted of it."""


def train(
    recipe: Recipe[Data],
    data: Data,
    folder: str | os.PathLike[str],
    *,
    compute: Compute | None = None,
    resume: str = "auto",
) -> dict[str, float]:
    """Trains what a recipe makes of data in a run folder, or goes on with the run there; returns its last evaluation.

    ``resume`` is "auto", "must" or "never"; see `ermoe.train.loop.fit`.
    """
    compute = Compute() if compute is None else compute
    return fit(
        recipe.task(data, compute),
        recipe.training,
        folder,
        config={**to_json(recipe), **data.identity()},
        beside=data.beside(),
        group=compute.group,
        parallel=compute.parallel,
        compile=compute.compile,
        resume=resume,
        console=compute.console,
    )


Chosen = TypeVar("Chosen", bound=Recipe[Any])


def changed(recipe: Chosen, changes: dict[str, Any]) -> Chosen:
    """A recipe with some of its fields, or of its training's, set anew."""
    names = {field.name for field in fields(recipe)}  # type: ignore[arg-type]
    own = {name: value for name, value in changes.items() if name in names}
    training = {name: value for name, value in changes.items() if name not in own}
    return replace(recipe, training=replace(recipe.training, **training), **own)  # type: ignore[type-var]


def means_among(options: dict[str, Any]) -> tuple[Compute, dict[str, Any]]:
    """The means to compute with that are among the options of a call, and the other options.

    >>> means_among({"workers": 2, "epochs": 3})[1]
    {'epochs': 3}
    """
    means = {name: value for name, value in options.items() if name in Compute.__slots__}
    return Compute(**means), {name: value for name, value in options.items() if name not in means}
