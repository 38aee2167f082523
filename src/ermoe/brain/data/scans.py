"""What is known about one T1 scan, and where its mask and tissue maps lie."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Literal

Tissue = Literal["wm", "gm", "csf"]
Sex = Literal["M", "F", "other"]

TISSUES: tuple[Tissue, ...] = ("wm", "gm", "csf")
"""The order of tissues everywhere: experts, channels, columns."""


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
