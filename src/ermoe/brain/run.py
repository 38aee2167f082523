"""From a data set to a finished run: what `ermoe brain train` does, for Python.

A run folder holds ``config.json``, ``splits.tsv``, ``folds/``, ``outputs.safetensors`` and ``model/``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ermoe.brain.age_head import AgeHead
from ermoe.brain.batches import ScanSet, VolumeLoader
from ermoe.brain.data.cache import VolumeCache
from ermoe.brain.data.cohort import Cohort, open_cohort, state_of
from ermoe.brain.data.preprocess import Preprocessing
from ermoe.brain.data.problems import stop_at_errors
from ermoe.brain.data.quality import examine
from ermoe.brain.data.scans import Scan
from ermoe.brain.data.splits import Splits, holdout, k_folds, leave_site_out
from ermoe.brain.estimation import outputs_of
from ermoe.brain.learning import Place, default_cache, is_learnt, learn, learn_regions, start
from ermoe.brain.metrics import figures
from ermoe.brain.model import BrainAgeModel, hashed_parts
from ermoe.brain.recipes import Recipe, recipe
from ermoe.brain.results import Outputs, for_known_people, for_new_people, held_out
from ermoe.errors import UserError
from ermoe.train.compute import Processes
from ermoe.train.run_folder import RunFolder

FEW = 200
"""People below which k-fold is the default: a tenth of them would be too few to test on."""
SPLITS = ("auto", "k-fold", "holdout", "leave-site-out")


@dataclass(frozen=True, slots=True)
class Data:
    """Which scans, and how their table is read; see `ermoe.brain.data.cohort.open_cohort`."""

    path: str
    options: Mapping[str, Any]

    def open(self) -> Cohort:
        """The cohort."""
        return open_cohort(self.path, **self.options)


def train(
    data: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    preset: str | Recipe = "small",
    method: str = "ermoe",
    init: str = "random",
    split: str = "auto",
    folds: int = 5,
    fold_seed: int = 0,
    calibration_fit: str = "held-out",
    cohort_options: Mapping[str, Any] | None = None,
    cache: str | os.PathLike[str] | None = None,
    check: bool = True,
    group: Processes | None = None,
    workers: int = 0,
    console: Console | None = None,
    **changes: Any,
) -> BrainAgeModel:
    """Trains one network a fold, or goes on with the run there; returns the estimator.

    Args:
        data: a BIDS root, or a table with columns participant_id, age, t1, ….
        folder: of the run.
        preset: a name of `ermoe.brain.recipes.PRESETS`, or a recipe of your own.
        method: one of `ermoe.brain.recipes.NETWORKS`.
        init: "random"; "phantom", to learn a synthetic cohort first; or another brain-age model.
        split: "k-fold", "holdout" (8:1:1), "leave-site-out"; "auto" is k-fold below 200 people, else holdout.
        folds, fold_seed: of k-fold; ``fold_seed`` also shuffles the others.
        calibration_fit: "held-out", or "train" as in the paper.
        cohort_options: how the table is read; see `ermoe.brain.data.cohort.open_cohort`.
        cache: folder for prepared volumes and phantoms.
        check: look at every scan first, and stop at errors.
        changes: fields of the recipe or of its training that are to differ.
    """
    folder = Path(folder)
    chosen = recipe(preset, method, **changes) if isinstance(preset, str) else preset
    source = Data(os.path.abspath(data), dict(cohort_options or {}))
    place = Place(
        Path(cache) if cache is not None else default_cache(),
        Processes() if group is None else group,
        Console(stderr=True) if console is None else console,
        workers,
    )
    scans = _trainable(source.open(), place.console, chosen.preprocessing if check else None)
    config = {
        "task": "brain age",
        "data": {"path": source.path, **source.options},
        "scans_and_ages": state_of(scans),
        "init": init,
        "split": {"kind": split, "folds": folds, "seed": fold_seed},
        "calibration_fit": calibration_fit,
        "recipe": chosen.as_json(),
    }
    RunFolder(folder).open(config, "auto", place.group)
    splits = _splits(folder / "splits.tsv", scans, split, folds, fold_seed)
    head = chosen.age_head([scan.age for scan in scans if scan.age is not None])
    mask_sources, has_tissue = _prepare(place.volumes(chosen), scans, place.console)
    networks, outputs = {}, []
    for fold, name in enumerate(splits.fold_names):
        where = folder / "folds" / name
        networks[name] = learn_fold(chosen, head, scans, splits, fold, where, place, init, has_tissue=has_tissue)
        everybody = VolumeLoader(ScanSet(place.volumes(chosen), scans, chosen.input), device=place.group.device)
        outputs.append(outputs_of(networks[name], everybody)[0])
    results = Outputs(scans, splits, head, torch.stack(outputs))
    model = _model(networks, results, chosen, mask_sources, calibration_fit, source, init)
    if place.group.is_main:
        results.save(folder / "outputs.safetensors")
        model.save(folder / "model")
    return model


def learn_fold(
    chosen: Recipe,
    head: AgeHead,
    scans: Sequence[Scan],
    splits: Splits,
    fold: int,
    folder: Path,
    place: Place,
    init: str,
    *,
    has_tissue: bool,
) -> torch.nn.Module:
    """The network of one fold, from its training people alone."""
    volumes = place.volumes(chosen)

    def part(name: str, **options: Any) -> ScanSet | None:
        selected = splits.select(scans, fold, name)  # type: ignore[arg-type]
        return ScanSet(volumes, selected, chosen.input, **options) if selected else None

    training = part("train", variants=chosen.variants)
    if training is None:
        raise UserError(f"{splits.fold_names[fold]} has nobody to train on: use fewer folds")
    if is_learnt(folder):
        network = chosen.build(head)
    else:
        network = start(chosen, head, init, place, training.ages(), strangers=_held_out_people(scans, splits, fold))
    warm = chosen.has_experts and chosen.warm_start_epochs and init == "random"
    if warm and has_tissue and not is_learnt(folder):
        regions = replace(training, regions=True)
        network = learn_regions(network, chosen, head, regions, folder / "warm-start", place)
    elif warm and not has_tissue and fold == 0:
        place.console.print(
            "not every scan has tissue maps: region experts start without a warm start", highlight=False
        )
    probe = part("test", regions=True) if chosen.has_experts and has_tissue else None
    return learn(
        network,
        chosen.after_warm_start() if warm and has_tissue else chosen,
        head,
        training,
        folder,
        place,
        validation=part("validation"),
        watched=part("test"),
        probe=probe,
        probe_epochs=(*chosen.probe_epochs, chosen.training.epochs),
    )


def _held_out_people(scans: Sequence[Scan], splits: Splits, fold: int) -> list[str]:
    """Whom the network of a fold must not know: those it is tested on, and those that choose its epoch."""
    chosen = [scan for part in ("test", "validation") for scan in splits.select(scans, fold, part)]  # type: ignore[arg-type]
    return list(dict.fromkeys(scan.participant_id for scan in chosen))


def _trainable(cohort: Cohort, console: Console, check_for: Preprocessing | None) -> list[Scan]:
    """The scans with an age, after everything worth saying has been said and errors have stopped the run."""
    for note in cohort.notes:
        console.print(note, highlight=False, soft_wrap=True, markup=False)
    problems = cohort.problems if check_for is None else examine(cohort, check_for).problems
    stop_at_errors(problems)
    for problem in problems:
        console.print(f"warning: {problem}", highlight=False, soft_wrap=True, markup=False)
    scans = list(cohort.with_age)
    if left_out := len(cohort.scans) - len(scans):
        console.print(f"{left_out} scans have no age and are left out", highlight=False)
    if len({scan.participant_id for scan in scans}) < 4:
        raise UserError(f"{len(scans)} scans with an age: training needs at least four people")
    return scans


def _splits(path: Path, scans: Sequence[Scan], kind: str, folds: int, seed: int) -> Splits:
    """Those of the run if it has begun, checked against the scans; else new ones, written down."""
    if path.is_file():
        return Splits.load(path, scans)
    if kind not in SPLITS:
        raise UserError(f"split={kind!r}: use one of {', '.join(SPLITS)}")
    people = len({scan.participant_id for scan in scans})
    if kind == "leave-site-out":
        splits = leave_site_out(scans, seed=seed)
    elif kind == "holdout" or (kind == "auto" and people >= FEW):
        splits = holdout(scans, seed)
    else:
        splits = k_folds(scans, folds, seed)
    splits.check(scans)
    splits.save(path)
    return splits


def _prepare(volumes: VolumeCache, scans: Sequence[Scan], console: Console) -> tuple[tuple[str, ...], bool]:
    """Fills the cache; returns where masks came from and whether every scan has tissue maps."""

    def show(done: int, total: int) -> None:
        if done % 25 == 0 or done == total:
            console.print(f"prepared {done} of {total} scans", highlight=False)

    stop_at_errors(volumes.fill(scans, on_scan=show))
    sources = {volumes.volume(scan).mask_source for scan in scans}
    return tuple(sorted(sources)), all(scan.tissue is not None for scan in scans)


def _model(
    networks: Mapping[str, torch.nn.Module],
    results: Outputs,
    chosen: Recipe,
    mask_sources: tuple[str, ...],
    calibration_fit: str,
    source: Data,
    init: str,
) -> BrainAgeModel:
    calibration, tau = for_new_people(results, fit=calibration_fit)
    tested = held_out(results, fit=calibration_fit)
    ages = [scan.age for scan in results.scans if scan.age is not None]
    facts = {
        "method": chosen.method,
        "data": Path(source.path).name,
        "num_people": len({scan.participant_id for scan in results.scans}),
        "num_scans": len(results.scans),
        "split": results.splits.kind,
        "raw": {name: round(value, 4) for name, value in figures(tested.age_N, tested.raw_N).items()},
        "calibration_fit": calibration_fit,
        "interval_coverage": None if tested.coverage != tested.coverage else round(tested.coverage, 4),
        "epochs": chosen.training.epochs,
        "seed": chosen.training.seed,
    }
    return BrainAgeModel(
        networks=networks,
        head=results.head,
        input=chosen.input,
        preprocessing=chosen.preprocessing,
        patch_size=chosen.patch_size,
        parts={**_inherited_parts(init, results), **hashed_parts(results.splits)},
        age_range=(min(ages), max(ages)),
        mask_sources=mask_sources,
        calibration=calibration,
        calibration_of_fold=for_known_people(results, fit=calibration_fit),
        temperature=tau,
        facts=facts,
    )


def _inherited_parts(init: str, results: Outputs) -> dict[str, tuple[str, ...]]:
    """People whom another model had learnt from before its networks were the start of these, by hashed id."""
    if init in ("random", "phantom"):
        return {}
    other = BrainAgeModel.load(init)
    folds = range(results.splits.num_folds)
    started = [other.fold_without(_held_out_people(results.scans, results.splits, fold)) for fold in folds]
    positions = [list(other.networks).index(name) for name in started]
    return {person: tuple(parts[position] for position in positions) for person, parts in other.parts.items()}
