"""The explorer of brains says what the model says."""

import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from starlette.testclient import TestClient

import ermoe.brain
from ermoe.brain.estimation import in_voxels
from ermoe.errors import UserError
from ermoe.explorer.explore import open_explorer

SAVED = Path(__file__).parents[2] / "fixtures" / "saved.tar.xz"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    with tarfile.open(SAVED) as archive:
        members = [member for member in archive if member.name.startswith("brain/")]
        archive.extractall(folder, members=members, filter="data")
    return folder / "brain"


@pytest.fixture(scope="module")
def explorer(place):
    return open_explorer([str(place / "run")], str(place / "bids"))


@pytest.fixture(scope="module")
def client(explorer):
    return TestClient(explorer.application("secret"), base_url="http://testserver/secret")


def test_ages_are_those_of_predict_and_of_a_volume_without_the_cube(place, explorer, client):
    told = client.post("/api/brain", json={"scan": 1}).json()
    scan = explorer.scans[1]
    assert told["age"] == pytest.approx(ermoe.brain.load(place / "run").predict(scan.t1).brain_age, abs=1e-4)
    real = [cube for cube, tissue in enumerate(told["tissue"]) if tissue >= 0]
    brain = explorer._get(1)
    cube = torch.zeros(1, int(np.prod(told["grid"])), dtype=torch.bool)
    cube[0, real[len(real) // 2]] = True
    gone = in_voxels(cube.view(1, *told["grid"]), explorer.edge, brain.mask_1xyz)
    output = explorer.model.outputs(brain.input_1Cxyz * ~gone, brain.mask_1xyz & ~gone, brain.folds)
    hidden = client.post("/api/hide", json={"scan": 1, "cubes": [real[len(real) // 2]]}).json()["age"]
    assert hidden == pytest.approx(float(explorer.model.ages(output)), abs=1e-5)
    progress = {"done": 0, "of": 1}
    while progress["done"] < progress["of"]:
        progress = client.post("/api/occlude", json={"scan": 1}).json()
    assert [value is not None for value in progress["change"]] == [tissue >= 0 for tissue in told["tissue"]]
    assert progress["change"][real[len(real) // 2]] == pytest.approx(hidden - told["age"], abs=1e-4)
    for layer in told["layers"]:
        assert [expert >= 0 for expert in layer["expert"]] == [tissue >= 0 for tissue in told["tissue"]]


def test_nilearns_view_asks_nobody(client):
    answer = client.get("/api/view?scan=1&layer=0&overlay=experts")
    assert answer.status_code == 200
    assert "unsafe-inline" in answer.headers["content-security-policy"].split("style-src")[0]
    assert "<link" not in answer.text
    assert "unsafe-eval" not in client.get("/").headers["content-security-policy"]


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("brain", {"scan": 9}), ("brain", {"scan": "../x"}), ("hide", {"scan": 0, "cubes": [99999]}),
        ("hide", {"scan": 0, "cubes": list(range(80))}), ("hide", {"scan": 0}), ("occlude", {}),
    ],
)  # fmt: skip
def test_wrong_questions_about_brains_get_a_sentence(client, path, asked):
    answer = client.post(f"/api/{path}", json=asked)
    assert answer.status_code == 400
    assert len(answer.json()["error"]) > 10


def test_brains_need_scans(place):
    with pytest.raises(UserError, match="name scans with --data"):
        open_explorer([str(place / "run")])
