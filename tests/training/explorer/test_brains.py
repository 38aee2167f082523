"""The explorer of brains says what the model says."""

import dataclasses
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from starlette.testclient import TestClient

import ermoe.brain
from ermoe.brain.data.preprocess import prepare
from ermoe.brain.estimation import in_voxels
from ermoe.brain.likeness import Likeness, signs_of
from ermoe.brain.measures import MEASURES
from ermoe.brain.model import predict
from ermoe.brain.ridge import Blend, Ridge
from ermoe.errors import UserError
from ermoe.explorer.brains import Brains
from ermoe.explorer.cube_cards import CubeCards, Slices
from ermoe.explorer.cubes import layers_of
from ermoe.explorer.explore import open_explorer
from ermoe.explorer.inspect import inspect
from ermoe.explorer.look import Change
from ermoe.nn import moe_layers

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
    brain = explorer._get(1).cubes
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


def test_ages_of_a_ridge_and_its_networks_are_those_of_predict(explorer):
    """The ridge stays, whatever is hidden; of what networks say, as much counts as they are believed."""
    generator, settings = np.random.default_rng(0), explorer.model.preprocessing
    signs = np.stack([signs_of(prepare(scan, settings), settings.spacing_mm) for scan in explorer.scans[:2]])
    sign_NS = generator.normal(signs.mean(0), 0.1 + np.abs(signs).mean(0), (40, len(signs[0])))
    ridge = Ridge.with_strength(sign_NS[:, : len(MEASURES)], generator.uniform(20, 80, 40), 1.0)
    model = dataclasses.replace(
        explorer.model,
        ridges=dict.fromkeys(explorer.model.folds, ridge),
        likeness=Likeness.fit(sign_NS),
        blend=Blend(0.4, 8.0, 40),
        blend_of_fold=dict.fromkeys(explorer.model.folds, Blend(0.4, 8.0, 40)),
    )
    brains = Brains("ridge", model, explorer.scans)
    (row,) = predict(model, [explorer.scans[1]])
    real = brains._get(1).cubes.real_S.nonzero().flatten().tolist()
    told = brains._told(1, Change())
    assert told["age"] == row.brain_age != pytest.approx(explorer._get(1).age, abs=0.1)
    assert told["worth"] == pytest.approx(0.4)
    own, alone = (float(one._without(one._get(1), [real[:3]])[0]) for one in (brains, explorer))
    assert own - row.brain_age == pytest.approx(0.4 * (alone - explorer._get(1).age), abs=1e-4)


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


def test_brains_need_scans(place, tmp_path):
    with pytest.raises(UserError, match="name scans with --data"):
        open_explorer([str(place / "run")])
    with pytest.raises(UserError, match="no scans given"):
        inspect([str(place / "run")], None, tmp_path)
    with pytest.raises(UserError, match="inspect it alone"):
        inspect([str(place / "run"), "other"], str(place / "bids"), tmp_path)


def test_cards_of_cubes_equal_loops(explorer):
    """On the scans of all people whom the first network may judge."""
    fold = explorer._get(0).cubes.folds[0]
    scans = [own for number in range(len(explorer.scans)) if fold in (own := explorer._get(number).cubes).folds]
    cards = CubeCards(explorer.model.networks[fold], scans[0].grid, explorer.model.patch_size)
    for own in scans:
        cards.add(own)
    name = next(iter(cards.layers))
    looks = [layers_of(own, cards.network)[name] for own in scans]
    for card in (card for card in cards.all_cards() if card.layer == name):
        taken = [
            (own.tissue_S3[cube], seen.score_TE[cube, card.expert])
            for own, seen in zip(scans, looks, strict=True)
            for cube in range(len(own.real_S))
            if seen.weight_TE[cube, card.expert] > 0
        ]
        choices = sum(int((seen.weight_TE > 0).sum()) for seen in looks)
        assert card.num_images == len(scans)
        assert card.load == pytest.approx(len(taken) / choices)
        assert len(card.tissues) == (3 if taken else 0)
        for number, (own, shuffled, spread) in enumerate(card.tissues.values()):
            assert own == pytest.approx(float(sum(tissue[number] for tissue, _ in taken)) / len(taken), abs=1e-5)
            assert 0 <= shuffled <= 1
            assert spread < 0.5
        highest = [float(seen.score_TE[own.real_S, card.expert].max()) for own, seen in zip(scans, looks, strict=True)]
        assert [found.score for found in card.best] == pytest.approx(sorted(highest, reverse=True)[:12])
        x, y, z = scans[0].grid
        assert {view: tuple(own.shape) for view, own in card.places.items()} == {
            "sagittal": (z, y), "coronal": (z, x), "axial": (y, x)
        }  # fmt: skip


def test_a_slice_shows_the_cube_where_it_is(explorer):
    """A volume that is bright in one cube alone is bright in the middle of that cube's picture, and of no other's."""
    cubes = explorer._get(0).cubes
    edge, (_, height, depth) = explorer.model.patch_size, cubes.grid
    t1_XYZ = np.zeros(np.asarray(cubes.volume.t1_XYZ).shape, np.float32)
    x, y, z = (size // 2 for size in cubes.grid)
    t1_XYZ[x * edge : (x + 1) * edge, y * edge : (y + 1) * edge, z * edge : (z + 1) * edge] = 1
    volume = dataclasses.replace(cubes.volume, t1_XYZ=t1_XYZ, mask_XYZ=np.ones(t1_XYZ.shape, bool))
    slices = Slices(dataclasses.replace(cubes, volume=volume), edge)
    number = (x * height + y) * depth + z
    middle = np.s_[26:38, 26:38]  # of a picture with 64 pixels a side
    assert np.asarray(slices.around(number))[middle].mean() > 200
    for other in (number - 1, number + 1, number + depth, number + height * depth):
        assert np.asarray(slices.around(other))[middle].mean() < 20


def test_the_report_of_brains_has_a_card_for_every_expert(place, explorer, tmp_path):
    text = inspect([str(place / "run")], str(place / "bids"), tmp_path / "out").read_text(encoding="utf-8")
    folds = {fold for number in range(len(explorer.scans)) for fold in explorer._get(number).cubes.folds}
    experts = sum(
        layer.experts.num_experts for fold in folds for layer in moe_layers(explorer.model.networks[fold]).values()
    )
    assert text.count('<article class="card">') == experts > text.count("tissues of its cubes") > 0  # some are idle
    assert "one cube of each scan" in text
    assert "<h2>Where the patches go</h2>" not in text
    assert "<script" not in text  # which would look for pictures
