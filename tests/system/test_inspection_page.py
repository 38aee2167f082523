"""The page of `ermoe inspect` in a real browser."""

import tarfile
from pathlib import Path

import numpy as np
import pytest

from ermoe.analysis import plots
from ermoe.data.images import open_images
from ermoe.explorer.inspect import inspect
from ermoe.explorer.patches import patch_experts, patch_grid
from ermoe.images.run import transform_for
from ermoe.retrieval.index import build_index
from support.axe import axe_script, violations
from support.browser import CHROMIUM, Browser
from support.inspected import model, write_report

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium to look at the page with")
SAVED = Path(__file__).parents[1] / "fixtures" / "saved.tar.xz"


def of_images(folder):
    return write_report(folder)


def of_brains(folder):
    with tarfile.open(SAVED) as archive:
        archive.extractall(folder, members=[m for m in archive if m.name.startswith("brain/")], filter="data")
    return inspect([str(folder / "brain" / "run")], str(folder / "brain" / "bids"), folder / "out")


def of_an_index(folder):
    with tarfile.open(SAVED) as archive:
        archive.extractall(folder, members=[m for m in archive if m.name.startswith("retrieval/")], filter="data")
    saved = folder / "retrieval"
    build_index(saved / "run", saved / "images", folder / "index")
    return inspect([str(folder / "index")], None, folder / "out", captions=saved / "shapes")


@pytest.mark.parametrize("made", [of_images, of_brains, of_an_index])
def test_everybody_can_read_the_report_at_every_width(made, tmp_path):
    """Cards open, light and dark."""
    report, script = made(tmp_path), axe_script(tmp_path)
    with Browser() as browser:
        browser.open(report)
        assert browser.evaluate("document.querySelectorAll('.card').length") > 0
        browser.evaluate("document.querySelectorAll('details').forEach((card, n) => { card.open = n < 4; })")
        for width in (390, 1200, 2000):
            browser.resize(width, 900)
            for scheme in ("light", "dark"):
                browser.prefer(scheme)
                assert violations(browser, script) == [], (width, scheme)
                assert browser.evaluate("document.documentElement.scrollWidth") <= width
        assert browser.errors == []
        assert [address for address in browser.requests if not address.startswith(("file:", "data:"))] == []


def test_the_page_works_in_a_browser(tmp_path):
    report = write_report(tmp_path)
    with Browser() as browser:
        browser.open(report)
        assert browser.evaluate("document.querySelectorAll('section').length") == 11
        assert browser.evaluate("document.getElementById('layer-name').textContent") == "block 3"
        paint = "[...document.querySelectorAll('canvas')].map(c => c.toDataURL()).join()"
        deepest = browser.evaluate(paint)
        browser.evaluate("const s = document.getElementById('layer'); s.value = 0; s.dispatchEvent(new Event('input'))")
        assert browser.evaluate("document.getElementById('layer-name').textContent") == "block 1"
        assert browser.evaluate(paint) != deepest
        pixel = "[...document.querySelector('canvas').getContext('2d').getImageData(0, 0, 4, 4).data]"
        shown = np.array(browser.evaluate(pixel)).reshape(4, 4, 4)[..., :3]
        assert (shown == expected_colours()).all()
        browser.evaluate("location.hash = 'card-0-block-1-2'")
        browser.wait_until("document.getElementById('card-0-block-1-2').closest('details').open")
        browser.resize(390, 844)
        assert browser.evaluate("document.documentElement.scrollWidth") <= 390
        assert browser.pdf().startswith(b"%PDF")
        assert browser.errors == []
        assert [address for address in browser.requests if not address.startswith(("file:", "data:"))] == []


def expected_colours():
    """Those of the experts in block 1 of the first model, for the first picture: the first zero of the test split."""
    network, images = model(), open_images("digits", "test")
    index = np.array([int((images.label_N == 0).nonzero()[0])])
    transform = transform_for(network)
    image = transform.device(transform.host(images, index, 0), images.label_N[index], index, 0).image
    expert = patch_experts(network, image, patch_grid(network, image))["blocks.1.mlp"][0]
    palette = [[int(c[i : i + 2], 16) for i in (1, 3, 5)] for c in plots.expert_colours(4)]
    return np.array(palette)[expert.numpy()]
