"""A real scan is the same scan however it is stored."""

import os
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("nibabel")

import nibabel

from ermoe.brain.data.cohort import open_cohort
from ermoe.brain.data.preprocess import Preprocessing, prepare
from ermoe.brain.data.scans import Scan
from support.scans import save
from support.stored_scans import all_ways_to_store, padded, stored, turned

SMALL = Preprocessing(spacing_mm=4.0, shape=(40, 48, 40))


@pytest.fixture(scope="module")
def ixi():
    data = os.environ.get("ERMOE_DATA")
    root = Path(data or ".", "ixi50")
    if not data or not root.is_dir():
        pytest.skip("the environment variable ERMOE_DATA does not lead to a folder with ixi50")
    return root


def test_deepbet_finds_the_brain_however_it_is_stored(tmp_path, ixi):
    pytest.importorskip("deepbet")
    scan = open_cohort(ixi, participants=["IXI217"]).scans[0]
    t1 = nibabel.load(scan.t1)
    lone = save(tmp_path / "a.nii.gz", *padded(*turned(np.asanyarray(t1.dataobj), t1.affine, "LPI")))
    found, known = (prepare(found, SMALL) for found in (Scan("a", None, lone), scan))
    assert found.mask_source == "deepbet"
    assert 2 * (found.mask_XYZ & known.mask_XYZ).sum() / (found.mask_XYZ.sum() + known.mask_XYZ.sum()) > 0.96


def test_storage_does_not_matter_for_a_real_scan(tmp_path, ixi):
    scan = open_cohort(ixi, participants=["IXI012"]).scans[0]
    t1, labels = nibabel.load(scan.t1), nibabel.load(scan.labels)
    data, codes = np.asanyarray(t1.dataobj), np.asanyarray(labels.dataobj)
    reference = prepare(scan, Preprocessing())
    for name, *way in all_ways_to_store(data, codes, t1.affine):
        if name in ("IPL", "scaled", "padded"):
            volume = prepare(stored(tmp_path / name, *way), Preprocessing())
            assert (volume.mask_XYZ == reference.mask_XYZ).all(), name
            np.testing.assert_allclose(volume.t1_XYZ, reference.t1_XYZ, atol=1e-4, err_msg=name)
