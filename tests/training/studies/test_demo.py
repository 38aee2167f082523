"""``ermoe demo`` with the smallest budget: the table, the report and the picture are all there."""

import re
from contextlib import redirect_stdout
from io import StringIO

import pytest
import torch
from PIL import Image

from ermoe.cli.main import main
from ermoe.data.images import digits
from ermoe.images.presets import recipe
from ermoe.studies.demo import HEADER, MODELS


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
        patch.setattr("ermoe.studies.comparison._ROUNDS", 3)
        assert main(["demo", "--epochs", "1", "--out", str(folder), "--picture", str(folder / "demo.png")]) == 0
    return output.getvalue()


def test_the_table_has_a_row_for_each_model(printed):
    lines = [line.strip() for line in printed.splitlines()]
    header = next(line for line in lines if line.startswith("model "))
    assert header.split() == [word for name in HEADER for word in name.split()]
    for name in ("dense", "learned gate", "V-MoE", "ERMoE"):
        row = next(line for line in lines if line.startswith(f"{name} "))
        assert re.search(r"\d+\.\d% .* \d+ k +\d+ k +\d+\.\d\d ×", row), row
    assert "points apart are equal" in " ".join(printed.split())


def test_the_report_shows_all_sparse_models_and_needs_nothing_else(printed, folder):
    text = (folder / "report.html").read_text(encoding="utf-8")
    for name in ("digits-ermoe-0", "digits-v-moe-0", "digits-gate-0", "Where the patches go"):
        assert name in text
    assert not re.search(r"https?:|<link|@import|url\((?!#)", text)


def test_nothing_else_is_touched(printed, folder):
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["1-epochs", "demo.png", "figures", "keep.txt", "report.html"]
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


def test_all_start_from_the_same_weights_but_for_their_experts():
    dense, *sparse = (recipe(preset).build(10).state_dict() for preset in MODELS.values())
    for state in sparse:
        shared = state.keys() & dense.keys()
        assert {name for name in dense if name not in shared} == {
            f"blocks.{block}.mlp.fc{layer}.{part}"
            for block in (1, 3)
            for layer in (1, 2)
            for part in ("weight", "bias")
        }
        assert all(state[name].equal(dense[name]) for name in shared)
