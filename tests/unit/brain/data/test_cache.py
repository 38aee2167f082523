"""The cache returns what `prepare` does, without doing it again, and notices changes."""

import os
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("nibabel")

from ermoe.brain.data import cache as caching
from ermoe.brain.data.cache import VolumeCache
from ermoe.brain.data.cohort import open_cohort
from ermoe.brain.data.preprocess import Preprocessing, prepare
from ermoe.files import is_plain_name
from support.scans import bids_set, rewrite, truncate

SMALL = Preprocessing(spacing_mm=4.0, shape=(40, 48, 40))


@pytest.fixture
def scans(tmp_path):
    return open_cohort(bids_set(tmp_path / "set", people=2)).scans


@pytest.fixture
def counted(monkeypatch):
    """How often something was prepared."""
    calls = []
    monkeypatch.setattr(caching, "prepare", lambda *args, **options: calls.append(1) or prepare(*args, **options))
    return calls


def test_it_returns_what_prepare_does(tmp_path, scans, counted):
    direct = prepare(scans[0], SMALL, with_tissue=True)
    cache = VolumeCache(tmp_path / "cache", SMALL)
    for _ in range(2):
        volume = cache.volume(scans[0], with_tissue=True)
        np.testing.assert_array_equal(volume.t1_XYZ, direct.t1_XYZ)
        np.testing.assert_array_equal(volume.mask_XYZ, direct.mask_XYZ)
        np.testing.assert_allclose(volume.tissue_3XYZ, direct.tissue_3XYZ, atol=0.51 / 255)
        np.testing.assert_array_equal(volume.affine, direct.affine)
        assert volume.mask_source == "dseg"
    assert cache.volume(scans[0]).tissue_3XYZ is None
    assert len(counted) == 1


def test_what_was_made_of_a_volume_is_kept_and_made_again_if_damaged(tmp_path, scans):
    cache, made = VolumeCache(tmp_path / "cache", SMALL), []

    def brightness(volume):
        made.append(1)
        return np.array([volume.t1_XYZ.max()])

    first, again = (cache.kept(scans[0], "brightness", brightness) for _ in range(2))
    np.testing.assert_array_equal(first, again)
    assert len(made) == 1
    next(cache.folder.glob("*.brightness.npy")).write_bytes(b"")
    np.testing.assert_array_equal(cache.kept(scans[0], "brightness", brightness), first)
    assert len(made) == 2


def test_volumes_are_maps_that_can_be_written_to_without_harm(tmp_path, scans):
    cache = VolumeCache(tmp_path / "cache", SMALL)
    volume = cache.volume(scans[0])
    assert isinstance(volume.t1_XYZ, np.memmap)
    volume.t1_XYZ[:] = 7
    assert cache.volume(scans[0]).t1_XYZ.max() != 7


def test_changes_are_noticed(tmp_path, scans, counted):
    cache = VolumeCache(tmp_path / "cache", SMALL)
    before = cache.volume(scans[0]).t1_XYZ.copy()
    rewrite(scans[0].t1, lambda data, affine: (data[::-1].copy(), affine))
    assert not np.array_equal(cache.volume(scans[0]).t1_XYZ, before)
    VolumeCache(tmp_path / "cache", replace(SMALL, normalisation="mean")).volume(scans[0])
    assert len(counted) == 3


def test_an_interrupted_entry_is_made_again(tmp_path, scans, counted):
    cache = VolumeCache(tmp_path / "cache", SMALL)
    cache.volume(scans[0])
    os.unlink(f"{tmp_path / 'cache' / cache.key(scans[0])}.json")
    cache.volume(scans[0])
    assert len(counted) == 2


def test_filling_goes_on_after_a_bad_scan(tmp_path, scans):
    truncate(scans[0].t1)
    seen = []
    problems = VolumeCache(tmp_path / "cache", SMALL).fill(scans, on_scan=lambda *count: seen.append(count))
    assert [problem.subject for problem in problems] == ["sub-01"]
    assert seen == [(1, 2), (2, 2)]


def test_no_id_leads_out_of_the_cache(tmp_path, scans):
    cache = VolumeCache(tmp_path / "cache", SMALL)
    for person in ("sub-../../../elsewhere", "sub-" + "9" * 5000, ".hidden", "sub-\x1b[31m"):
        key = cache.key(replace(scans[0], participant_id=person))
        assert is_plain_name(key)
        assert not key.startswith(".")
