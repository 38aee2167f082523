"""Do region experts keep their tissue? Warm start, swapped names and no warm start on a phantom cohort.

Each variant: region experts learn from isolated tissues with forced routing, ψ is set to the tissues' mean directions,
then at least ten epochs of whole brains with free routing and ψ trainable. The probe shows held-out people with one
tissue retained: mean plain scores over cubes that contain it, at the last expert layer, without offsets.

    python benchmarks/brain_regions.py [--subjects 240] [--epochs 10] [--inputs blocks t1] [--base-lr 1e-3] [--seeds 3]

A seed stands for another split of the cohort, another network and another order of learning. A queue that resumes: one
JSON a variant and seed.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import tyro
from rich.console import Console

from ermoe.brain.batches import ScanSet, every_scan
from ermoe.brain.data.cache import Archive
from ermoe.brain.data.scans import TISSUES
from ermoe.brain.data.splits import holdout
from ermoe.brain.estimation import Lesson
from ermoe.brain.learning import learn, learn_regions, phantom_scans
from ermoe.brain.learning import start as begin
from ermoe.brain.recipes import Recipe, recipe
from ermoe.brain.regions import RegionProbe, probe_regions
from ermoe.files import replacing
from ermoe.plain import to_json
from ermoe.studies.bench.record import commit, machine, versions
from ermoe.train.compute import Compute
from ermoe.train.run_folder import read_lines

RESULTS = Path(__file__).parent / "results" / "brain_regions"
SWAPPED = (1, 2, 0)
"""The tissue that is shown under each name: grey matter as "wm", fluid as "gm", white matter as "csf"."""
VARIANTS = ("warm start", "swapped names", "no warm start")


@dataclass(frozen=True)
class Study:
    """Train every variant on phantoms and probe it."""

    out: Path = RESULTS
    runs: Path = Path("runs/brain-regions")
    cache: Path | None = None
    subjects: int = 240
    epochs: int = 10
    warm_start_epochs: int = 5
    inputs: tuple[str, ...] = ("blocks",)
    """"t1": T1 × tissue, normalised inside it, as the paper isolates regions. "blocks": the small preset's input."""
    base_lr: float = 1e-3
    """Of the unforced epochs: a tenth of the warm start's."""
    layer_decay: float = 1.0
    """Of the unforced epochs: below 1, the first layers, whose change moves the tokens of all tissues alike, are the
    slowest."""
    preset: str = "small"
    seeds: int = 3
    threads: int = 2


def main() -> None:
    study = tyro.cli(Study)
    torch.set_num_threads(study.threads)
    console = Console()
    jobs = itertools.product(range(study.seeds), study.inputs, VARIANTS)
    records = [run(study, kind, variant, seed, console) for seed, kind, variant in jobs]
    console.print(table(records), highlight=False, soft_wrap=True)


def chosen_recipe(study: Study, kind: str, seed: int) -> Recipe:
    """The preset, trained from the start on whole phantoms."""
    changes = {"epochs": study.epochs, "warm_start_epochs": study.warm_start_epochs, "seed": seed}
    chosen = recipe(study.preset, "ermoe", input=kind, volumes_per_epoch=0, evaluate_every=1, **changes)
    phantoms = replace(chosen.phantoms, subjects=study.subjects)
    return replace(chosen, phantoms=phantoms)


def run(study: Study, kind: str, variant: str, seed: int, console: Console) -> dict[str, Any]:
    """One variant: trained, or read if it is there."""
    start_name = f"{kind}-{variant.replace(' ', '-')}-seed-{seed}"
    name = f"{start_name}-rate-{study.base_lr:g}-decay-{study.layer_decay:g}"
    path = study.out / f"{name}.json"
    if path.is_file():
        return dict(json.loads(path.read_text()))
    console.rule(name)
    start = time.perf_counter()
    chosen = chosen_recipe(study, kind, seed)
    archive, compute = Archive.at(study.cache), Compute(console=console)
    scans = phantom_scans(chosen, archive, compute)
    splits = holdout(scans, seed)
    volumes = archive.volumes(chosen.preprocessing)
    train, test = (ScanSet(volumes, splits.select(scans, 0, part), kind) for part in ("train", "test"))
    train = replace(train, augmentation=chosen.augmentation, seed=seed, variants=1)
    probe = replace(test, regions=True)
    head = chosen.age_head([])
    network = begin(chosen, head, "random", archive, compute, train.ages())
    folder = study.runs / name
    if variant != "no warm start":
        regions = replace(train, regions=True, swapped=SWAPPED if variant == "swapped names" else None)
        lesson = Lesson(network, head, regions)
        network = learn_regions(chosen, lesson, study.runs / start_name / "warm-start", compute)
    probes = {"before": probe_regions(network, every_scan(probe))}
    rates = {"base_lr": study.base_lr, "layer_decay": study.layer_decay}
    gentle = replace(chosen, training=replace(chosen.training, **rates))
    network = learn(gentle, Lesson(network, head, train, watched=test, probe=probe), folder, compute)
    probes[f"after {study.epochs} epochs"] = probe_regions(network, every_scan(probe))
    record = {
        "variant": variant,
        "input": kind,
        "seed": seed,
        "command": f"python benchmarks/brain_regions.py --subjects {study.subjects} --epochs {study.epochs} "
        f"--base-lr {study.base_lr:g} --layer-decay {study.layer_decay:g}",
        "people": {"train": len(train.scans), "held out": len(test.scans)},
        "probes": {when: found.as_json() for when, found in probes.items()},
        "own_first": {when: own_first(found, variant) for when, found in probes.items()},
        "held_out_mae": [line["test_mae"] for line in read_lines(folder / "metrics.jsonl") if "test_mae" in line],
        "wall_seconds": round(time.perf_counter() - start, 1),
        "threads": study.threads,
        "commit": commit(),
        "machine": machine(),
        "versions": versions(),
        "recipe": to_json(gentle),
    }
    with replacing(path) as draft:
        draft.write_text(json.dumps(record, indent=1, ensure_ascii=False, default=list) + "\n")
    return record


def own_first(found: RegionProbe, variant: str) -> dict[str, bool]:
    """Whether each tissue scores highest with the expert that was taught it."""
    taught = SWAPPED if variant == "swapped names" else (0, 1, 2)
    return {TISSUES[tissue]: found.first[tissue] == expert for expert, tissue in enumerate(taught)}


def table(records: list[dict[str, Any]]) -> str:
    """In Markdown: how many of the three tissues score highest with the expert that was taught them, seed by seed, and
    the mean error of held-out people."""
    lines = [
        "| input | variant | after the warm start | after free epochs | years, first free epoch | years, last |",
        "| :-- | :-- | --: | --: | --: | --: |",
    ]
    kinds = dict.fromkeys((record["input"], record["variant"]) for record in records)
    for kind in kinds:
        seeds = [record for record in records if (record["input"], record["variant"]) == kind]
        kept = [[sum(found.values()) for found in record["own_first"].values()] for record in seeds]
        before, after = (", ".join(map(str, counts)) for counts in zip(*kept, strict=True))
        first, last = (statistics.fmean(record["held_out_mae"][epoch] for record in seeds) for epoch in (0, -1))
        lines.append(f"| {' | '.join(kind)} | {before} of 3 | {after} of 3 | {first:.1f} | {last:.1f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
