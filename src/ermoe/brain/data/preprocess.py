"""From a scan in any orientation, spacing and intensity scale to a normalised volume on the model's grid.

Letters: X, Y, Z voxels of the grid, towards right, anterior and superior; the 3 of tissues is wm, gm, csf.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ermoe.brain.data.grid import Grid, bounding_box, centre_of_mask, cropped, extent_mm, sample
from ermoe.brain.data.intensity import Normalisation, normalise
from ermoe.brain.data.mask import brain_mask
from ermoe.brain.data.nifti import Image, read_image
from ermoe.brain.data.problems import Problem, ScanError
from ermoe.brain.data.scans import TISSUES, Scan, Tissue
from ermoe.brain.data.tissue import tissue_shares
from ermoe.errors import UserError

Float = NDArray[np.float32]
Bool = NDArray[np.bool_]

_ORDER = {"linear": 1, "cubic": 3}
# Not exactly ½: a grid that falls halfway between voxels would leave the surface of the brain to rounding.
_INSIDE = 0.4999


@dataclass(frozen=True, slots=True)
class Preprocessing:
    """All that is done to a scan before the model sees it; stored with the model and applied at prediction.

    Args:
        spacing_mm: edge of the grid's voxels.
        shape: voxels of the grid towards right, anterior and superior; the brain must fit in.
        normalisation: of intensities inside the brain: "zscore", "mean" or "percentile".
        register: "none", the grid lies in the scanner's axes around the brain; "affine", in MNI space.
        interpolation: of the T1, "cubic" or "linear"; masks and tissue are linear always.

    >>> Preprocessing.from_dict(Preprocessing(spacing_mm=3.0, shape=(64, 80, 64)).to_dict()).shape
    (64, 80, 64)
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
            ("normalisation", ("zscore", "mean", "percentile")),
            ("register", ("none", "affine")),
            ("interpolation", tuple(_ORDER)),
        ):
            if getattr(self, name) not in known:
                raise UserError(f"{name}={getattr(self, name)!r}: use one of {', '.join(known)}")

    def on_grid(self, spacing_mm: float | None, shape: tuple[int, int, int] | None, *, cube: int = 1) -> Preprocessing:
        """On voxels of another size; without a shape of their own, over the same room in whole cubes.

        >>> Preprocessing().on_grid(1.0, None, cube=16).shape
        (192, 224, 192)
        """
        spacing_mm = self.spacing_mm if spacing_mm is None else spacing_mm
        if shape is None and spacing_mm > 0:
            edges = [cube * math.ceil(self.spacing_mm * edge / (spacing_mm * cube) - 1e-9) for edge in self.shape]
            shape = edges[0], edges[1], edges[2]
        return replace(self, spacing_mm=spacing_mm, shape=shape or self.shape)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"shape": list(self.shape)}

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> Preprocessing:
        """From `to_dict`, also after a round trip through JSON; unknown keys are refused."""
        unknown = sorted(set(stored) - {field.name for field in fields(cls)})
        if unknown:
            raise UserError(f"preprocessing has the unknown keys {', '.join(unknown)}: it is of a newer ermoe")
        return cls(**stored | {"shape": tuple(stored.get("shape", cls.__dataclass_fields__["shape"].default))})


@dataclass(frozen=True, slots=True)
class Volume:
    """A scan on the model's grid."""

    t1_XYZ: Float
    """Normalised inside the mask, 0 outside."""
    mask_XYZ: Bool
    tissue_3XYZ: Float | None
    """Share of each tissue in every voxel, in the order wm, gm, csf."""
    mask_source: str
    """One of `ermoe.brain.data.mask.MASK_SOURCES`."""
    affine: NDArray[np.float64]
    """From voxels of the grid to the world of the scan in mm, or to MNI with ``register="affine"``, (4, 4)."""


def prepare(scan: Scan, preprocessing: Preprocessing, *, with_tissue: bool = False) -> Volume:
    """Reads a scan and brings it onto the grid; `ScanError`, in one sentence, if it cannot be used.

    The result does not depend on how the scan is stored: orientation of the array, file format, integer type,
    intensity scale and empty slices make no difference beyond rounding.
    """
    t1 = read_image(scan.t1, scan.key)
    mask_XYZ, source = brain_mask(scan, t1)
    grid, place = _grid(scan, t1, mask_XYZ, preprocessing)
    box = bounding_box(mask_XYZ)
    brain = Image(mask_XYZ.astype(np.float32), t1.affine, t1.path)
    inside = sample(cropped(brain, box), grid, order=1) > _INSIDE
    t1_XYZ = sample(cropped(t1, box), grid, order=_ORDER[preprocessing.interpolation])
    try:
        normal = normalise(t1_XYZ, inside, preprocessing.normalisation)
    except ValueError as problem:
        raise ScanError(Problem("error", scan.key, scan.t1, str(problem), "look at the scan and its mask")) from problem
    shares = tissue_shares(scan, t1, grid) * inside if with_tissue and scan.tissue is not None else None
    return Volume(normal, inside, shares, source, place)


def _grid(scan: Scan, t1: Image, mask_XYZ: Bool, preprocessing: Preprocessing) -> tuple[Grid, NDArray[np.float64]]:
    """The grid in the world of the scan, and the affine of the same grid in the space the model knows."""
    if preprocessing.register == "affine":
        from ermoe.brain.data.register import mni_grid, mni_to_scan

        standard = mni_grid(preprocessing.spacing_mm, preprocessing.shape)
        return Grid(standard.shape, mni_to_scan(t1, mask_XYZ) @ standard.affine), standard.affine
    room_mm = preprocessing.spacing_mm * np.array(preprocessing.shape)
    try:
        centre_mm = centre_of_mask(mask_XYZ, t1.affine, room_mm)
    except ValueError:
        low_mm, high_mm = extent_mm(mask_XYZ, t1.affine)
        size, room = (" × ".join(f"{edge:.0f}" for edge in edges) for edges in (high_mm - low_mm, room_mm))
        what = f"has a brain mask of {size} mm, and the grid holds {room} mm"
        remedy = "look at the mask; if it is right, use a larger --shape"
        raise ScanError(Problem("error", scan.key, scan.mask or scan.t1, what, remedy)) from None
    grid = Grid.around(centre_mm, preprocessing.spacing_mm, preprocessing.shape)
    return grid, grid.affine


def isolate(volume: Volume, region: Tissue) -> Float:
    """T1 × tissue mask (share > ½), normalised to mean 0 and deviation 1 inside it, 0 elsewhere, (X, Y, Z).

    A person without a voxel of the region gets zeros.
    """
    if volume.tissue_3XYZ is None:
        raise UserError(
            f"isolating {region} needs tissue maps: prepare the volume with_tissue, from a scan that has them"
        )
    inside = (volume.tissue_3XYZ[TISSUES.index(region)] > 0.5) & volume.mask_XYZ
    return normalise(volume.t1_XYZ, inside) if inside.sum() > 1 else np.zeros_like(volume.t1_XYZ)
