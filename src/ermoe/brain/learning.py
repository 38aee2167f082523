"""One network learning: isolated tissues first if asked, then whole scans; every stage a run that can go on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from ermoe.brain.age_head import AgeHead
from ermoe.brain.batches import ScanSet, VolumeLoader
from ermoe.brain.contrast import VERSION, reduction
from ermoe.brain.data.cache import VolumeCache
from ermoe.brain.data.cohort import open_cohort
from ermoe.brain.data.phantom import synthesize
from ermoe.brain.data.scans import Scan
from ermoe.brain.recipes import Recipe
from ermoe.brain.regions import ProbedEstimation, RegionWarmStart, point_prototypes
from ermoe.errors import UserError
from ermoe.files import cache_folder
from ermoe.models.io import load
from ermoe.models.weights.state import load_state
from ermoe.train.compute import Processes
from ermoe.train.loop import fit
from ermoe.train.run_folder import RunFolder


@dataclass(frozen=True, slots=True)
class Place:
    """Where and with what a network learns: cache of volumes, processes, console."""

    cache: Path
    group: Processes
    console: Console
    workers: int = 0

    def volumes(self, recipe: Recipe) -> VolumeCache:
        """The cache of prepared volumes."""
        return VolumeCache(self.cache / "volumes", recipe.preprocessing)


def default_cache() -> Path:
    """Prepared volumes and phantoms, unless another place is named."""
    return cache_folder("brain")


def learn_regions(
    network: nn.Module, recipe: Recipe, head: AgeHead, regions: ScanSet, folder: Path, place: Place
) -> nn.Module:
    """Warm start: region experts learn from their isolated tissues, then ψ is set to the tissues' mean directions."""
    settings = replace(recipe.training, epochs=recipe.warm_start_epochs, warmup_epochs=0.2 * recipe.warm_start_epochs)

    def task() -> RegionWarmStart:
        return RegionWarmStart(network, head, regions, settings, group=place.group, workers=place.workers)

    network = _run(task, settings, folder, {"stage": "region warm start"}, place)
    point_prototypes(network, VolumeLoader(regions, device=place.group.device))
    return network


def learn(
    network: nn.Module,
    recipe: Recipe,
    head: AgeHead,
    train: ScanSet,
    folder: Path,
    place: Place,
    *,
    validation: ScanSet | None = None,
    watched: ScanSet | None = None,
    probe: ScanSet | None = None,
    probe_epochs: tuple[int, ...] = (),
) -> nn.Module:
    """Whole scans; returns the best network by ``validation``, without it the last one."""

    def task() -> ProbedEstimation:
        return ProbedEstimation(
            network,
            head,
            train,
            recipe.training,
            validation=validation,
            watched=watched,
            augmentation=recipe.augmentation,
            volumes_per_epoch=recipe.volumes_per_epoch,
            drop_cubes=recipe.drop_cubes,
            patch_size=recipe.patch_size // reduction(recipe.input),
            input_noise=recipe.input_noise,
            evaluate_every=recipe.evaluate_every,
            group=place.group,
            workers=place.workers,
            probe=probe,
            probe_epochs=probe_epochs,
        )

    return _run(task, recipe.training, folder, {"stage": "whole scans"}, place, best=validation is not None)


def _run(
    task: Callable[[], Any], settings: Any, folder: Path, config: dict[str, Any], place: Place, *, best: bool = False
) -> nn.Module:
    run = RunFolder(folder)
    if not run.final.is_dir():
        fit(task(), settings, folder, config=config, group=place.group, console=place.console)
    return load(run.best if best and run.best.is_dir() else run.final, device=place.group.device)


def is_learnt(folder: Path) -> bool:
    """Whether a stage has ended."""
    return RunFolder(folder).final.is_dir()


def phantom_scans(recipe: Recipe, place: Place) -> tuple[Scan, ...]:
    """The synthetic cohort of a recipe, made the first time it is asked for."""
    phantoms, spacing_mm = recipe.phantoms, recipe.preprocessing.spacing_mm
    low, high = phantoms.ages
    name = f"n{phantoms.subjects}-seed{phantoms.seed}-{low:g}to{high:g}y-{spacing_mm:g}mm"
    root = place.cache / "phantoms" / name

    def show(done: int, total: int) -> None:
        if done % 20 == 0 or done == total:
            place.console.print(f"phantoms: {done} of {total}", highlight=False)

    synthesize(root, phantoms.subjects, phantoms.seed, ages=phantoms.ages, spacing_mm=spacing_mm, on_subject=show)
    return open_cohort(root).with_age


@torch.no_grad()
def answer_with_prior(network: Any, head: AgeHead, age_N: Tensor) -> None:
    """Sets the last bias to what is known without a scan, and the last weights to zero."""
    network.head.weight.zero_()
    network.head.bias.copy_(head.prior(age_N))


def learn_phantoms(recipe: Recipe, head: AgeHead, place: Place) -> nn.Module:
    """A network that has learnt the synthetic cohort, warm start included; kept in the cache for the next run."""
    settings = replace(
        recipe.training, epochs=recipe.phantoms.epochs, base_lr=recipe.phantoms.base_lr, warmup_epochs=1.0
    )
    own = replace(recipe, training=settings, evaluate_every=recipe.phantoms.epochs)
    folder = place.cache / "pretrained" / f"{recipe.method}-seed{settings.seed}-{_fingerprint(own, head)}"
    if is_learnt(folder):
        return load(RunFolder(folder).final, device=place.group.device)
    volumes, scans = place.volumes(recipe), phantom_scans(recipe, place)
    place.console.print(f"learning {len(scans)} phantoms, kept in {folder}", highlight=False, soft_wrap=True)
    whole = ScanSet(volumes, scans, recipe.input, variants=recipe.phantoms.variants if recipe.variants else 0)
    network = start(own, head, "random", place, whole.ages())
    if recipe.has_experts and recipe.warm_start_epochs:
        network = learn_regions(network, own, head, replace(whole, regions=True), folder / "warm-start", place)
        own = own.after_warm_start()
    return learn(network, own, head, whole, folder, place)


def _fingerprint(recipe: Recipe, head: AgeHead) -> str:
    parts = {"recipe": recipe.as_json(), "head": head.as_json(), "input": VERSION}
    text = json.dumps(parts, sort_keys=True, default=list)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def start(
    recipe: Recipe, head: AgeHead, init: str, place: Place, age_N: Tensor, *, strangers: Sequence[str] = ()
) -> nn.Module:
    """A network to begin with: "random", "phantom", or a fold of another model that has not learnt from ``strangers``.

    One that has learnt nothing yet answers with the ages ``age_N`` it will learn from: what is left to find is how
    people differ from the usual age, and the less it finds, the nearer to that it stays.
    """
    if init == "random":
        network = recipe.build(head)
        answer_with_prior(network, head, age_N)
        return network
    if init == "phantom":
        return learn_phantoms(recipe, head, place)
    from ermoe.brain.model import BrainAgeModel

    other = BrainAgeModel.load(init)
    if (other.head, other.input, other.preprocessing) != (head, recipe.input, recipe.preprocessing):
        raise UserError(f"{init} reads ages or scans in another way: use the same head, bins, input and grid as it")
    network = recipe.build(head)
    load_state(network, other.networks[other.fold_without(strangers)].state_dict(), source=init)
    return network
