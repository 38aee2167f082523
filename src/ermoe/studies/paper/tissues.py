"""Table 6 and Figure S1: which experts tissues choose when a scan shows nothing else, early and late in training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from ermoe.brain.regions import TISSUES, expert_name
from ermoe.brain.reporting.pictures import tissues_by_experts
from ermoe.errors import UserError
from ermoe.studies.figures import Runs, mean
from ermoe.studies.paper import brains
from ermoe.studies.paper.setup import Setup
from ermoe.studies.paper.study import Findings, every, study
from ermoe.studies.record import Record
from ermoe.train.run_folder import RunFolder, read_lines

_TABLE_6 = {
    "wm": ("free_expert1 0.21, free_expert3 0.13", "wm_expert 0.87, free_expert1 0.21"),
    "gm": ("free_expert0 0.15, free_expert1 0.13", "gm_expert 0.79, wm_expert 0.54"),
    "csf": ("free_expert4 0.17, free_expert2 0.17", "csf_expert 0.91, gm_expert 0.47"),
}
_PREFIX = "probe/"


def probe(setup: Setup, method: str, seed: int) -> dict[str, Any]:
    """Mean scores of tissues and experts at the last layer, by epoch, over folds."""
    folder = brains.trained(setup, method, seed)
    found: dict[str, list[dict[str, float]]] = {}
    for fold in sorted((folder / "folds").iterdir()):
        lines = [line for line in read_lines(RunFolder(fold).metrics) if line["kind"] == "test"]
        probed = [line for line in lines if any(name.startswith(_PREFIX) for name in line)]
        for number, line in enumerate(probed):
            when = ("first", "middle", "last")[min(number, 2)] if number < len(probed) - 1 else "last"
            found.setdefault(when, []).append({k: v for k, v in line.items() if k.startswith(_PREFIX)})
    if not found:
        raise UserError(f"{folder} has no region probes: give the scans tissue maps, see docs/reference/brain-scans.md")
    return {when: {name: mean([line[name] for line in lines]) for name in lines[0]} for when, lines in found.items()}


def _scores(records: Sequence[Record], when: str, tissue: str) -> dict[str, float]:
    """Mean score of every expert for a tissue over seeds, best first."""
    start = f"{_PREFIX}{tissue}/"
    known = [record["figures"].get(when, {}) for record in records]
    names = [name for name in known[0] if name.startswith(start)]
    values = {name.removeprefix(start): mean([figures[name] for figures in known]) for name in names}
    return dict(sorted(values.items(), key=lambda item: -item[1]))


@study(
    "experts that isolated tissues choose at the last layer",
    "ADNI scans with one tissue left, at epochs 1, 5 and 300.",
    brains.describe,
    every(["ermoe"], probe),
)
def region_routing(runs: Runs) -> Findings:
    """The two best experts of every tissue, early and late."""
    header = ["tissue", "paper: epoch 1", "first probe", "paper: epoch 300", "last probe"]
    rows = []
    for tissue in TISSUES:
        cells = []
        for when, quoted in zip(("first", "last"), _TABLE_6[tissue], strict=True):
            best = list(_scores(runs.records, when, tissue).items())[:2]
            cells += [quoted, ", ".join(f"{name} {value:.2f}" for name, value in best)]
        rows.append([tissue, *cells])
    early, late = (_own_first(runs.records, when) for when in ("first", "last"))
    sentences = [
        f"At the last probe {late} of 3 tissues score highest with their own expert; the paper has 3 of 3.",
        f"At the first probe it is {early} of 3: region experts start from their tissues here. The paper, whose region "
        "experts are pre-trained too, has free experts ahead at epoch 1.",
    ]
    return Findings(header, rows, sentences, _maps(runs.records))


def _own_first(records: Sequence[Record], when: str) -> int:
    """How many tissues score highest with their own expert."""
    return sum(next(iter(_scores(records, when, tissue)), "") == f"{tissue}_expert" for tissue in TISSUES)


def _maps(records: Sequence[Record]) -> Figure:
    panels = {}
    for when in ("first", "middle", "last"):
        if records[0]["figures"].get(when):
            scores = [_scores(records, when, tissue) for tissue in TISSUES]
            panels[f"{when} probe"] = np.array([[own[expert_name(e)] for e in range(len(own))] for own in scores])
    return tissues_by_experts(panels, highest=1.0)
