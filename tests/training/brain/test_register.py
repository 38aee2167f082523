"""A registered scan lies where the MNI brain does, whatever its pose and size."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("nibabel")
pytest.importorskip("nilearn")
pytest.importorskip("dipy")

from ermoe.brain.data.nifti import Image
from ermoe.brain.data.preprocess import Preprocessing, prepare, sample
from ermoe.brain.data.register import _template, mni_grid
from ermoe.brain.data.scans import Scan
from support.scans import save

COARSE = Preprocessing(spacing_mm=4.0, shape=(48, 56, 48), register="affine")


def test_a_prepared_scan_lies_on_the_mni_brain(tmp_path, monkeypatch):
    """The template itself, turned, shifted and made smaller, is brought back to where it was, by fewer iterations."""
    monkeypatch.setattr("ermoe.brain.data.register._ITERATIONS", [30, 10])
    template, mask_XYZ = _template()
    angle = np.radians(8)
    affine = np.diag([1.8, 1.85, 1.9, 1.0])
    affine[1:3, 1:3] = [[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]] @ affine[1:3, 1:3]
    affine[:3, 3] = [-80, -70, -90]
    t1 = save(tmp_path / "sub-1_T1w.nii.gz", (1000 * template.data_XYZ).astype(np.int16), affine)
    mask = save(tmp_path / "sub-1_desc-brain_mask.nii.gz", mask_XYZ.astype(np.uint8), affine)
    volume = prepare(Scan("sub-1", None, t1, mask=mask), COARSE)
    grid = mni_grid(4.0, (48, 56, 48))
    np.testing.assert_array_equal(volume.affine, grid.affine)
    there = sample(Image(mask_XYZ.astype(np.float32), template.affine, Path("MNI152")), grid, order=1) > 0.5
    assert 2 * (there & volume.mask_XYZ).sum() / (there.sum() + volume.mask_XYZ.sum()) > 0.97
    both = there & volume.mask_XYZ
    assert np.corrcoef(volume.t1_XYZ[both], sample(template, grid, order=1)[both])[0, 1] > 0.97
