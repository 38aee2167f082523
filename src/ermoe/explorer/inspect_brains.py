"""What experts that see brains do: the networks of a model, each on the scans of people it has not learnt from."""

from __future__ import annotations

from contextlib import ExitStack

import torch
from rich.console import Console
from rich.progress import track

from ermoe.analysis.recorder import record_routing
from ermoe.brain.data.cohort import open_scans
from ermoe.brain.model import BrainAgeModel
from ermoe.errors import UserError
from ermoe.explorer.cube_cards import CubeCards
from ermoe.explorer.cubes import cubes_of
from ermoe.explorer.inspection import Inspection
from ermoe.explorer.places import model_names
from ermoe.files import StrPath
from ermoe.nn import moe_layers


def of_brains(
    folder: str, data: StrPath, *, device: torch.device | str = "cpu", console: Console | None = None
) -> tuple[dict[str, Inspection], str, int]:
    """What is known of every network that may judge somebody, by name; what the scans are, and their number."""
    model = BrainAgeModel.load(folder, device)
    (name,) = model_names([folder])
    if not any(moe_layers(network) for network in model.networks.values()):
        raise UserError(
            f"{name} has no mixture-of-experts layer to look into: train a preset with experts, such as small-ermoe"
        )
    scans = open_scans([data]).scans
    cards: dict[str, CubeCards] = {}
    with ExitStack() as recording:
        recorders = {fold: recording.enter_context(record_routing(own)) for fold, own in model.networks.items()}
        for scan in track(scans, name, console=console, transient=True, disable=console is None):
            cubes = cubes_of(scan, model)
            for fold in cubes.folds:
                if fold not in cards:
                    cards[fold] = CubeCards(model.networks[fold], cubes.grid, model.patch_size)
                cards[fold].add(cubes)
    found = {}
    for fold in (fold for fold in model.networks if fold in cards):
        own_name = name if len(model.networks) == 1 else f"{name}, network {fold}"
        found[own_name] = Inspection(recorders[fold], None, cards=cards[fold])
    return found, f"{len(scans)} scans", len(scans)
