"""``ermoe demo`` with few digits and the smallest budget: story, table, report and picture are all there."""

import re
from contextlib import redirect_stdout
from io import StringIO

import pytest
import torch
from PIL import Image

from ermoe.cli.main import main
from ermoe.data.images import Split, digits
from ermoe.images.presets import recipe
from ermoe.studies.demo import CONTEST

FEW = 192


def few_digits():
    return tuple(Split(split.image[:FEW], split.label[:FEW]) for split in digits())


@pytest.fixture(scope="module")
def small():
    """A demo of few digits, few turns and a narrow model."""
    few = few_digits()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "120")
        patch.setattr("ermoe.data.images.digits", lambda: few)
        patch.setattr("ermoe.studies.comparison._ROUNDS", 2)
        for name, value in {"_WIDTH": 48, "_ROUNDS": 2, "_TO_FIT": FEW, "AT_ONCE": FEW}.items():
            patch.setattr(f"ermoe.studies.demo_runs.{name}", value)
        yield patch


def told(*argv):
    with redirect_stdout(StringIO()) as output:
        assert main(["demo", "--epochs", "1", *map(str, argv)]) == 0
    return output.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder in which the demo finds an older report and something that is not its own."""
    folder = tmp_path_factory.mktemp("demo")
    (folder / "report.html").write_text("old")
    (folder / "keep.txt").write_text("not the demo's")
    return folder


@pytest.fixture(scope="module")
def printed(small, folder):
    """What one run says; its files are in ``folder``."""
    return told("--out", folder, "--picture", folder / "demo.png")


def table_of(text):
    """The cells of each model, by column."""
    lines = [re.split(r" {2,}", line.strip()) for line in text.splitlines()]
    start = next(number for number, line in enumerate(lines) if line[0] == "model")
    return {line[0]: dict(zip(lines[start], line, strict=True)) for line in lines if len(line) == len(lines[start])}


def number(cell):
    return float(cell.split()[0].replace(",", ""))


def test_the_story_has_five_parts_and_changes_no_prediction(printed):
    assert re.findall(r"^(\d)\. ", printed, re.MULTILINE) == list("12345")
    largest = re.search(rf"differ by (\S+) at most .*predictions changed: 0 of {FEW}", " ".join(printed.split()))
    assert float(largest[1]) < 1e-4


def test_ermoe_is_smaller_and_cheaper_than_v_moe_and_slim_than_dense(printed):
    models = table_of(printed)
    assert list(models) == ["model", "dense", "V-MoE", "ERMoE", "slim"]
    for column in ("parameters", "operations"):
        assert number(models["ERMoE"][column]) < number(models["V-MoE"][column])
    assert number(models["slim"]["operations"]) <= 0.5
    assert models["slim"]["training step"] == "–"
    assert "points apart are equal" in " ".join(printed.split())


def test_the_report_shows_all_sparse_models_and_needs_nothing_else(printed, folder):
    text = (folder / "report.html").read_text(encoding="utf-8")
    for name in ("ERMoE", "V-MoE", "slim", "Where the patches go"):
        assert name in text
    assert not re.search(r"https?:|<link|@import|url\((?!#)", text)


def test_nothing_else_is_touched(printed, folder):
    names = {path.name for path in folder.iterdir()} - {"from-scratch"}
    assert names == {"1-epochs", "demo.png", "figures", "keep.txt", "report.html"}
    assert (folder / "keep.txt").read_text() == "not the demo's"


def test_the_picture_fits_a_readme(printed, folder):
    assert (folder / "demo.png").stat().st_size < 200_000
    with Image.open(folder / "demo.png") as picture:
        assert picture.width > 2 * picture.height


def test_what_was_computed_is_not_computed_again(printed, small, folder):
    def refuse(*args, **options):
        raise AssertionError("computed again")

    with pytest.MonkeyPatch.context() as patch:
        for name in ("loop.train", "loop.fit", "slim", "take_turns"):
            patch.setattr(f"ermoe.studies.demo_runs.{name}", refuse)
        patch.setattr("ermoe.explorer.inspect.inspect", lambda *args, **options: "none")
        assert table_of(told("--out", folder)) == table_of(printed)


def test_from_scratch_is_one_option_away(small, folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ermoe.studies.demo.CONTEST", {name: CONTEST[name] for name in ("dense", "ERMoE")})
        patch.setattr("ermoe.explorer.inspect.inspect", lambda places, data, out, **options: f"{out} of {len(places)}")
        text = told("--from-scratch", "--out", folder)
    assert list(table_of(text)) == ["model", "dense", "ERMoE"]
    assert f"report: {folder / 'from-scratch'} of 1" in text


def test_digits_are_split_without_overlap_and_with_the_same_mix():
    train, test = digits()
    again, _ = digits()
    assert train.image.equal(again.image)
    assert len(train) + len(test) == 1797
    share = torch.bincount(train.label) / len(train) - torch.bincount(test.label) / len(test)
    assert share.abs().max() < 0.002
    assert 0 <= train.image.min() < train.image.max() <= 1


def test_all_start_from_the_same_weights_but_for_their_experts():
    dense, *sparse = (recipe(preset).build(10).state_dict() for preset in CONTEST.values())
    for state in sparse:
        shared = state.keys() & dense.keys()
        assert {name for name in dense if name not in shared} == {
            f"blocks.{block}.mlp.fc{layer}.{part}"
            for block in (1, 3)
            for layer in (1, 2)
            for part in ("weight", "bias")
        }
        assert all(state[name].equal(dense[name]) for name in shared)
