"""Are regions worth a network, and do region experts keep their tissue? Phantoms that age in one region alone.

Each variant: region experts learn from isolated tissues with forced routing, ψ is set to the tissues' mean directions,
then at least ten epochs of whole brains with free routing and ψ trainable. The probe shows held-out people with one
tissue retained: mean plain scores over cubes that contain it, at the last expert layer, without offsets.

    python benchmarks/brain_regions.py [--subjects 240] [--epochs 16] [--inputs blocks t1] [--base-lr 3e-3]
        [--seeds 0 1 2] [--ageing everywhere]

The network alone learns ages here, without the ridge; a ridge on the measures of the same training people stands
beside it. Age shows in the front of the brain at equal shares of the whole, unless ``--ageing everywhere``.

A seed stands for another split of the cohort, another network and another order of learning. A queue that resumes: a
line a variant and seed in benchmarks/results/brain_regions.jsonl.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import tyro
from rich.console import Console

from ermoe.brain.batches import ScanSet, every_scan
from ermoe.brain.data.cache import Archive, VolumeCache
from ermoe.brain.data.scans import TISSUES, Scan
from ermoe.brain.data.splits import holdout
from ermoe.brain.estimation import Lesson
from ermoe.brain.learning import age_head, learn, learn_regions, looked_at, phantom_scans
from ermoe.brain.learning import start as begin
from ermoe.brain.measures import MEASURES
from ermoe.brain.recipes import BrainRecipe, recipe
from ermoe.brain.regions import RegionProbe, expert_name, probe_regions
from ermoe.brain.ridge import Ridge
from ermoe.files import to_json
from ermoe.studies.record import Job, Record, run_queue
from ermoe.studies.tables import Show, Table, one_row_a_name
from ermoe.train.compute import Compute
from ermoe.train.run_folder import read_lines

RESULTS = Path(__file__).parent / "results"
SWAPPED = (1, 2, 0)
"""The tissue that is shown under each name: grey matter as "wm", fluid as "gm", white matter as "csf"."""
VARIANTS = ("warm start", "swapped names", "no warm start")


@dataclass(frozen=True)
class Options:
    """Train every variant on phantoms and probe it."""

    out: Path = RESULTS
    runs: Path = Path("runs/brain-regions")
    cache: Path | None = None
    subjects: int = 240
    epochs: int = 16
    warm_start_epochs: int = 5
    inputs: tuple[str, ...] = ("blocks",)
    """"t1": T1 × tissue, normalised inside it, as the paper isolates regions. "blocks": the small preset's input."""
    base_lr: float = 3e-3
    """Of the unforced epochs: three tenths of the warm start's, as the preset has it."""
    layer_decay: float = 0.5
    """Of the unforced epochs: below 1, the first layers, whose change moves the tokens of all tissues alike, are the
    slowest."""
    ageing: Literal["everywhere", "frontal"] = "frontal"
    """Where age shows."""
    variants: tuple[str, ...] = VARIANTS
    preset: str = "medium"
    seeds: tuple[int, ...] = (0, 1, 2)
    threads: int = 2


def main() -> None:
    options = tyro.cli(Options)
    torch.set_num_threads(options.threads)
    console = Console()
    jobs = [
        job(options, kind, variant, seed, console)
        for seed, kind, variant in itertools.product(options.seeds, options.inputs, options.variants)
    ]
    records = run_queue("brain_regions", jobs, options.out / "brain_regions.jsonl", console=console)
    console.print(table(records).markdown(), highlight=False, soft_wrap=True)


def job(options: Options, kind: str, variant: str, seed: int, console: Console) -> Job:
    """One run, named by everything that runs of a seed differ in."""
    rates = {"base_lr": options.base_lr, "layer_decay": options.layer_decay}
    settings = {"input": kind, "variant": variant, **rates, "subjects": options.subjects, "epochs": options.epochs}
    name = f"{kind}, {variant}, rate {options.base_lr:g}, decay {options.layer_decay:g}"
    if options.ageing != "everywhere":
        name, settings = f"{options.ageing}, {name}", {**settings, "ageing": options.ageing}
    return Job(name, seed, partial(figures_of_run, options, kind, variant, seed, console), settings)


def chosen_recipe(options: Options, kind: str, seed: int) -> BrainRecipe:
    """The preset, trained from the start on whole phantoms."""
    changes = {"epochs": options.epochs, "warm_start_epochs": options.warm_start_epochs, "seed": seed}
    chosen = recipe(options.preset, "ermoe", input=kind, volumes_per_epoch=0, evaluate_every=1, **changes)
    phantoms = replace(chosen.phantoms, subjects=options.subjects, ageing=options.ageing)
    return replace(chosen, phantoms=phantoms)


def figures_of_run(options: Options, kind: str, variant: str, seed: int, console: Console) -> dict[str, Any]:
    """One variant: taught, probed, trained on, probed again."""
    start_name = f"{options.ageing}-{kind}-{variant.replace(' ', '-')}-seed-{seed}"
    folder = options.runs / f"{start_name}-rate-{options.base_lr:g}-decay-{options.layer_decay:g}"
    chosen = chosen_recipe(options, kind, seed)
    archive, compute = Archive.at(options.cache), Compute(console=console)
    scans = phantom_scans(chosen, archive, compute)
    splits = holdout(scans, seed)
    volumes = archive.volumes(chosen.preprocessing)
    train, test = (ScanSet(volumes, splits.select(scans, 0, part), kind) for part in ("train", "test"))
    train = replace(train, augmentation=chosen.augmentation, seed=seed, variants=1)
    probe = replace(test, regions=True)
    head = age_head(chosen, [])
    network = begin(chosen, head, "random", archive, compute, train)
    if variant != "no warm start":
        regions = replace(train, regions=True, swapped=SWAPPED if variant == "swapped names" else None)
        lesson = Lesson(network, head, regions)
        network = learn_regions(chosen, lesson, options.runs / start_name / "warm-start", compute)
    probes = {"before": probe_regions(network, every_scan(probe))}
    rates = {"base_lr": options.base_lr, "layer_decay": options.layer_decay}
    gentle = replace(chosen, training=replace(chosen.training, **rates))
    network = learn(gentle, Lesson(network, head, train, watched=test, probe=probe), folder, compute)
    probes[f"after {options.epochs} epochs"] = probe_regions(network, every_scan(probe))
    return {
        "people": {"train": len(train.scans), "held out": len(test.scans)},
        "probes": {when: as_json(found) for when, found in probes.items()},
        "own_first": {when: own_first(found, variant) for when, found in probes.items()},
        "ridge_mae": ridge_error(volumes, train.scans, test.scans),
        "held_out_mae": [line["test_mae"] for line in read_lines(folder / "metrics.jsonl") if "test_mae" in line],
        "recipe": to_json(gentle),
    }


def ridge_error(volumes: VolumeCache, train: Sequence[Scan], test: Sequence[Scan]) -> float:
    """Mean absolute error, in years, of a ridge on the measures of the same people."""
    known_NF, asked_NF = (looked_at(volumes, scans)[:, : len(MEASURES)] for scans in (train, test))
    known_N, asked_N = (np.array([scan.age for scan in scans], dtype=np.float64) for scans in (train, test))
    ridge = Ridge.fit(known_NF, known_N, [scan.participant_id for scan in train])
    return float(np.abs(ridge.ages(asked_NF) - asked_N).mean())


def as_json(found: RegionProbe) -> dict[str, Any]:
    """Scores, tokens, and the two best experts of each tissue."""
    best = {}
    for tissue, score_E in zip(TISSUES, found.score_RE, strict=True):
        order = score_E.argsort(descending=True, stable=True)[:2].tolist()
        best[tissue] = [(expert_name(expert), float(score_E[expert])) for expert in order]
    score = [[round(value, 4) for value in row] for row in found.score_RE.tolist()]
    return {"score": score, "num_tokens": list(found.num_tokens), "top": best}


def own_first(found: RegionProbe, variant: str) -> dict[str, bool]:
    """Whether each tissue scores highest with the expert that was taught it."""
    taught = SWAPPED if variant == "swapped names" else (0, 1, 2)
    return {TISSUES[tissue]: found.first[tissue] == expert for expert, tissue in enumerate(taught)}


def table(records: list[Record], labels: Mapping[str, str] | None = None) -> Table:
    """How many of the three tissues score highest with the expert that was taught them, seed by seed, and the mean
    error of held-out people."""
    columns: dict[str, Show] = {
        "after the warm start": lambda runs: f"{', '.join(str(kept(run)[0]) for run in runs)} of 3",
        "after free epochs": lambda runs: f"{', '.join(str(kept(run)[1]) for run in runs)} of 3",
        "error of the probed people, years": lambda runs: ", ".join(error([run], -1) for run in runs),
        "of a ridge": lambda runs: ", ".join(f"{run['figures']['ridge_mae']:.1f}" for run in runs),
    }
    return one_row_a_name(
        records, "input, variant, rate and its decay by layer" if labels is None else "", columns, labels
    )


def kept(record: Record) -> list[int]:
    """How many tissues score highest with their own expert, before and after the free epochs."""
    return [sum(found.values()) for found in record["figures"]["own_first"].values()]


def error(runs: Sequence[Record], epoch: int, style: str = ".1f") -> str:
    """Of held-out people, in the mean over seeds."""
    return f"{statistics.fmean(run['figures']['held_out_mae'][epoch] for run in runs):{style}}"


if __name__ == "__main__":
    main()
