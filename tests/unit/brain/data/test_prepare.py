"""A scan is the same scan however it is stored."""

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("nibabel")


from ermoe.brain.data.preprocess import Preprocessing, isolate, prepare
from ermoe.errors import UserError
from ermoe.files import from_json, to_json
from support.scans import CODES, head, save
from support.stored_scans import all_ways_to_store, padded, stored, turned

SMALL = Preprocessing(spacing_mm=4.0, shape=(40, 48, 40))


def oblique(affine, degrees=7.0):
    angle = np.radians(degrees)
    turn = np.eye(4)
    turn[:2, :2] = [[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]
    return turn @ affine


@pytest.mark.parametrize("tilt", [0.0, 7.0])
def test_storage_does_not_matter(tmp_path, tilt):
    t1, labels, affine = head()
    affine = oblique(affine, tilt)
    reference = prepare(stored(tmp_path / "reference", t1, labels, affine), SMALL, with_tissue=True)
    for name, *way in all_ways_to_store(t1, labels, affine):
        volume = prepare(stored(tmp_path / name, *way), SMALL, with_tissue=True)
        assert (volume.mask_XYZ == reference.mask_XYZ).all(), name
        np.testing.assert_allclose(volume.t1_XYZ, reference.t1_XYZ, atol=1e-4, err_msg=name)
        np.testing.assert_allclose(volume.tissue_3XYZ, reference.tissue_3XYZ, atol=1e-4, err_msg=name)


def test_a_mask_need_not_be_padded_with_its_t1(tmp_path):
    t1, labels, affine = head()
    reference = prepare(stored(tmp_path / "a", t1, labels, affine), SMALL)
    scan = stored(tmp_path / "b", t1, labels, affine)
    save(scan.t1, *padded(t1, affine))
    np.testing.assert_allclose(prepare(scan, SMALL).t1_XYZ, reference.t1_XYZ, atol=1e-4)


def test_world_axes_are_upright(tmp_path):
    """A bright spot on the right, in front and on top is found there, although the scan is stored upside down."""
    t1, labels, affine = head()
    voxel = np.rint(np.linalg.inv(affine) @ [20, 30, 25, 1]).astype(int)[:3]
    t1 = t1.copy()
    t1[tuple(slice(i - 1, i + 2) for i in voxel)] = 3000
    moved, where = turned(t1, affine, "IPL")
    volume = prepare(stored(tmp_path, moved, turned(labels, affine, "IPL")[0], where), SMALL)
    brightest = np.array(np.unravel_index(volume.t1_XYZ.argmax(), volume.t1_XYZ.shape))
    assert np.abs((volume.affine @ [*brightest, 1])[:3] - [20, 30, 25]).max() < 6


def test_a_finer_copy_looks_nearly_the_same(tmp_path):
    t1, labels, affine = head(skull=False)
    fine = np.kron(t1, np.ones((2, 2, 2), t1.dtype)), np.kron(labels, np.ones((2, 2, 2), labels.dtype))
    halved = affine @ np.diag([0.5, 0.5, 0.5, 1])
    halved[:3, 3] -= 0.25 * np.diag(affine)[:3]
    coarse = prepare(stored(tmp_path / "a", t1, labels, affine), SMALL)
    volume = prepare(stored(tmp_path / "b", *fine, halved), SMALL)
    assert (volume.mask_XYZ != coarse.mask_XYZ).mean() < 0.01
    assert np.corrcoef(volume.t1_XYZ.ravel(), coarse.t1_XYZ.ravel())[0, 1] > 0.95


def test_no_brain_is_cut_off(tmp_path):
    """The mask keeps its volume although its centre of mass is far from the middle of its box."""
    t1, labels, affine = head()
    labels = labels.copy()
    labels[18:22, 20:26, :6] = CODES["wm"]  # a long brain stem
    volume = prepare(stored(tmp_path, t1, labels, affine), Preprocessing(spacing_mm=4.0, shape=(32, 44, 40)))
    kept_ml, whole_ml = volume.mask_XYZ.sum() * 0.064, (labels > 0).sum() * 0.064
    assert abs(kept_ml / whole_ml - 1) < 0.02


def test_a_brain_larger_than_the_grid_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"sub-01.*brain mask of .* mm, and the grid holds 96 × 96 × 96 mm"):
        prepare(stored(tmp_path, *head()), Preprocessing(spacing_mm=4.0, shape=(24, 24, 24)))


@pytest.mark.parametrize(("how", "mean"), [("zscore", 0.0), ("mean", 1.0)])
def test_intensities_are_normal_inside_the_mask(tmp_path, how, mean):
    volume = prepare(stored(tmp_path, *head()), replace(SMALL, normalisation=how))
    inside = volume.t1_XYZ[volume.mask_XYZ]
    assert abs(inside.mean() - mean) < 1e-4
    assert how == "mean" or abs(inside.std() - 1) < 1e-4
    assert (volume.t1_XYZ[~volume.mask_XYZ] == 0).all()


def test_percentiles_run_from_0_to_1(tmp_path):
    volume = prepare(stored(tmp_path, *head()), replace(SMALL, normalisation="percentile"))
    assert volume.t1_XYZ.min() == 0
    assert volume.t1_XYZ.max() == 1


def test_tissue_shares_are_shares(tmp_path):
    volume = prepare(stored(tmp_path, *head()), SMALL, with_tissue=True)
    total = volume.tissue_3XYZ.sum(axis=0)
    assert total.max() < 1 + 1e-4
    assert total[volume.mask_XYZ].mean() > 0.95
    # In the order wm, gm, csf: the brightest tissue first.
    levels = [volume.t1_XYZ[share > 0.9].mean() for share in volume.tissue_3XYZ]
    assert levels[0] > levels[1] > levels[2]


def test_an_isolated_region_is_normalised_on_its_own(tmp_path):
    volume = prepare(stored(tmp_path, *head()), SMALL, with_tissue=True)
    for number, region in enumerate(("wm", "gm", "csf")):
        t1_XYZ = isolate(volume, region)
        inside = volume.mask_XYZ & (volume.tissue_3XYZ[number] > 0.5)
        assert (t1_XYZ[~inside] == 0).all()
        assert abs(t1_XYZ[inside].mean()) < 1e-4
        assert abs(t1_XYZ[inside].std() - 1) < 1e-3


def test_isolating_needs_tissue(tmp_path):
    volume = prepare(stored(tmp_path, *head()), SMALL)
    with pytest.raises(UserError, match="isolating gm needs tissue maps"):
        isolate(volume, "gm")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"spacing_mm": 0}, "spacing_mm=0"),
        ({"shape": (96, 112)}, "shape"),
        ({"normalisation": "minmax"}, "zscore, mean, percentile"),
        ({"register": "rigid"}, "none, affine"),
    ],
)
def test_nonsense_is_refused(options, message):
    with pytest.raises(UserError, match=message):
        Preprocessing(**options)


def test_unknown_stored_options_are_refused():
    with pytest.raises(UserError, match="unknown settings denoise"):
        from_json(Preprocessing, {**to_json(Preprocessing()), "denoise": True}, where="brain_age.json")
