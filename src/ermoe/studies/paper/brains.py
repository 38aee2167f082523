"""What the brain-age studies share: a phantom cohort or a real one, and runs trained once for all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.progress import Progress

from ermoe.brain.data.cohort import open_cohort
from ermoe.brain.data.phantom import synthesize
from ermoe.brain.evaluation import Evaluation
from ermoe.brain.run import train
from ermoe.errors import UserError
from ermoe.studies.paper.study import Setup, slug

METHODS = {"sfcn": "3D CNN", "vit3d": "3D ViT", "swin3d": "3D Swin", "ermoe": "ERMoE-ba"}
PEOPLE = 60
"""Phantoms at mini scale."""
# Phantoms vary enough by themselves: augmented as well, so few of them teach nothing in so short a time.
_MINI: dict[str, Any] = {"epochs": 16, "volumes_per_epoch": 96, "batch_size": 8, "base_lr": 0.05, "warmup_epochs": 1.0}
_MINI["augmentation"] = None


def place_of(setup: Setup) -> str:
    """--data, or a phantom cohort that is made once."""
    if setup.data is not None:
        return setup.data
    if setup.is_full:
        raise UserError("--scale full wants a real cohort: name its BIDS folder with --data")
    root = setup.work / "phantoms"
    if not (root / "participants.tsv").is_file():
        with Progress(console=setup.console, transient=True) as progress:
            bar = progress.add_task("making phantoms", total=PEOPLE)
            synthesize(root, PEOPLE, spacing_mm=4.0, on_subject=lambda done, _: progress.update(bar, completed=done))
    return str(root)


def describe(setup: Setup) -> str:
    """Cohort and recipe, in a sentence."""
    cohort = open_cohort(place_of(setup))
    people = len({scan.participant_id for scan in cohort.with_age})
    kind = "phantoms, whose age effects are designed in" if setup.data is None else "people"
    sizes = {True: "the paper's sizes, 300 epochs", False: "a small 3D transformer"}
    small = "32 × 40 × 32 voxels of 6 mm, width 32" if setup.data is None else "96 × 112 × 96 voxels of 2 mm, width 64"
    size = sizes[setup.is_full] + ("" if setup.is_full else f" ({small})")
    return f"{slug(place_of(setup))}: {people} {kind}; {size}; {setup.in_seeds}; everybody tested by a fold."


def trained(setup: Setup, method: str, seed: int) -> Path:
    """The run folder of a method: folds by person on a small cohort, 8:1:1 on a large one."""
    preset = "paper" if setup.is_full else "small" if setup.data is not None else "tiny"
    changes: dict[str, Any] = {"seed": seed, **(_MINI if preset == "tiny" else {})}
    place = place_of(setup)
    changes |= {} if setup.epochs is None else {"epochs": setup.epochs}
    folder = setup.trained(slug(place)) / f"brain-{method}-{seed}"
    if not (folder / "outputs.safetensors").is_file():
        train(
            place,
            folder,
            preset=preset,
            method=method,
            folds=3 if preset == "tiny" else 5,
            cache=setup.work / "volumes",
            check=False,
            compute=setup.compute(),
            **changes,
        )
    return folder


def evaluation(setup: Setup, method: str, seed: int, *, calibration_fit: str = "held-out") -> Evaluation:
    """A finished run, read back."""
    folder = trained(setup, method, seed)
    return Evaluation.read(folder, cache=setup.work / "volumes", calibration_fit=calibration_fit)
