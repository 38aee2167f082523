"""``ermoe demo`` with the smallest budget: the table, the report and the picture are all there."""

import re
from contextlib import redirect_stdout
from html.parser import HTMLParser
from io import StringIO

import pytest
import torch
from PIL import Image

from ermoe.cli.main import main
from ermoe.data.digits import digits
from ermoe.images import demo
from ermoe.images.demo_report import HEADER

SECTIONS = [
    "What they reached",
    "How evenly the experts work",
    "Where the patches go",
    "Which digits use which experts",
    "How ERMoE decides",
    "All measures of ERMoE",
]


class Headings(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.found, self._inside = [], False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self._inside = tag == "h2"

    def handle_data(self, data):
        if self._inside:
            self.found.append(data)
            self._inside = False


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder in which the demo finds an older report and something that is not its own."""
    folder = tmp_path_factory.mktemp("demo")
    (folder / "report.html").write_text("old")
    (folder / "keep.txt").write_text("not the demo's")
    return folder


@pytest.fixture(scope="module")
def printed(folder):
    """What one run says; its files are in ``folder``."""
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as output:
        patch.setenv("COLUMNS", "120")
        assert main(["demo", "--epochs", "1", "--out", str(folder), "--picture", str(folder / "demo.png")]) == 0
    return output.getvalue()


def test_the_table_has_a_row_for_each_model(printed):
    header = next(line for line in printed.splitlines() if line.startswith("model"))
    assert header.split() == [word for name in HEADER for word in name.split()]
    for name in ("dense", "learned gate", "V-MoE", "ERMoE"):
        row = next(line for line in printed.splitlines() if line.startswith(f"{name} "))
        assert re.search(r"\d+\.\d% .* \d+ k +\d+ k +\d+\.\d\d ×", row), row
    assert "points apart are equal" in " ".join(printed.split())


def test_the_report_has_every_section_and_needs_nothing_else(printed, folder):
    text = (folder / "report.html").read_text(encoding="utf-8")
    assert Headings(text).found == SECTIONS
    assert not re.search(r"https?:|<script|<link|@import|url\((?!#)", text)
    assert text.count('<img src="data:image/jpeg;base64,') == 2 * 2 * 10
    assert text.count("<svg") == 2 + 4 + 2
    assert len(text) < 500_000


def test_nothing_else_is_touched(printed, folder):
    assert sorted(path.name for path in folder.iterdir()) == ["demo.png", "keep.txt", "report.html"]
    assert (folder / "keep.txt").read_text() == "not the demo's"


def test_the_picture_fits_a_readme(printed, folder):
    assert (folder / "demo.png").stat().st_size < 200_000
    with Image.open(folder / "demo.png") as picture:
        assert picture.width > 2 * picture.height


def test_digits_are_split_without_overlap_and_with_the_same_mix():
    train, test = digits()
    again, _ = digits()
    assert train.image.equal(again.image)
    assert len(train) + len(test) == 1797
    share = torch.bincount(train.label) / len(train) - torch.bincount(test.label) / len(test)
    assert share.abs().max() < 0.002
    assert 0 <= train.image.min() < train.image.max() <= 1


def test_contenders_share_their_start_and_their_batches():
    state = torch.get_rng_state()
    group = demo.contenders(demo.Budget(), num_steps=10)
    assert torch.get_rng_state().equal(state)
    dense = group[0].model.state_dict()
    for contender in group[1:]:
        shared = contender.model.state_dict().keys() & dense.keys()
        assert {name for name in dense if name not in shared} == {
            f"blocks.{block}.mlp.fc{layer}.{part}"
            for block in (1, 3)
            for layer in (1, 2)
            for part in ("weight", "bias")
        }
        assert all(contender.model.state_dict()[name].equal(dense[name]) for name in shared)
    split = digits()[0]
    one, two, other = (list(demo.batches(split, demo.Budget(epochs=2, seed=seed))) for seed in (0, 0, 1))
    assert len(one) == demo.Budget(epochs=2).steps(len(split)) == 36
    assert all(a[2].equal(b[2]) for a, b in zip(one, two, strict=True))
    assert not all(a[2].equal(b[2]) for a, b in zip(one, other, strict=True))
