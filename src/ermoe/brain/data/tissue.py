"""Shares of white matter, grey matter and cerebrospinal fluid on the model's grid.

Letters: X, Y, Z voxels of the grid; the 3 of tissues is wm, gm, csf.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ermoe.brain.data.alignment import on_grid_of
from ermoe.brain.data.grid import Grid, bounding_box, cropped, sample
from ermoe.brain.data.nifti import Image, read_image
from ermoe.brain.data.problems import Problem, ScanError
from ermoe.brain.data.scans import TISSUES, ProbabilityMaps, Scan, Segmentation

Float = NDArray[np.float32]


def tissue_shares(scan: Scan, t1: Image, grid: Grid) -> Float:
    """How much of every voxel each tissue fills, in [0, 1], (3, X, Y, Z).

    Codes are never interpolated: each becomes a map of 0 and 1 first, and a share is what linear interpolation makes
    of that.
    """
    return np.stack([np.clip(_sampled(image, grid), 0, 1) for image in _maps(scan, t1)])


def check_tissue(scan: Scan, t1: Image) -> None:
    """Raises `ScanError` if the tissue maps of a scan cannot be used."""
    _maps(scan, t1)


def _maps(scan: Scan, t1: Image) -> list[Image]:
    """One image a tissue, with values in [0, 1]."""
    assert scan.tissue is not None
    if isinstance(scan.tissue, Segmentation):
        return _from_segmentation(scan.tissue, scan, t1)
    return _from_probabilities(scan.tissue, scan, t1)


def _sampled(image: Image, grid: Grid) -> Float:
    present = image.data_XYZ > 0
    return sample(cropped(image, bounding_box(present)), grid, order=1) if present.any() else np.zeros(grid.shape, "f4")


def _from_segmentation(source: Segmentation, scan: Scan, t1: Image) -> list[Image]:
    labels = read_image(source.path, scan.key, is_label=True)
    if source.same_grid:
        labels = Image(on_grid_of(t1, labels, scan.key), t1.affine, labels.path)
    codes_XYZ = np.rint(labels.data_XYZ).astype(np.int32)
    if np.abs(labels.data_XYZ - codes_XYZ).max() > 1e-3:
        what = "holds values that are not whole numbers where labels are expected"
        raise ScanError(Problem("error", scan.key, source.path, what, "resample labels with nearest neighbours"))
    maps = [np.isin(codes_XYZ, source.codes[tissue]).astype(np.float32) for tissue in TISSUES]
    missing = [tissue for tissue, present in zip(TISSUES, maps, strict=True) if not present.any()]
    if missing:
        numbers = ", ".join(f"{tissue} {list(source.codes[tissue])[:4]}" for tissue in missing)
        what = f"has no voxel of {numbers}, which its table of labels promises"
        raise ScanError(Problem("error", scan.key, source.path, what, "check dseg.tsv"))
    return [Image(present, labels.affine, labels.path) for present in maps]


def _from_probabilities(source: ProbabilityMaps, scan: Scan, t1: Image) -> list[Image]:
    maps = []
    for tissue in TISSUES:
        image = read_image(source.paths[tissue], scan.key, is_label=True)
        if image.data_XYZ.min() < -0.01 or image.data_XYZ.max() > 1.01:
            what = f"has values from {image.data_XYZ.min():g} to {image.data_XYZ.max():g} where shares are expected"
            raise ScanError(Problem("error", scan.key, image.path, what, "scale it to [0, 1]"))
        maps.append(Image(on_grid_of(t1, image, scan.key), t1.affine, image.path))
    return maps
