"""Data sets as they are published."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ermoe.data.images import open_images


@pytest.mark.skipif("ERMOE_DATA" not in os.environ, reason="needs ERMOE_DATA, a folder with the packed data sets")
def test_the_real_cifar_10(tmp_path):
    unpack = Path(os.environ["ERMOE_DATA"], "unpack.py")
    subprocess.run([sys.executable, str(unpack), "cifar10", str(tmp_path)], check=True)
    test = open_images(tmp_path, "test")
    assert set(test.class_counts().values()) == {1000}
    assert test.classes[0] == "airplane"
    assert 100 < test.image_NCHW.float().mean() < 140
