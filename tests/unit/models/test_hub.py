"""Models that go to the hub, here a stand-in on the loopback, and come back."""

import os
import shutil

import pytest
import timm
import torch
import yaml

import ermoe
import ermoe.models.vit
from ermoe.cli.main import main
from ermoe.errors import UserError
from ermoe.models.io import save_state
from support.hub import TOKEN, running_hub


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """The stand-in, where huggingface_hub, which reads its settings when it is imported, looks for the real one."""
    from huggingface_hub import constants

    with running_hub() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        template = hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield hub


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return ermoe.upcycle(timm.create_model("test_vit", num_classes=10), num_experts=4).eval()


@pytest.fixture(scope="module")
def saved(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "saved"
    ermoe.save(model, folder)
    return folder


def metadata(hub, repo):
    _, data, text = hub.files(repo)["README.md"].decode().split("---\n", 2)
    return yaml.safe_load(data), text


def test_what_is_pushed_can_be_loaded(hub, model):
    address = ermoe.push(
        model, "me/digits", license="mit", datasets=["ylecun/mnist", "digits | of my own"], figures={"accuracy": 0.9}
    )
    assert address.startswith(f"{hub.endpoint}/me/digits/commit/")
    assert set(hub.files("me/digits")) == {"config.json", "model.safetensors", "README.md"}
    assert any(line.startswith("PUT /large/") for line in hub.asked)
    images = torch.randn(2, 3, 160, 160)
    assert torch.equal(ermoe.load("me/digits").eval()(images), model(images))
    data, text = metadata(hub, "me/digits")
    assert 'timm.create_model("hf-hub:me/digits", pretrained=True)' in text
    assert torch.equal(timm.create_model("hf-hub:me/digits", pretrained=True).eval()(images), model(images))
    assert data == {
        "library_name": "ermoe", "license": "mit", "datasets": ["ylecun/mnist"], "pipeline_tag": "image-classification",
        "tags": ["ermoe", "mixture-of-experts"],
    }  # fmt: skip
    assert "| accuracy | 0.9 |" in text
    assert "- digits | of my own" in text
    assert "| experts in a block | 4 |" in text


def test_what_is_not_stated_is_not_invented(hub, saved):
    assert main(["push", str(saved), "me/silent"]) == 0
    data, text = metadata(hub, "me/silent")
    assert data.keys() == {"library_name", "pipeline_tag", "tags"}
    for section in ("Data", "Figures", "Licence"):
        assert f"## {section}\n\nNot stated.\n" in text


def test_a_second_push_takes_the_place_of_the_first(hub, saved, model, tmp_path):
    images = torch.randn(1, 3, 160, 160)
    save_state(model, model.state_dict(), tmp_path / "parts", largest_file=1_000_000)
    for number, folder in enumerate((saved, tmp_path / "parts", saved), 2):  # an empty commit is the first
        ermoe.push(folder, "me/again", figures={"loss": 1.5}, about="Again.")
        assert len(hub.repos["me/again"]) == number
        assert hub.files("me/again").keys() == {*os.listdir(folder), "README.md"}
        assert torch.equal(ermoe.load("me/again").eval()(images), model(images))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["you/digits"], "you may not write to you/digits"),
        (["digits"], "name a repository of the hub as owner/name"),
        (["me/a--b"], "name a repository of the hub as owner/name"),
        (["me/digits", "--license", "none of these"], "does not take the card of me/digits"),
        (["me/digits", "--figures", "accuracy"], "write NAME=VALUE"),
    ],
)
def test_what_is_refused(hub, saved, capsys, options, sentence):
    assert main(["push", str(saved), *options]) == 2
    assert sentence in capsys.readouterr().err
    assert not any(hub.repos.get("me/digits", [{}]))


def test_nobody_in_particular(hub, saved, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_TOKEN", "hf_of_nobody")
    with pytest.raises(UserError, match="hf auth login"):
        ermoe.push(saved, "me/digits")


def test_a_hub_that_is_not_there(hub, saved, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UserError, match=r"cannot be reached \(ConnectError\), and me/digits has no new files"):
        ermoe.push(saved, "me/digits")


def test_what_cannot_be_saved_or_is_no_model_goes_nowhere(hub, saved, tmp_path):
    half = shutil.copytree(saved, tmp_path / "half")
    (half / "model.safetensors").unlink()
    for broken, sentence in (
        (half, "is missing"),
        (tmp_path / "nothing", "is no folder"),
        (torch.nn.Linear(2, 2), "no backbone"),
    ):
        with pytest.raises(UserError, match=sentence):
            ermoe.push(broken, "me/digits")
    assert not hub.asked
