"""One T1 scan: what is known about it, what may be wrong with it, and whose it is."""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from ermoe.errors import UserError

Tissue = Literal["wm", "gm", "csf"]
Sex = Literal["M", "F", "other"]

TISSUES: tuple[Tissue, ...] = ("wm", "gm", "csf")
"""The order of tissues everywhere: experts, channels, columns."""

SEX_WORDS: dict[str, Sex] = {
    "m": "M", "male": "M", "man": "M", "boy": "M",
    "f": "F", "female": "F", "woman": "F", "girl": "F", "w": "F",
    "o": "other", "other": "other", "intersex": "other", "x": "other", "nonbinary": "other", "non-binary": "other",
}  # fmt: skip
"""How tables spell sexes."""


@dataclass(frozen=True, slots=True)
class Segmentation:
    """A discrete segmentation and the numbers that stand for each tissue in it."""

    path: Path
    codes: Mapping[Tissue, tuple[int, ...]]
    same_grid: bool = True
    """Whether it must lie on the voxel grid of the T1. FreeSurfer's volumes lie on a grid of their own."""


@dataclass(frozen=True, slots=True)
class ProbabilityMaps:
    """One map in [0, 1] for each tissue."""

    paths: Mapping[Tissue, Path]


TissueSource = Segmentation | ProbabilityMaps


@dataclass(frozen=True, slots=True)
class Scan:
    """One T1 scan of one person.

    >>> Scan("sub-01", "ses-2", Path("sub-01_ses-2_T1w.nii.gz")).key
    'sub-01_ses-2'
    """

    participant_id: str
    """With its prefix: "sub-01"."""
    session_id: str | None
    """With its prefix, "ses-2", or None where there are no sessions."""
    t1: Path
    age: float | None = None
    """Years at the time of this scan."""
    sex: Sex | None = None
    """None where the table says n/a; both None and "other" are groups of their own."""
    site: str | None = None
    columns: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """All further columns of the table, for example batch."""
    mask: Path | None = None
    """A brain mask on the grid of the T1, from a derivative."""
    labels: Path | None = None
    """A segmentation on the grid of the T1; whatever is above 0 in it is brain, also if its codes are unknown."""
    tissue: TissueSource | None = None

    @property
    def key(self) -> str:
        """Participant and session, as in BIDS file names."""
        return "_".join(part for part in (self.participant_id, self.session_id) if part)


Severity = Literal["error", "warning"]


@dataclass(frozen=True, slots=True)
class Problem:
    """One finding. An error stops a training run before it starts; a warning is counted and shown.

    >>> print(Problem("error", "sub-01", Path("a.nii.gz"), "holds NaN", remedy="replace it by 0"))
    sub-01: a.nii.gz holds NaN: replace it by 0
    """

    severity: Severity
    subject: str | None
    """Key of the scan or id of the participant; None when it is about a whole table."""
    path: Path | None
    what: str
    remedy: str = ""

    def __str__(self) -> str:
        subject = f"{self.subject}: " if self.subject else ""
        place = f"{self.path} " if self.path else ""
        remedy = f": {self.remedy}" if self.remedy else ""
        return f"{subject}{place}{self.what}{remedy}"


class ScanError(UserError):
    """One scan cannot be used. `predict` makes a row of it, training stops."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem


def stop_at_errors(problems: Sequence[Problem], *, shown: int = 20) -> None:
    """Raises `UserError` with every error among ``problems``, one a line; warnings pass."""
    errors = [problem for problem in problems if problem.severity == "error"]
    if not errors:
        return
    rest = [f"… and {len(errors) - shown} more"] if len(errors) > shown else []
    listed = "\n".join(f"  {line}" for line in [*map(str, errors[:shown]), *rest])
    raise UserError(f"{len(errors)} error{'s' if len(errors) > 1 else ''} in the data, to be mended first:\n{listed}")


_PREFIX = "sub-"


def canonical_id(participant_id: str) -> str:
    """What all spellings of an id have in common.

    >>> [canonical_id(spelling) for spelling in ("sub-007", "SUB-7 ", "07", "sub-IXI012")]
    ['7', '7', '7', 'ixi12']
    """
    bare = re.sub(r"\s+", "", unicodedata.normalize("NFKC", participant_id)).casefold().removeprefix(_PREFIX)
    return re.sub(r"\d+", lambda digits: str(int(digits[0])), bare)


def look_alikes(participant_ids: Iterable[str]) -> list[tuple[str, ...]]:
    """Groups of different spellings of what may be one person.

    >>> look_alikes(["sub-01", "sub-1", "sub-02", "sub-02"])
    [('sub-01', 'sub-1')]
    """
    spellings: dict[str, set[str]] = defaultdict(set)
    for participant_id in participant_ids:
        spellings[canonical_id(participant_id)].add(participant_id)
    return sorted(tuple(sorted(group)) for group in spellings.values() if len(group) > 1)


def prefixed(label: str, prefix: str = _PREFIX) -> str:
    """A label with its BIDS prefix.

    >>> prefixed("01"), prefixed("sub-01"), prefixed("2", "ses-")
    ('sub-01', 'sub-01', 'ses-2')
    """
    return label if label.casefold().startswith(prefix) else prefix + label


def sex_coding_from(pairs: Sequence[str]) -> dict[str, Sex]:
    """What ``--sex-coding`` says.

    >>> sex_coding_from(["1=M", "2=F"])
    {'1': 'M', '2': 'F'}
    """
    coding: dict[str, Sex] = {}
    for pair in pairs:
        code, _, word = pair.partition("=")
        if plain_code(word) not in SEX_WORDS or not code.strip():
            raise UserError(f"--sex-coding {pair!r}: write which code means what, as in 1=M 2=F")
        coding[plain_code(code)] = SEX_WORDS[plain_code(word)]
    return coding


def plain_code(code: str) -> str:
    """A code as it is compared: in lower case, without spaces, and 1.0 as 1."""
    code = code.strip().casefold()
    return code[:-2] if re.fullmatch(r"\d+\.0", code) else code
