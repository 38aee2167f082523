"""What is done to scans, as plain settings: how a cohort is read, how scans are prepared and varied, what networks see.

Nothing here imports torch or numpy, so that a command can show the values at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import tyro

from ermoe.brain.data.scans import Problem, Sex, prefixed, sex_coding_from
from ermoe.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

TissueFrom = Literal["probseg", "dseg", "aseg", "none"]
Normalisation = Literal["zscore", "mean", "percentile"]
InputKind = Literal["t1", "contrast", "blocks"]
"""What a network may be given: the normalised T1; shares of white matter and fluid in every voxel; or shares of white
matter, grey matter and fluid in blocks of voxels and in the whole brain."""

BLOCK = 4
"""Voxels along the edge of a block."""
_CHANNELS = {"t1": 1, "contrast": 2, "blocks": 6}
_CODES = tyro.constructors.PrimitiveConstructorSpec(
    nargs="*",
    metavar="[CODE=SEX [CODE=SEX ...]]",
    instance_from_str=lambda words: sex_coding_from(words),
    is_instance=lambda value: isinstance(value, Mapping),
    str_from_instance=lambda coding: [f"{code}={sex}" for code, sex in coding.items()],
)


@dataclass(frozen=True, slots=True)
class CohortOptions:
    """How a cohort is to be read.

    Args:
        participants: only these people, with or without "sub-".
        exclude: not these people.
        sex_coding: what numbers in the column sex mean, for example 1=M 2=F.
        age_is_baseline: the age in participants.tsv is that of the first of several sessions.
        tissue_from: where tissue maps come from; by default probability maps, else a dseg with its table.
        t1_rule: which of several T1w scans of a session: first, last, or a pattern for file names.
    """

    participants: Annotated[tuple[str, ...], tyro.conf.arg(name="participant-label")] = ()
    exclude: tuple[str, ...] = ()
    sex_coding: Annotated[Mapping[str, Sex], _CODES] = field(default_factory=dict)
    age_is_baseline: bool = False
    tissue_from: TissueFrom | None = None
    t1_rule: str = "first"

    def __post_init__(self) -> None:
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

    def wants(self, participant_id: str) -> bool:
        """Whether a person is to be read."""
        return (not self.participants or participant_id in self.participants) and participant_id not in self.exclude

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
        if len(self.shape) != 3 or min(self.shape) < 4:
            raise UserError(f"shape={self.shape}: need three numbers of voxels, each at least 4")
        for name, known in (
            ("normalisation", get_args(Normalisation)),
            ("register", ("none", "affine")),
            ("interpolation", ("cubic", "linear")),
        ):
            if getattr(self, name) not in known:
                raise UserError(f"{name}={getattr(self, name)!r}: use one of {', '.join(known)}")

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


@dataclass(frozen=True, slots=True)
class VolumeAugmentation:
    """Pose and size, bias field, gamma and noise, by MONAI; left–right flips only if asked for, since brains differ.

    Args:
        rotate_degrees: about each axis, up to this.
        scale: of each axis, up to this share.
        shift_mm: along each axis, up to this.
        bias_field: largest coefficient of the polynomial of degree 3 whose exponential multiplies the brain.
        gamma: contrast exponents from 1 / (1 + gamma) to 1 + gamma.
        noise: largest deviation of Gaussian noise, in deviations of the brain's intensity.
        flip: mirror left and right for every second scan.
        probability: of each change.
    """

    rotate_degrees: float = 10.0
    scale: float = 0.05
    shift_mm: float = 6.0
    bias_field: float = 0.3
    gamma: float = 0.25
    noise: float = 0.1
    flip: bool = False
    probability: float = 0.8

    def __post_init__(self) -> None:
        amounts = (self.rotate_degrees, self.scale, self.shift_mm, self.bias_field, self.gamma, self.noise)
        if min(amounts) < 0 or self.scale >= 1:
            raise UserError(f"{self}: need amounts of 0 or more, and a scale below 1")
        if not 0 <= self.probability <= 1:
            raise UserError(f"probability={self.probability}: need 0 to 1")

    def __call__(
        self, t1_XYZ: Tensor, mask_XYZ: Tensor, *, seed: int, epoch: int, index: int, spacing_mm: float = 2.0
    ) -> tuple[Tensor, Tensor]:
        """The volume and its mask, changed: 0 outside the mask, and the mean and deviation inside it as before."""
        from ermoe.brain.data.augment import augmented

        return augmented(self, t1_XYZ, mask_XYZ, seed=seed, epoch=epoch, index=index, spacing_mm=spacing_mm)


def num_channels(kind: str) -> int:
    """Channels of an input.

    >>> num_channels("contrast")
    2
    """
    if kind not in _CHANNELS:
        raise UserError(f"input={kind!r}: use one of {', '.join(_CHANNELS)}")
    return _CHANNELS[kind]


def reduction(kind: str) -> int:
    """By how much an input is coarser than the volume, along each axis.

    >>> reduction("t1"), reduction("blocks")
    (1, 4)
    """
    return BLOCK if kind == "blocks" else 1
