"""Supplement 13: expert choice as a further baseline."""

from __future__ import annotations

from collections.abc import Sequence

from ermoe.studies.figures import cell, figures_of, verdict
from ermoe.studies.paper import imagenet, images
from ermoe.studies.paper.images import LABELS, OFFSETS, PAPER_RULE
from ermoe.studies.paper.study import Findings, Record, Setup, Study, every

PAPER = {"expert-choice": "78.95", PAPER_RULE: "88.03", OFFSETS: "–"}


def findings(setup: Setup, records: Sequence[Record]) -> Findings:
    """A row for each method."""
    rows = [[LABELS[m], paper, cell(figures_of(records, m, "top1"))] for m, paper in PAPER.items()]
    ours = {method: figures_of(records, method, "top1") for method in PAPER}
    words = {"larger": "ERMoE", "smaller": "expert choice", "what": "top-1", "form": ".1%"}
    sentence = verdict(ours[PAPER_RULE], ours["expert-choice"], **words)
    return Findings(["method", "paper: top-1", "top-1"], rows, [sentence])


STUDY = Study(
    "expert-choice",
    "accuracy of expert choice beside ERMoE",
    "ImageNet, the settings of Table 1; 9.1 points between the two.",
    images.describe,
    every(PAPER, imagenet.train),
    findings,
)
