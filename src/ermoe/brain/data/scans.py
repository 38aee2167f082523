"""Scans as plain records: what is known of one, what may be wrong with it, whose it is; which to read, how to prepare.

Nothing here imports torch or numpy, so that a command can show its options at once.
"""

from __future__ import annotations

import math
import re
import shlex
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, get_args

import tyro

from ermoe.errors import UserError

Tissue = Literal["wm", "gm", "csf"]
TissueFrom = Literal["probseg", "dseg", "aseg", "none"]
Sex = Literal["M", "F", "other"]
Normalisation = Literal["zscore", "mean", "percentile"]

MOST_VOXELS = 512**3
"""Of a volume: a few bytes of a header can declare any number."""
TISSUES: tuple[Tissue, ...] = ("wm", "gm", "csf")
"""The order of tissues wherever there is an axis of them. Only the channels of a network's input go from dark to
bright: `ermoe.brain.inputs.network_input`."""

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

    @property
    def files(self) -> list[Path]:
        """The T1 and all that belongs to it."""
        tissue = [self.tissue.path] if isinstance(self.tissue, Segmentation) else []
        tissue += self.tissue.paths.values() if isinstance(self.tissue, ProbabilityMaps) else []
        return [path for path in (self.t1, self.mask, self.labels, *tissue) if path is not None]

    def value(self, column: str) -> str | None:
        """What the table says of the scan in a column, its site or another; None if nothing."""
        return self.site if column == "site" else self.columns.get(column)

    def unusable(self, what: str, remedy: str, path: Path | None = None) -> ScanError:
        """Why the scan cannot be used; ``path`` is the file to blame if not the T1 is."""
        return ScanError(Problem("error", self.key, path or self.t1, what, remedy))


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
    lines = grouped(errors)
    rest = [f"… and {len(lines) - shown} more"] if len(lines) > shown else []
    listed = "\n".join(f"  {line}" for line in [*lines[:shown], *rest])
    raise UserError(f"{len(errors)} error{'s' if len(errors) > 1 else ''} in the data, to be mended first:\n{listed}")


def grouped(problems: Sequence[Problem], *, named: int = 5) -> list[str]:
    """One sentence for all problems that say the same, in the order of the first of each.

    >>> twins = [Problem("error", f"sub-{n}", Path(f"{n}.nii"), "is empty", "copy it again") for n in range(3)]
    >>> grouped(twins)
    ['sub-0: 0.nii is empty: copy it again (and 2 more: sub-1, sub-2)']
    """
    alike: dict[tuple[str, str, str], list[Problem]] = defaultdict(list)
    for problem in problems:
        alike[problem.severity, problem.what, problem.remedy].append(problem)
    lines = []
    for first, *others in alike.values():
        names = [str(other.subject or other.path) for other in others]
        listed = ", ".join(names[:named]) + (", …" if len(names) > named else "")
        lines.append(f"{first} (and {len(others)} more: {listed})" if others else str(first))
    return lines


_PREFIX = "sub-"


def canonical_id(participant_id: str) -> str:
    """What all spellings of an id have in common.

    >>> [canonical_id(spelling) for spelling in ("sub-007", "SUB-7 ", "07", "sub-IXI012")]
    ['7', '7', '7', 'ixi12']
    """
    bare = re.sub(r"\s+", "", unicodedata.normalize("NFKC", participant_id)).casefold().removeprefix(_PREFIX)
    return re.sub(r"\d+", lambda digits: _unpadded(digits[0]), bare)


def _unpadded(digits: str) -> str:
    return "".join(str(unicodedata.decimal(digit)) for digit in digits).lstrip("0") or "0"


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


def _sex_coding_from(pairs: Sequence[str]) -> dict[str, Sex]:
    """What ``--sex-coding`` says.

    >>> _sex_coding_from(["1=M", "2=F"])
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


_CODES = tyro.constructors.PrimitiveConstructorSpec(
    nargs="*",
    metavar="CODE=SEX …",
    instance_from_str=_sex_coding_from,
    is_instance=lambda value: isinstance(value, Mapping),
    str_from_instance=lambda coding: [f"{code}={sex}" for code, sex in coding.items()],
)


@dataclass(frozen=True, slots=True)
class CohortOptions:
    """How a cohort is to be read.

    Args:
        participants: only these people, with or without "sub-".
        exclude: not these people.
        where: only scans whose table says so, for example group=control; of several, all must hold.
        sex_coding: what numbers in the column sex mean, for example 1=M 2=F.
        age_is_baseline: the age in participants.tsv is that of the first of several sessions.
        tissue_from: where tissue maps come from; by default probability maps, else a dseg with its table.
        t1_rule: which of several T1w scans of a session: first, last, or a pattern for file names.
    """

    participants: Annotated[tuple[str, ...], tyro.conf.arg(name="participant-label")] = ()
    exclude: tuple[str, ...] = ()
    where: tuple[str, ...] = ()
    sex_coding: Annotated[Mapping[str, Sex], _CODES] = field(default_factory=dict)
    age_is_baseline: bool = False
    tissue_from: TissueFrom | None = None
    t1_rule: str = "first"

    def __post_init__(self) -> None:
        for pair in self.where:
            column, equals, value = pair.partition("=")
            if not (column.strip() and equals and value.strip()):
                raise UserError(f"--where {pair!r}: write a column and its value, as in group=control")
        if self.tissue_from not in (None, *get_args(TissueFrom)):
            raise UserError(f"tissue_from={self.tissue_from!r}: use probseg, dseg, aseg or none")
        if not self.t1_rule:
            raise UserError("t1_rule='': use first, last or a pattern for file names such as '*acq-mprage*'")

    def changed(self, changes: Mapping[str, Any]) -> CohortOptions:
        """With other values, and labels with their prefix, as BIDS apps take them with or without.

        >>> CohortOptions().changed({"participants": ["01", "sub-02"]}).participants
        ('sub-01', 'sub-02')
        """
        given = {name: value for name, value in changes.items() if value is not None}
        if "participants" in given and not given["participants"]:
            raise UserError("participants names nobody: name somebody, or leave it out for everybody")
        new = replace(self, **given)
        return replace(new, participants=_labels(new.participants), exclude=_labels(new.exclude))

    def refuse_missing(self, found: Iterable[str]) -> None:
        """A `UserError` that names people who were asked for and not found."""
        if missing := sorted(set(_labels(self.participants)) - set(found)):
            raise UserError(f"there is no T1w scan of {', '.join(missing[:5])}: check the labels")

    def as_typed(self) -> str:
        """Whom they select, as on a command line, with a space before it."""
        asked = {"--participant-label": self.participants, "--exclude": self.exclude, "--where": self.where}
        return "".join(f" {name} {shlex.join(values)}" for name, values in asked.items() if values)

    def wants(self, participant_id: str) -> bool:
        """Whether a person is to be read."""
        return (not self.participants or participant_id in self.participants) and participant_id not in self.exclude

    def holds_for(self, scan: Scan) -> bool:
        """Whether a scan's table says what ``where`` asks for."""
        known = {**scan.columns, "sex": scan.sex, "site": scan.site}
        pairs = (pair.partition("=") for pair in self.where)
        return all(
            str(known.get(column.strip().casefold(), "")).casefold() == value.strip().casefold()
            for column, _, value in pairs
        )

    def concerns(self, problem: Problem) -> bool:
        """Whether a problem is about somebody who is to be read, or about nobody in particular."""
        # The subject of a problem is a person, or a session of one.
        return problem.subject is None or self.wants(problem.subject.split("_ses-")[0])


def _labels(labels: Sequence[str]) -> tuple[str, ...]:
    return tuple(prefixed(label.strip()) for label in labels)


@dataclass(frozen=True, slots=True)
class Preprocessing:
    """All that is done to a scan before the model sees it; stored with the model and applied at prediction.

    Args:
        spacing_mm: edge of the grid's voxels; 2 by default.
        shape: voxels of the grid towards right, front and top, in which the brain must fit; by default 96 112 96, or
            the same room in voxels of another size.
        normalisation: of intensities inside the brain; zscore by default, mean as SFCN's authors.
        register: none, the grid lies in the scanner's axes around the brain; affine, in MNI space, which needs the
            extra "register".
        interpolation: of the T1; masks and tissue are linear always.
    """

    spacing_mm: float = 2.0
    shape: tuple[int, int, int] = (96, 112, 96)
    normalisation: Normalisation = "zscore"
    register: Literal["none", "affine"] = "none"
    interpolation: Literal["cubic", "linear"] = "cubic"

    def __post_init__(self) -> None:
        if not 0.25 <= self.spacing_mm <= 16:
            raise UserError(f"spacing_mm={self.spacing_mm}: need 0.25 to 16 mm")
        if len(self.shape) != 3 or min(self.shape) < 4 or math.prod(self.shape) > MOST_VOXELS:
            raise UserError(
                f"shape={self.shape}: need three numbers of voxels, each at least 4, and {MOST_VOXELS:,} in all at most"
            )
        for name, known in (
            ("normalisation", get_args(Normalisation)),
            ("register", ("none", "affine")),
            ("interpolation", ("cubic", "linear")),
        ):
            if getattr(self, name) not in known:
                raise UserError(f"{name}={getattr(self, name)!r}: use one of {', '.join(known)}")

    @property
    def room_mm(self) -> tuple[float, ...]:
        """Edges of the grid."""
        return tuple(self.spacing_mm * edge for edge in self.shape)

    def with_spacing(self, spacing_mm: float | None, *, cube: int = 1) -> Preprocessing:
        """On voxels of another size, over the same room in whole cubes.

        >>> Preprocessing().with_spacing(1.0, cube=16).shape
        (192, 224, 192)
        """
        spacing_mm = self.spacing_mm if spacing_mm is None else spacing_mm
        if spacing_mm <= 0 or cube < 1:
            return replace(self, spacing_mm=spacing_mm)
        edges = [cube * math.ceil(self.spacing_mm * edge / (spacing_mm * cube) - 1e-9) for edge in self.shape]
        return replace(self, spacing_mm=spacing_mm, shape=(edges[0], edges[1], edges[2]))
