"""Data sets as they are published."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ermoe.data.images import open_images
from ermoe.retrieval.captions.catalogue import open_captions

pytestmark = pytest.mark.skipif(
    "ERMOE_DATA" not in os.environ, reason="needs ERMOE_DATA, a folder with the packed data sets"
)


def unpack(name, folder):
    script = Path(os.environ["ERMOE_DATA"], "unpack.py")
    subprocess.run([sys.executable, str(script), name, str(folder)], check=True, timeout=120)


def test_the_real_cifar_10(tmp_path):
    unpack("cifar10", tmp_path)
    test = open_images(tmp_path, "test")
    assert set(test.class_counts().values()) == {1000}
    assert test.classes[0] == "airplane"
    assert 100 < test.image_NCHW.float().mean() < 140


def test_the_real_flickr8k_has_its_splits_and_91_images_to_spare(tmp_path):
    unpack("flickr8k", tmp_path)
    sets = [open_captions(tmp_path / "flickr8k", "flickr8k-1k", split) for split in ("train", "dev", "test")]
    assert [len(captions) for captions in sets] == [6000, 1000, 1000]
    assert "91 images of the file are in no split" in sets[0].summary
    assert len({name for captions in sets for name in captions.ids}) == 8000
