"""One network: built, begun, and learning, isolated tissues first if asked, then whole scans; each stage can go on."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ermoe.brain.ages import AgeBins, AgeHead, AgeRegression
from ermoe.brain.batches import ScanSet, every_scan
from ermoe.brain.data.cache import Archive, VolumeCache
from ermoe.brain.data.cohort import open_cohort
from ermoe.brain.data.phantom import synthesize
from ermoe.brain.data.phantom.anatomy import VERSION as ANATOMY
from ermoe.brain.data.scans import Scan, ScanError
from ermoe.brain.estimation import Lesson
from ermoe.brain.inputs import VERSION
from ermoe.brain.likeness import kept_signs
from ermoe.brain.measures import MEASURES, Double
from ermoe.brain.model import BrainAgeModel
from ermoe.brain.own_ridges import OwnRidges
from ermoe.brain.recipes import CHANNELS, WITHOUT_CUBES, BrainRecipe, reduction
from ermoe.brain.regions import point_prototypes
from ermoe.brain.ridge import MIDDLE, Ridge
from ermoe.brain.rivals.sfcn import SFCN
from ermoe.brain.rivals.swin3d import Swin3D
from ermoe.errors import UserError
from ermoe.files import to_json
from ermoe.models.io import CONFIG, load, load_state
from ermoe.models.upcycle import restart_ffns, upcycle
from ermoe.models.vit3d import ViT3D
from ermoe.train.compute import Compute
from ermoe.train.loop import train
from ermoe.train.run_folder import RunFolder


def age_head(recipe: BrainRecipe, ages: Iterable[float]) -> AgeHead:
    """The head: bins of 0 to 100 years for everybody; without a range, five years beyond these ages and phantoms'."""
    known = [*ages, *recipe.phantoms.ages] if recipe.ages is None else recipe.ages
    if recipe.head == "regression":
        return AgeRegression(mean=sum(known) / len(known), scale=max(1.0, (max(known) - min(known)) / 4))
    low, high = recipe.ages or (5 * math.floor((min(known) - 5) / 5), 5 * math.ceil((max(known) + 5) / 5))
    if recipe.head == "bins-l1":
        return AgeBins(low, high, recipe.step, labels="hard", l1=recipe.l1 or 0.1)
    labels = "cut" if recipe.head == "bins-cut" else "soft"
    return AgeBins(low, high, recipe.step, labels=labels, sigma=recipe.sigma, l1=recipe.l1)


def build(recipe: BrainRecipe, head: AgeHead) -> nn.Module:
    """The network before training; its weights are a function of the seed."""
    seed = recipe.training.seed
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = _dense(recipe, head.num_outputs)
    generator = torch.Generator().manual_seed(seed)
    if recipe.method not in WITHOUT_CUBES:
        restart_ffns(network, generator)
    if not recipe.has_experts:
        return network
    score = "eigenbasis" if recipe.method == "ermoe-context" else "prototype"
    return upcycle(network, init="same", inplace=True, is_new=True, generator=generator, score=score, **recipe.sparsity)


def _dense(recipe: BrainRecipe, num_outputs: int) -> nn.Module:
    common: dict[str, Any] = {"num_classes": num_outputs, "in_chans": CHANNELS[recipe.input]}
    own = recipe.rivals.get(recipe.method, {})
    if recipe.method == "sfcn":
        return SFCN(**common, **own)
    if recipe.method == "swin3d":
        return Swin3D(**common, **own)
    coarser = reduction(recipe.input)
    volume_size = [math.ceil(edge / coarser) for edge in recipe.preprocessing.shape]
    return ViT3D(volume_size, **common, **{**recipe.size, "patch_size": recipe.patch_size // coarser})


def looked_at(volumes: VolumeCache, scans: Sequence[Scan]) -> Double:
    """`SIGNS` of all scans, (N, S), of which the first are `MEASURES`; `ScanError` if one shows no tissues."""
    rows = []
    for scan in scans:
        try:
            rows.append(kept_signs(volumes, scan))
        except ScanError:
            raise
        except UserError as problem:
            raise scan.unusable(f"cannot be measured ({problem})", "look at the scan and its mask") from problem
    return np.array(rows)


def residuals(
    ridge: Ridge, own: OwnRidges, measure_NF: Double, scans: Sequence[Scan], learners: Sequence[bool]
) -> dict[str, float]:
    """What a network is to learn of each scan: the age minus what ridges say without having seen it, around `MIDDLE`.

    ``learners`` are those the ridges were fitted on; ridges fitted without them predict them, since their own residuals
    are too small, and a network that learnt those would believe too little.
    """
    learner_N = np.array(learners)
    age_N = np.array([np.nan if scan.age is None else scan.age for scan in scans])
    said_N = ridge.ages(measure_NF) + own.added(ridge, measure_NF, scans)
    said_N[learner_N] = own.left_out(
        ridge, measure_NF[learner_N], [s for s, o in zip(scans, learners, strict=True) if o]
    )
    told_N = MIDDLE + age_N - said_N
    return {scan.key: float(value) for scan, value in zip(scans, told_N, strict=True)}


def learn_regions(recipe: BrainRecipe, lesson: Lesson, folder: Path, compute: Compute) -> nn.Module:
    """Warm start: region experts learn from their isolated tissues, then ψ is set to the tissues' mean directions."""
    network = learn(recipe.for_regions(), lesson, folder, compute)
    point_prototypes(network, every_scan(lesson.train, compute))
    return network


def learn(recipe: BrainRecipe, lesson: Lesson, folder: Path, compute: Compute) -> nn.Module:
    """The best network by the validation scans of a lesson, without them the last one."""
    if not is_learnt(folder):
        train(recipe, lesson, folder, compute=compute)
    prefer = "final" if lesson.validation is None else "best"
    return load(RunFolder(folder).model(prefer), device=compute.device)


def is_learnt(folder: Path) -> bool:
    """Whether a stage has ended: of its model, the configuration is written last."""
    return (RunFolder(folder).final / CONFIG).is_file()


def phantom_scans(recipe: BrainRecipe, archive: Archive, compute: Compute) -> tuple[Scan, ...]:
    """The synthetic cohort of a recipe, made the first time it is asked for."""
    phantoms, spacing_mm = recipe.phantoms, recipe.preprocessing.spacing_mm
    low, high = phantoms.ages
    name = f"n{phantoms.subjects}-seed{phantoms.seed}-{low:g}to{high:g}y-{spacing_mm:g}mm-{phantoms.ageing}"
    root = archive.folder / "phantoms" / f"{name}-anatomy{ANATOMY}"

    def show(done: int, total: int) -> None:
        if done % 20 == 0 or done == total:
            compute.say(f"phantoms: {done} of {total}")

    draw = partial(synthesize, root, phantoms.subjects, phantoms.seed, on_subject=show)
    draw(ages=phantoms.ages, ageing=phantoms.ageing, spacing_mm=spacing_mm)
    return open_cohort(root).with_age


def learn_phantoms(recipe: BrainRecipe, head: AgeHead, archive: Archive, compute: Compute) -> nn.Module:
    """A network that has learnt the synthetic cohort, warm start included; kept in the archive for the next run."""
    phantoms = recipe.phantoms
    epochs = phantoms.epochs
    training = replace(
        recipe.training, epochs=epochs, evaluate_every=epochs, base_lr=phantoms.base_lr, warmup_epochs=1.0
    )
    own = replace(recipe, training=training)
    folder = archive.folder / "pretrained" / f"{recipe.method}-seed{training.seed}-{_fingerprint(own, head)}"
    with RunFolder(folder).locked(compute.group, wait=True):  # several runs may share an archive
        if is_learnt(folder):
            return load(RunFolder(folder).final, device=compute.device)
        return _learn_phantoms(own, head, folder, archive, compute)


def _learn_phantoms(recipe: BrainRecipe, head: AgeHead, folder: Path, archive: Archive, compute: Compute) -> nn.Module:
    phantoms, seed = recipe.phantoms, recipe.training.seed
    scans = phantom_scans(recipe, archive, compute)
    compute.say(f"learning {len(scans)} phantoms, kept in {folder}")
    whole = ScanSet(
        archive.volumes(recipe.preprocessing),
        scans,
        recipe.input,
        augmentation=recipe.augmentation,
        seed=seed,
        variants=phantoms.variants if recipe.variants else 0,
    )
    if recipe.has_ridge:
        measure_NF, people = looked_at(whole.cache, scans)[:, : len(MEASURES)], [scan.participant_id for scan in scans]
        ridge = Ridge.fit(measure_NF, whole.ages().numpy(), people)
        whole = replace(whole, told=residuals(ridge, OwnRidges(), measure_NF, scans, [True] * len(scans)))
    network = start(recipe, head, "random", archive, compute, whole)
    if recipe.has_experts and recipe.warm_start_epochs:
        regions = Lesson(network, head, replace(whole, regions=True))
        network = learn_regions(recipe, regions, folder / "warm-start", compute)
        recipe = recipe.after_warm_start()
    return learn(recipe, Lesson(network, head, whole), folder, compute)


def _fingerprint(recipe: BrainRecipe, head: AgeHead) -> str:
    parts = {"recipe": to_json(recipe), "head": to_json(head), "input": VERSION, "anatomy": ANATOMY}
    text = json.dumps(parts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def start(
    recipe: BrainRecipe,
    head: AgeHead,
    init: str,
    archive: Archive,
    compute: Compute,
    training: ScanSet,
    *,
    strangers: Sequence[str] = (),
) -> nn.Module:
    """A network to begin with: "random", "phantom", or a fold of another model that has not learnt from ``strangers``.

    One that has learnt nothing yet answers with the ages of ``training``: what is left to find is how people differ
    from the usual age, and the less it finds, the nearer to that it stays.
    """
    if init == "phantom":
        return learn_phantoms(recipe, head, archive, compute)
    network: Any = build(recipe, head)
    if init == "random":
        with torch.no_grad():
            network.head.weight.zero_()
            network.head.bias.copy_(head.prior(training.ages()))
        return network
    other = BrainAgeModel.load(init)
    if (other.head, other.input, other.preprocessing) != (head, recipe.input, recipe.preprocessing):
        raise UserError(f"{init} reads ages or scans in another way: use the same head, bins, input and grid as it")
    load_state(network, other.networks[other.fold_without(strangers)].state_dict(), path=init)
    return network
