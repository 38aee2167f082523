"""How a cohort is to be read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ermoe.brain.data.identity import prefixed
from ermoe.brain.data.problems import Problem
from ermoe.brain.data.scans import Sex
from ermoe.errors import UserError

TissueFrom = Literal["probseg", "dseg", "aseg", "none"]


@dataclass(frozen=True, slots=True)
class CohortOptions:
    """The options of `open_cohort`, checked."""

    sex_coding: Mapping[str, Sex] = field(default_factory=dict)
    age_is_baseline: bool = False
    tissue_from: TissueFrom | None = None
    participants: tuple[str, ...] | None = None
    exclude: tuple[str, ...] = ()
    t1_rule: str = "first"

    def __post_init__(self) -> None:
        if self.tissue_from not in (None, "probseg", "dseg", "aseg", "none"):
            raise UserError(f"tissue_from={self.tissue_from!r}: use probseg, dseg, aseg or none")
        if not self.t1_rule:
            raise UserError("t1_rule='': use first, last or a pattern for file names such as '*acq-mprage*'")

    def wants(self, participant_id: str) -> bool:
        """Whether a person is to be read."""
        return (self.participants is None or participant_id in self.participants) and participant_id not in self.exclude

    def concerns(self, problem: Problem) -> bool:
        """Whether a problem is about somebody who is to be read, or about nobody in particular."""
        if problem.subject is None:
            return True
        # The subject of a problem is a person, or a session of one.
        return self.wants(problem.subject.split("_ses-")[0])


def participant_labels(labels: Sequence[str] | None) -> tuple[str, ...] | None:
    """Labels with their prefix, as BIDS apps take them with or without.

    >>> participant_labels(["01", "sub-02"])
    ('sub-01', 'sub-02')
    """
    return None if labels is None else tuple(prefixed(label.strip()) for label in labels)
