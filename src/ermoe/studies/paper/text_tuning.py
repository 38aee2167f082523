"""Supplement 14: whether tuning the text tower helps to find images by text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ermoe.studies.figures import cell, figures_of, verdict
from ermoe.studies.paper import captions
from ermoe.studies.paper.study import Findings, Job, Record, Setup, Study

PROTOCOL = "coco-karpathy-5k"
ROWS = {"frozen": ("49.1", "73.8", "82.4"), "tuned": ("50.3", "74.0", "82.6")}
_CUTS = ("t2i_r1", "t2i_r5", "t2i_r10")
_METHOD = "ermoe-none"


def jobs(setup: Setup) -> list[Job]:
    """The paper's rule with either text tower; the frozen ones are Table 3's."""
    chosen = captions.protocol_for(setup, PROTOCOL)
    work = partial(captions.measure, setup, "coco", chosen, _METHOD)
    return [Job(row, seed, partial(work, seed, tuned=row == "tuned")) for seed in setup.each_seed() for row in ROWS]


def findings(setup: Setup, records: Sequence[Record]) -> Findings:
    """A row for each text tower."""
    header = ["text tower"]
    for cut in _CUTS:
        header += [f"paper: {cut.upper().replace('_', ' ')}", cut.upper().replace("_", " ")]
    rows = []
    for row, quoted in ROWS.items():
        ours = [cell(figures_of(records, row, "figures", cut), ".1%") for cut in _CUTS]
        rows.append([row, *(value for pair in zip(quoted, ours, strict=True) for value in pair)])
    tuned, frozen = (figures_of(records, row, "figures", "t2i_r1") for row in ("tuned", "frozen"))
    sentences = [
        verdict(tuned, frozen, larger="the tuned tower", smaller="the frozen one", what="T2I R1", form=".1%"),
        "The paper's figures are of Fix-CLIP, not of ERMoE; ours are of CLIP-ERMoE.",
    ]
    return Findings(header, rows, sentences)


STUDY = Study(
    "text-tuning",
    "text-to-image recall with a frozen and with a tuned text tower",
    "Fix-CLIP on COCO, text tower frozen and tuned.",
    partial(captions.describe, "coco", PROTOCOL),
    jobs,
    findings,
)
