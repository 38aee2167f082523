"""From a data set to a finished run: what `ermoe brain train` does, for Python.

A run folder holds ``config.json``, ``splits.tsv``, ``folds/``, ``outputs.safetensors`` and ``model/``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ermoe.brain.ages import AgeHead
from ermoe.brain.batches import ScanSet, every_scan
from ermoe.brain.data.cache import Archive, VolumeCache
from ermoe.brain.data.cohort import Cohort, open_cohort, state_of
from ermoe.brain.data.quality import examine
from ermoe.brain.data.scans import CohortOptions, Preprocessing, Scan, grouped, stop_at_errors
from ermoe.brain.data.splits import Part, Splits, holdout, k_folds, leave_site_out
from ermoe.brain.estimation import Lesson, outputs_of
from ermoe.brain.evaluation import confounds_among
from ermoe.brain.harmonise import fit_offsets, without_offsets
from ermoe.brain.learning import age_head, build, is_learnt, learn, learn_regions, looked_at, residuals, start
from ermoe.brain.likeness import Likeness
from ermoe.brain.measures import MEASURES, Double
from ermoe.brain.metrics import figures
from ermoe.brain.model import DESCRIPTION, BrainAgeModel, hashed_id
from ermoe.brain.outlook import Outlook
from ermoe.brain.own_ridges import OwnRidges, scanner_columns
from ermoe.brain.recipes import BrainRecipe, recipe
from ermoe.brain.results import OUTPUTS, Outputs, for_known_people, for_new_people, held_out
from ermoe.brain.ridge import Ridge
from ermoe.console import Terminal
from ermoe.errors import UserError
from ermoe.files import Json, read_object, to_json
from ermoe.train.compute import Compute
from ermoe.train.loop import means_among
from ermoe.train.run_folder import RunFolder
from ermoe.train.settings import changed

_FEW_PEOPLE = 200
"""People below which k-fold is the default: a tenth of them would be too few to test on."""
_ENOUGH_AT_A_SITE = 15
"""People of a site from which on it counts: with two such sites, sites are left out by default."""
_SPLITS = ("auto", "k-fold", "holdout", "leave-site-out")


def train(
    data: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    preset: str | BrainRecipe = "small",
    method: str | None = None,
    init: str = "random",
    split: str = "auto",
    folds: int = 5,
    fold_seed: int = 0,
    calibration_fit: str = "held-out",
    cohort_options: CohortOptions | Mapping[str, Any] | None = None,
    cache: str | os.PathLike[str] | None = None,
    check: bool = True,
    compute: Compute | None = None,
    resume: str = "auto",
    **changes: Any,
) -> BrainAgeModel:
    """Fits a ridge and trains a network a fold, or goes on with the run there; returns the estimator.

    Args:
        data: a BIDS root, or a table with columns participant_id, age, t1, ….
        folder: of the run.
        preset: a name of `ermoe.brain.recipes.PRESETS`, or a recipe of your own.
        method: one of `ermoe.brain.recipes.METHODS`; by default the recipe's own, of a preset "ermoe".
        init: "random"; "phantom", to learn a synthetic cohort first; or another brain-age model.
        split: "k-fold", "holdout" (8:1:1), "leave-site-out"; "auto" leaves sites out where there are two or more of 15
            people at least, and is k-fold below 200 people, else holdout.
        folds, fold_seed: of k-fold; ``fold_seed`` also shuffles the others.
        calibration_fit: "held-out", or "train" as in the paper.
        cohort_options: how the table is read.
        cache: folder for prepared volumes and phantoms.
        check: look at every scan first, and stop at errors.
        compute: processes, device, workers and console; its fields may also be given one by one.
        resume: "auto" goes on if there is a run in the folder, "must" insists on one, "never" refuses one.
        changes: fields of the recipe or of its training that are to differ.
    """
    compute, changes = means_among(changes, compute)
    compute = _speaking(compute)
    changes |= {} if method is None else {"method": method}
    path, run = os.path.abspath(data), RunFolder(Path(folder))
    chosen = recipe(preset, **changes) if isinstance(preset, str) else changed(preset, changes)
    chosen = _as_begun(run, chosen)
    options = cohort_options if isinstance(cohort_options, CohortOptions) else CohortOptions(**(cohort_options or {}))
    config = {
        "task": "brain age",
        "data": {"path": path, **_unusual(options)},
        "init": init,
        "split": {"kind": split, "folds": folds, "seed": fold_seed},
        "calibration_fit": calibration_fit,
        "recipe": to_json(chosen),
    }
    with run.locked(compute.group):
        cohort = open_cohort(path, options)
        is_finished = _is_finished(run)
        scans = list(cohort.with_age)
        if not is_finished:
            scans = _trainable(cohort, compute, chosen.preprocessing if check else None)
        _check_resume(run, resume)
        run.open({**config, "scans_and_ages": state_of(scans)}, "auto", compute.group)
        if is_finished:
            compute.say(f"{run.folder} is finished already, nothing is left to learn")
            model = BrainAgeModel.load(run.folder, compute.device)
            _farewell(model, scans, Splits.load(run.folder / "splits.tsv", scans), compute)
            return model
        splits = _splits(run.folder / "splits.tsv", scans, split, folds, fold_seed)
        if chosen.harmonise == "site" and splits.kind == "leave-site-out":
            compute.say("--harmonise site: a site that is left out is not known, so nothing is applied to it")
        learnt = _learn_all(run, chosen, scans, splits, init, Archive.at(cache), compute)
        results = learnt.outputs
        model = _model(learnt, chosen, calibration_fit, Path(path).name, init)
        if compute.group.is_main:
            results.save(run.folder / OUTPUTS)
            model.save(run.final)
        _farewell(model, scans, splits, compute)
    return model


def _is_finished(run: RunFolder) -> bool:
    """Whether nothing is left to do: of a model, the description is written last."""
    return (run.folder / OUTPUTS).is_file() and (run.final / DESCRIPTION).is_file()


def _farewell(model: BrainAgeModel, scans: Sequence[Scan], splits: Splits, compute: Compute) -> None:
    """What came out, and last what makes it look better than it is."""
    raw, worth = model.facts["raw"], model.facts.get("network_worth")
    compute.say(f"held-out people, raw: MAE {raw['mae']:.2f} years, r {raw['r']:.2f}")
    if worth is not None:
        compute.say(f"of what the network adds to the ridge, {worth:.0%} is believed")
    for confound in confounds_among(scans, splits):
        compute.say(f"warning: {confound}")


@dataclass(frozen=True, slots=True)
class _Learnt:
    """All that the folds of a run have learnt."""

    outputs: Outputs
    networks: Mapping[str, torch.nn.Module]
    ridges: Mapping[str, Ridge]
    own_ridges: Mapping[str, OwnRidges]
    likeness: Likeness
    mask_sources: tuple[str, ...]


def _learn_all(
    run: RunFolder,
    chosen: BrainRecipe,
    scans: list[Scan],
    splits: Splits,
    init: str,
    archive: Archive,
    compute: Compute,
) -> _Learnt:
    """Ridges and networks of all folds, and what they answer for all scans."""
    head = age_head(chosen, [scan.age for scan in scans if scan.age is not None])
    volumes = archive.volumes(chosen.preprocessing)
    mask_sources = _prepare(volumes, scans, compute)
    everybody = ScanSet(volumes, scans, chosen.input)
    sign_NS = looked_at(volumes, scans)
    measure_NF = sign_NS[:, : len(MEASURES)] if chosen.has_ridge else None
    ridges, own_ridges, networks, outputs, linear = {}, {}, {}, [], []
    outlook = Outlook(compute, splits.num_folds, 2 if _is_warm(chosen, init, scans) else 1)
    for fold, name in enumerate(splits.fold_names):
        own = _Fold(chosen, head, everybody, splits, fold, init)
        if measure_NF is not None:
            ridges[name], own_ridges[name], own_NF = own.linear(measure_NF)
            over_all_N, width_N = ridges[name].ages(own_NF), ridges[name].width(own_NF)
            added_N = own_ridges[name].added(ridges[name], own_NF, scans)
            linear.append((over_all_N + added_N, over_all_N, width_N))
            told = residuals(ridges[name], own_ridges[name], own_NF, scans, own.learners())
            own = replace(own, everybody=replace(everybody, told=told))
        if chosen.has_network:
            networks[name] = _learn_fold(own, run.folder / "folds" / name, archive, compute, outlook)
            outputs.append(outputs_of(networks[name], every_scan(everybody, compute))[0])
    output_FNK = torch.stack(outputs) if outputs else torch.zeros(splits.num_folds, len(scans), 0)
    results = Outputs(scans, splits, head, output_FNK)
    if measure_NF is not None:
        ridge_FN, over_all_FN, width_FN = torch.tensor(np.array(linear)).unbind(1)
        differs = any(own.own for own in own_ridges.values())
        results = replace(results, ridge_FN=ridge_FN, over_all_FN=over_all_FN if differs else None, width_FN=width_FN)
    return _Learnt(results, networks, ridges, own_ridges, Likeness.fit(sign_NS), mask_sources)


def _as_begun(run: RunFolder, chosen: BrainRecipe) -> BrainRecipe:
    """Goes on with a run of an earlier version as it began: its networks learnt ages, over bins of their own range."""
    if not run.config.is_file():
        return chosen
    begun = read_object(run.config, "choose another folder, or remove this one").get("recipe") or {}
    chosen = chosen if "own_ridges" in begun else replace(chosen, own_ridges="none")
    return chosen if "learns" in begun else replace(chosen, learns="age", ages=None)


def _speaking(compute: Compute) -> Compute:
    """With a console: what is wrong with the data should be read, also by those who call from Python."""
    return compute if compute.console is not None else replace(compute, console=Terminal(stderr=True))


def _unusual(options: CohortOptions) -> Json:
    """The options that are not as they usually are, for config.json."""
    usual = to_json(CohortOptions())
    return {name: value for name, value in to_json(options).items() if value != usual[name]}


def _check_resume(run: RunFolder, resume: str) -> None:
    if resume == "must" and not run.config.is_file():
        raise UserError(f"{run.folder} has no run to go on with: leave out --resume must to start there")
    if resume == "never" and run.config.is_file():
        raise UserError(f"{run.folder} holds a run already: choose another folder, or --resume auto to go on with it")


@dataclass(frozen=True, slots=True)
class _Fold:
    """Who learns what in one fold: the recipe, the head, and the people by their parts."""

    recipe: BrainRecipe
    head: AgeHead
    everybody: ScanSet
    splits: Splits
    number: int
    init: str

    def part(self, name: Part, *, regions: bool = False) -> ScanSet | None:
        """The scans of a part, as they are; None if there are none."""
        selected = self.splits.select(self.everybody.scans, self.number, name)
        return replace(self.everybody, scans=selected, regions=regions) if selected else None

    def training(self) -> ScanSet:
        """The training scans, augmented as the recipe asks."""
        plain = self.part("train")
        if plain is None:
            raise UserError(f"{self.splits.fold_names[self.number]} has nobody to train on: use fewer folds")
        recipe = self.recipe
        return replace(plain, augmentation=recipe.augmentation, seed=recipe.training.seed, variants=recipe.variants)

    def learners(self) -> list[bool]:
        """Which scans are learnt from."""
        return [self.splits.part_of(scan.participant_id, self.number) == "train" for scan in self.everybody.scans]

    def linear(self, measure_NF: Double) -> tuple[Ridge, OwnRidges, Double]:
        """The ridge of the training people, those of their scanners, and the measures that they read."""
        scans, is_learner_N = self.everybody.scans, self.learners()
        train = [scan for scan, is_one in zip(scans, is_learner_N, strict=True) if is_one]
        people, ages = [scan.participant_id for scan in train], [scan.age for scan in train]
        column, offsets = self.recipe.harmonise, {}
        if column is not None:
            offsets = fit_offsets(measure_NF[is_learner_N], train, column)
            measure_NF = without_offsets(measure_NF, [scan.value(column) for scan in scans], offsets)
        ridge = Ridge.fit(measure_NF[is_learner_N], np.array(ages, dtype=np.float64), people)
        columns = scanner_columns(scans, self.recipe.own_ridges)
        own = OwnRidges.fit(ridge, measure_NF[is_learner_N], train, columns)
        return replace(ridge, offsets=offsets), own, measure_NF

    @property
    def has_tissue(self) -> bool:
        """Whether every scan has tissue maps."""
        return all(scan.tissue is not None for scan in self.everybody.scans)


def _is_warm(chosen: BrainRecipe, init: str, scans: Sequence[Scan]) -> bool:
    """Whether region experts learn isolated tissues first."""
    asked = bool(chosen.has_experts and chosen.warm_start_epochs and init == "random")
    return asked and all(scan.tissue is not None for scan in scans)


def _learn_fold(fold: _Fold, folder: Path, archive: Archive, compute: Compute, outlook: Outlook) -> torch.nn.Module:
    """The network of one fold, from its training people alone."""
    chosen, head, training = fold.recipe, fold.head, fold.training()
    name = fold.splits.fold_names[fold.number]
    is_done = is_learnt(folder)
    if is_done:
        compute.say(f"fold {fold.number + 1} of {fold.splits.num_folds} ({name}): learnt already")
        network = build(chosen, head)
    else:
        tested = {scan.participant_id for scan in fold.splits.select(fold.everybody.scans, fold.number, "test")}
        outlook.fold(fold.number, name, len({scan.participant_id for scan in training.scans}), len(tested))
        strangers = _held_out_people(fold.everybody.scans, fold.splits, fold.number)
        network = start(chosen, head, fold.init, archive, compute, training, strangers=strangers)
    wants_warm = bool(chosen.has_experts and chosen.warm_start_epochs and fold.init == "random")
    is_warm = wants_warm and fold.has_tissue
    if is_warm and not is_done:
        outlook.phase(1, "each region expert learns from its own tissue alone")
        regions = Lesson(network, head, replace(training, regions=True))
        network = learn_regions(chosen, regions, folder / "warm-start", compute)
    elif wants_warm and not fold.has_tissue and fold.number == 0:
        compute.say("not every scan has tissue maps: region experts start without a warm start")
    probe = fold.part("test", regions=True) if chosen.has_experts and fold.has_tissue else None
    lesson = Lesson(network, head, training, fold.part("validation"), fold.part("test"), probe)
    if not is_done:
        outlook.phase(outlook.num_phases, "the network learns from whole scans")
    network = learn(chosen.after_warm_start() if is_warm else chosen, lesson, folder, compute)
    if not is_done:
        outlook.learnt()
    return network


def _held_out_people(scans: Sequence[Scan], splits: Splits, fold: int) -> list[str]:
    """Whom the network of a fold must not know: those it is tested on, and those that choose its epoch."""
    strangers = [*splits.select(scans, fold, "test"), *splits.select(scans, fold, "validation")]
    return list(dict.fromkeys(scan.participant_id for scan in strangers))


def _trainable(cohort: Cohort, compute: Compute, check_for: Preprocessing | None) -> list[Scan]:
    """The scans with an age, after everything worth saying has been said and errors have stopped the run."""
    for note in cohort.notes:
        compute.say(note)
    problems = cohort.problems if check_for is None else examine(cohort, check_for).problems
    stop_at_errors(problems)
    for line in grouped(problems):
        compute.say(f"warning: {line}")
    scans = list(cohort.with_age)
    if left_out := len(cohort.scans) - len(scans):
        compute.say(f"{left_out} scans have no age and are left out")
    if len({scan.participant_id for scan in scans}) < 4:
        raise UserError(f"{len(scans)} scans with an age: training needs at least four people")
    return scans


def _splits(path: Path, scans: Sequence[Scan], kind: str, folds: int, seed: int) -> Splits:
    """Those of the run if it has begun, checked against the scans; else new ones, written down."""
    if path.is_file():
        return Splits.load(path, scans)
    if kind not in _SPLITS:
        raise UserError(f"split={kind!r}: use one of {', '.join(_SPLITS)}")
    people = len({scan.participant_id for scan in scans})
    if kind == "leave-site-out" or (kind == "auto" and _has_sites(scans)):
        splits = leave_site_out(scans)
    elif kind == "holdout" or (kind == "auto" and people >= _FEW_PEOPLE):
        splits = holdout(scans, seed)
    else:
        splits = k_folds(scans, folds, seed)
    splits.check(scans)
    splits.save(path)
    return splits


def _has_sites(scans: Sequence[Scan]) -> bool:
    """Whether everybody is of one site, and all of at least two sites have people enough to be left out."""
    sites: dict[str | None, set[str]] = {}
    for scan in scans:
        sites.setdefault(scan.site, set()).add(scan.participant_id)
    is_one_each = sum(map(len, sites.values())) == len({scan.participant_id for scan in scans})
    return len(sites) >= 2 and None not in sites and is_one_each and min(map(len, sites.values())) >= _ENOUGH_AT_A_SITE


def _prepare(volumes: VolumeCache, scans: Sequence[Scan], compute: Compute) -> tuple[str, ...]:
    """Fills the cache; returns where masks came from."""

    def show(done: int, total: int) -> None:
        if done % 25 == 0 or done == total:
            compute.say(f"prepared {done} of {total} scans")

    stop_at_errors(volumes.fill(scans, on_scan=show))
    return tuple(sorted({volumes.volume(scan).mask_source for scan in scans}))


def _model(learnt: _Learnt, chosen: BrainRecipe, calibration_fit: str, data: str, init: str) -> BrainAgeModel:
    results = learnt.outputs
    new = for_new_people(results, fit=calibration_fit)
    known = for_known_people(results, fit=calibration_fit)
    tested = held_out(results, fit=calibration_fit)
    ages = [scan.age for scan in results.scans if scan.age is not None]
    facts = {
        "method": chosen.method,
        "harmonise": chosen.harmonise,
        "data": data,
        "num_people": len({scan.participant_id for scan in results.scans}),
        "num_scans": len(results.scans),
        "split": results.splits.kind,
        "raw": {name: round(value, 4) for name, value in figures(tested.age_N, tested.raw_N).items()},
        "calibration_fit": calibration_fit,
        "interval_coverage": None if tested.coverage != tested.coverage else round(tested.coverage, 4),
        "epochs": chosen.training.epochs,
        "network_worth": round(new.blend.worth, 4) if learnt.ridges and learnt.networks else None,
        "seed": chosen.training.seed,
    }
    return BrainAgeModel(
        networks=learnt.networks,
        head=results.head,
        input=chosen.input,
        preprocessing=chosen.preprocessing,
        patch_size=chosen.patch_size,
        parts=_inherited_parts(init, results) | {hashed_id(who): own for who, own in results.splits.parts.items()},
        age_range=(min(ages), max(ages)),
        mask_sources=learnt.mask_sources,
        calibration=new.calibration,
        calibration_of_fold={fold: own.calibration for fold, own in known.items()},
        temperature=new.temperature,
        facts=facts,
        ridges=learnt.ridges,
        own_ridges=learnt.own_ridges,
        likeness=learnt.likeness,
        blend=new.blend,
        blend_of_fold={fold: own.blend for fold, own in known.items()},
    )


def _inherited_parts(init: str, results: Outputs) -> dict[str, tuple[str, ...]]:
    """People whom another model had learnt from before its networks were the start of these, by hashed id."""
    if init in ("random", "phantom"):
        return {}
    other = BrainAgeModel.load(init)
    folds = range(results.splits.num_folds)
    started = [other.fold_without(_held_out_people(results.scans, results.splits, fold)) for fold in folds]
    positions = [other.folds.index(name) for name in started]
    return {person: tuple(parts[position] for position in positions) for person, parts in other.parts.items()}
