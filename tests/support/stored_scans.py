"""The same scan, stored in many ways."""

import nibabel
import numpy as np

from ermoe.brain.data.scans import Scan, Segmentation
from support.scans import CODES, save


def stored(folder, t1, labels, affine, suffix=".nii.gz"):
    """A scan with its segmentation, written to a folder."""
    path = save(folder / f"sub-01_T1w{suffix}", t1, affine)
    dseg = save(folder / f"sub-01_dseg{suffix}", labels, affine)
    codes = {"wm": (CODES["wm"],), "gm": (CODES["gm"],), "csf": (CODES["csf"],)}
    return Scan("sub-01", None, path, labels=dseg, tissue=Segmentation(dseg, codes))


def turned(data, affine, orientation):
    """The same voxels in another order of axes."""
    image = nibabel.Nifti1Image(data, affine)
    change = nibabel.orientations.ornt_transform(
        nibabel.io_orientation(affine), nibabel.orientations.axcodes2ornt(orientation)
    )
    moved = image.as_reoriented(change)
    return np.asanyarray(moved.dataobj), moved.affine


def padded(data, affine, width=((3, 5), (0, 7), (4, 0))):
    shifted = affine.copy()
    shifted[:3, 3] = (affine @ [*(-low for low, _ in width), 1])[:3]
    return np.pad(data, width), shifted


def all_ways_to_store(t1, labels, affine):
    """(name, t1, labels, affine, suffix) of the same head."""
    for orientation in ("LAS", "PSR", "IPL", "SRA"):
        moved, where = turned(t1, affine, orientation)
        yield orientation, moved, turned(labels, affine, orientation)[0], where, ".nii.gz"
    yield ".nii", t1, labels, affine, ".nii"
    yield "float", t1.astype(np.float32), labels, affine, ".nii.gz"
    yield "scaled", t1.astype(np.float32) * 0.37, labels, affine, ".nii.gz"
    more, where = padded(t1, affine)
    yield "padded", more, padded(labels, affine)[0], where, ".nii.gz"
    yield "4 axes", t1[..., None], labels, affine, ".nii"
