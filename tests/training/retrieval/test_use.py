"""Evaluation by protocol, search, classification and their commands, on a tiny model."""

import html
import json
import re

import pytest
import torch
from starlette.testclient import TestClient

import ermoe
from ermoe.cli.main import main
from ermoe.errors import UserError
from ermoe.explorer.explore import open_explorer
from ermoe.retrieval.captions.catalogue import open_captions
from ermoe.retrieval.clip.model import UNKNOWN_PRETRAINING
from ermoe.retrieval.encode import class_features
from ermoe.retrieval.evaluation import evaluate, training_images
from ermoe.retrieval.figures import RECALLS
from ermoe.retrieval.index import build_index, open_index
from ermoe.retrieval.presets import recipe
from ermoe.retrieval.report import similarities
from ermoe.retrieval.run import train
from ermoe.train.compute import Compute
from support import captions as layouts
from support.pictures import class_folders


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with data, and a run of one epoch on its train split."""
    folder = tmp_path_factory.mktemp("retrieval")
    layouts.flickr8k(folder / "flickr", train=16, dev=6, test=8)
    train("tiny-ermoe", folder / "flickr", folder / "run", cache=True, epochs=1)
    train("tiny-dense", folder / "flickr", folder / "dense", cache=True, epochs=1)
    return folder


def test_test_is_read_once_and_every_other_look_is_counted(place):
    first = evaluate(place / "run", place / "flickr", "custom", draws=20)
    assert first.record["reads"] == 1
    assert first.record["num_images"] == 8
    assert first.record["training_images"] == 16
    assert set(first.record["figures"]) == {*RECALLS, "i2t_median_rank", "t2i_median_rank", "rsum"}
    second = evaluate(place / "run", place / "flickr", "custom", draws=20)
    assert second.answers is None
    assert second.record == json.loads(second.path.read_text())
    best = evaluate(place / "run" / "checkpoints" / "best", place / "flickr", "custom", draws=20)
    assert best.answers is None  # the same model by another name
    third = evaluate(place / "run", place / "flickr", "custom", draws=20, again=True)
    assert third.record["reads"] == 2
    assert third.record["figures"] == first.record["figures"]


def test_another_pool_has_a_record_of_its_own(place, tmp_path):
    earlier = evaluate(place / "run", place / "flickr", "custom", draws=20)
    other = evaluate(place / "run", layouts.coco(tmp_path / "coco"), "custom", split="all", draws=20)
    assert other.answers is not None
    assert other.path != earlier.path
    with pytest.raises(UserError, match="does not exist"):
        evaluate(place / "run", tmp_path / "nowhere", "custom")
    earlier.path.write_text("[]")
    with pytest.raises(UserError, match="damaged"):
        evaluate(place / "run", place / "flickr", "custom")
    earlier.path.unlink()


@pytest.mark.parametrize(("name", "value"), [("batch_size", 0), ("batch_size", -5), ("draws", 0), ("workers", -1)])
def test_numbers_that_mean_nothing_are_refused(place, name, value):
    wrong = {"compute": Compute(workers=value)} if name == "workers" else {name: value}
    with pytest.raises(UserError, match=name):
        evaluate(place / "run", place / "flickr", "custom", again=True, **wrong)


def test_weights_of_ours_bring_their_training_images_along(place, tmp_path):
    model = recipe("tiny-dense").build(weights=str(place / "dense" / "model" / "model.safetensors"))
    assert training_images(model) == 16
    model.remember([UNKNOWN_PRETRAINING])
    assert training_images(model) == "16, and unknown ones before"


def test_a_pool_with_training_images_is_refused(place, tmp_path):
    with pytest.raises(UserError, match="16 of the 31 images of custom, all, were training images"):
        evaluate(place / "run", place / "flickr", "custom", split="all")


def test_karpathy_training_images_are_found_again_in_val2017(tmp_path):
    layouts.karpathy(tmp_path)
    layouts.coco(tmp_path / "new")
    model = recipe("tiny-dense").build()
    model.remember(open_captions(tmp_path, split="train").ids)
    ermoe.save(model, tmp_path / "model")
    with pytest.raises(UserError, match=r"2 of the 4 images .* among them coco:391895"):
        evaluate(tmp_path / "model", tmp_path / "new", "custom", split="all")


def test_flickr30k_names_are_those_of_flickr8k(tmp_path, place):
    name = f"{1000268201}.jpg"
    layouts.files(tmp_path / "flickr30k-images", [name])
    (tmp_path / "results_20130124.token").write_text(f"{name}#0\ta dog\n")
    with pytest.raises(UserError, match=r"1 of the 1 images .* flickr:1000268201"):
        evaluate(place / "run", tmp_path / "results_20130124.token", "custom", split="all")


def test_an_evaluation_shows_itself(place, tmp_path, capsys):
    arguments = ["evaluate", str(place / "run"), str(place / "flickr"), "--split", "dev", "--workers", "0"]
    assert main(["retrieve", *arguments, "--report", str(tmp_path / "page.html")]) == 0
    shown = capsys.readouterr().out
    assert "custom, dev: 6 images, 30 captions" in shown
    assert "random order" in shown
    page = (tmp_path / "page.html").read_text()
    for heading in ("Recall", "How soon a match is found", "Best and worst captions", "Best and worst images"):
        assert f"<h2>{heading}</h2>" in page
    assert page.count("<img ") == 6 * 5 + 6
    assert "<svg" in page


def test_similarities_count_every_pair_once():
    generator = torch.Generator().manual_seed(0)
    image, text = (torch.nn.functional.normalize(torch.randn(n, 4, generator=generator), dim=-1) for n in (5, 12))
    owner = torch.arange(12) % 5
    right, wrong, edge = similarities(image, text, owner)
    assert right.sum() == 12
    assert wrong.sum() == 5 * 12 - 12
    assert len(edge) == len(right) + 1


def test_an_index_finds_the_image_itself(place, tmp_path):
    images = place / "flickr" / "images"
    built = build_index(place / "run", images, tmp_path / "index")
    index = open_index(tmp_path / "index")
    assert torch.equal(index.feature_ID, built.feature_ID)
    hits = index.search_like(images / index.files[3], top=3)
    assert hits[0].file == index.files[3]
    assert hits[0].cosine == pytest.approx(1, abs=1e-5)
    assert len(hits) == 3
    by_words = index.search("a red dog", top=31)
    assert sorted(hit.file for hit in by_words) == index.files
    assert [hit.cosine for hit in by_words] == sorted((hit.cosine for hit in by_words), reverse=True)


def test_the_explorer_searches_an_index_and_describes_experts(place, tmp_path):
    index = build_index(place / "run", place / "flickr" / "images", tmp_path / "index")
    explorer = open_explorer([str(tmp_path / "index")], captions=place / "flickr", card_images=8)
    client = TestClient(explorer.application("secret"), base_url="http://testserver/secret")
    assert client.get("/api/setup").json()["search"] == "index"
    found = client.get("/api/find", params={"q": "a red dog"}).json()
    assert [hit["label"] for hit in found] == [hit.file for hit in index.search("a red dog", top=12)]
    assert all(sum(layer) == pytest.approx(1) for hit in found for layer in hit["experts"])
    assert client.get("/api/find", params={"q": " "}).status_code == 400
    explorer._asked = -1e9
    explorer.study()
    assert "Captions nearest" in client.get("/api/card?model=index&layer=0&expert=0").json()["card"]
    with pytest.raises(UserError, match="explore it alone"):
        open_explorer([str(tmp_path / "index")], "digits")
    report = tmp_path / "report"
    assert main(["inspect", str(tmp_path / "index"), "--captions", str(place / "flickr"), "--out", str(report)]) == 0
    text = (report / "report.html").read_text(encoding="utf-8")
    captions = open_captions(place / "flickr", split="all").texts
    lists = re.findall(r"Captions nearest to what it takes</h4><ol>(.*?)</ol>", text)
    assert len(lists) == text.count('<article class="card">') > 0
    shown = [html.unescape(caption) for own in lists for caption in re.findall("<li>(.*?)</li>", own)]
    assert set(shown) <= set(captions)
    assert "<h4>Classes</h4>" not in text  # files have none
    assert main(["inspect", str(tmp_path / "index"), "--data", "digits"]) == 2


def test_an_index_knows_its_model(place, tmp_path):
    build_index(place / "run", place / "flickr" / "images", tmp_path / "index")
    ermoe.save(recipe("tiny-dense").build(), tmp_path / "other")
    with pytest.raises(UserError, match="not the model that made"):
        open_index(tmp_path / "index", model=tmp_path / "other")
    with pytest.raises(UserError, match="is no index"):
        open_index(tmp_path)
    with pytest.raises(UserError, match="holds no image files"):
        build_index(place / "run", tmp_path / "other", tmp_path / "index")
    (tmp_path / "index" / "features.safetensors").write_bytes(b"?")
    with pytest.raises(UserError, match="damaged"):
        open_index(tmp_path / "index")


def test_searching_on_the_command_line(place, tmp_path, capsys):
    index, page = str(tmp_path / "index"), tmp_path / "hits.html"
    made = ["index", str(place / "run"), str(place / "flickr" / "images"), "--out", index, "--workers", "0"]
    assert main(["retrieve", *made]) == 0
    assert main(["retrieve", "search", index, "a <red> dog", "--top", "4", "--report", str(page)]) == 0
    assert capsys.readouterr().out.count(".jpg") >= 4
    assert "a &lt;red&gt; dog" in page.read_text()
    assert page.read_text().count("<img ") == 4
    image = next((place / "flickr" / "images").iterdir())
    assert main(["retrieve", "search", index, "--image", str(image)]) == 0
    assert main(["retrieve", "search", index]) == 2
    assert "say what to look for" in capsys.readouterr().err


def test_zero_shot_classes_are_nearest_names(place, tmp_path, capsys):
    model = ermoe.load(place / "run" / "checkpoints" / "best").eval()
    feature_CD = class_features(model, ["dog", "cat"], ["a photo of a {}.", "a {}"])
    assert feature_CD.shape == (2, 32)
    torch.testing.assert_close(feature_CD.norm(dim=-1), torch.ones(2))
    image = str(next((place / "flickr" / "images").iterdir()))
    (named,) = ermoe.retrieval.predict(place / "run", image, ["dog", "cat", "boat"], top=2)
    assert len(named.classes) == 2
    assert main(["retrieve", "predict", str(place / "run"), image, "--classes", "dog", "cat", "boat"]) == 0
    shown = capsys.readouterr().out.replace("\n", " ")
    assert all(name in shown for name in ("dog", "cat", "boat", "%"))
    class_folders(tmp_path / "train")
    class_folders(tmp_path / "val")
    assert main(["retrieve", "predict", str(place / "run"), "--data", str(tmp_path), "--workers", "0"]) == 0
    assert "zero-shot top-1" in capsys.readouterr().out
    names = tmp_path / "names.txt"
    names.write_text("dog\ncat\n")
    assert main(["retrieve", "predict", str(place / "run"), image, "--classes", str(names)]) == 0
    for mistake, complaint in (
        (["--classes", "dog"], "at least two names"),
        (["--classes", "dog", "cat", "--templates", "a photo"], "no place for a class"),
        (["--data", str(tmp_path)], "give image files, or --data"),
    ):
        assert main(["retrieve", "predict", str(place / "run"), image, *mistake]) == 2
        assert complaint in capsys.readouterr().err


def test_training_on_the_command_line(place, tmp_path, capsys):
    run = [
        "train",
        "tiny-v-moe",
        str(place / "flickr"),
        "--out",
        str(tmp_path / "run"),
        "--epochs",
        "1",
        "--workers",
        "0",
    ]
    assert main(["retrieve", *run]) == 0
    assert "rsum" in capsys.readouterr().out
    assert main(["retrieve", *run, "--seed", "5"]) == 2
    assert "training.seed: 0 there, 5 asked for" in capsys.readouterr().err
    assert (
        main(["retrieve", "evaluate", str(tmp_path / "run"), str(place / "flickr"), "--protocol", "flickr8k-1k"]) == 2
    )
    assert "flickr8k-1k is 1,000 with 5,000" in capsys.readouterr().err


def test_help_shows_the_values_of_the_preset(capsys):
    for preset, epochs in (("tiny-dense", 2), ("openai-b16-ermoe", 10)):
        with pytest.raises(SystemExit):
            main(["retrieve", "train", preset, "--help"])
        shown = " ".join(capsys.readouterr().out.split())
        assert f"Passes over the training set. (default: {epochs})" in shown
        assert "--device {auto,cpu,cuda,mps}" in shown


def test_a_misspelt_preset_gets_the_nearest(capsys):
    assert main(["retrieve", "train", "small-dence", "nowhere"]) == 2
    assert "did you mean small-dense?" in capsys.readouterr().err


def test_a_foreign_file_becomes_a_model_folder(tmp_path, capsys):
    from safetensors.torch import save_file

    state = recipe("tiny-dense").build().state_dict()
    state.pop("trained_on")
    save_file(state, tmp_path / "clip.safetensors")
    assert (
        main(
            ["retrieve", "convert", "tiny-dense", str(tmp_path / "clip.safetensors"), "--out", str(tmp_path / "model")]
        )
        == 0
    )
    assert training_images(ermoe.load(tmp_path / "model")) == "unknown"
    assert (
        main(["retrieve", "convert", "small-dense", str(tmp_path / "clip.safetensors"), "--out", str(tmp_path / "x")])
        == 2
    )
    assert "does not fit this CLIP" in capsys.readouterr().err


def test_sparse_from_weights_computes_what_the_weights_do(place):
    weights = str(place / "dense" / "model" / "model.safetensors")
    dense, sparse = (recipe(f"tiny-{method}").build(weights=weights).eval() for method in ("dense", "ermoe"))
    image = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(sparse.encode_image(image), dense.encode_image(image), atol=1e-4, rtol=1e-4)


def test_a_preset_that_starts_from_a_clip_wants_its_file(place, tmp_path):
    with pytest.raises(UserError, match="give its file with --weights"):
        train("openai-b16-ermoe", place / "flickr", tmp_path / "run")


def test_names_are_shown_as_they_are(place, tmp_path, capsys):
    folder = tmp_path / "photos"
    folder.mkdir()
    source = next((place / "flickr").rglob("*.jpg"))
    (folder / "dog[copy].jpg").write_bytes(source.read_bytes())
    build_index(place / "run", folder, tmp_path / "index")
    assert main(["retrieve", "search", str(tmp_path / "index"), "a dog"]) == 0
    assert "dog[copy].jpg" in capsys.readouterr().out
    classes = ["[red]dog", "cat[/x]", ":dog:"]
    assert main(["retrieve", "predict", str(place / "run"), str(source), "--classes", *classes]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in classes)


def test_an_index_says_what_has_moved(place, tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    (folder / "a.jpg").write_bytes(next((place / "flickr").rglob("*.jpg")).read_bytes())
    build_index(place / "run", folder, tmp_path / "index")
    folder.rename(tmp_path / "moved")
    found = ["retrieve", "search", str(tmp_path / "index"), "a dog", "--report", str(tmp_path / "found.html")]
    assert main(found) == 2
    assert main([*found, "--images", str(tmp_path / "moved")]) == 0
    listing = tmp_path / "index" / "index.json"
    content = json.loads(listing.read_text())
    listing.write_text(json.dumps({**content, "model": str(tmp_path / "gone")}))
    with pytest.raises(UserError, match="say where it lies now with --model"):
        open_index(tmp_path / "index")
    listing.write_text("[]")
    with pytest.raises(UserError, match="damaged"):
        open_index(tmp_path / "index")


@pytest.mark.parametrize(
    ("classes", "templates", "complaint"),
    [(["a", ""], ["{}"], "no name"), (["a", "a"], ["{}"], "twice"), (["a", "b"], ["no place"], "no place")],
)
def test_classes_that_cannot_be_told_apart_are_refused(classes, templates, complaint):
    with pytest.raises(UserError, match=complaint):
        class_features(recipe("tiny-dense").build(), classes, templates)


def test_a_template_may_hold_other_braces():
    feature_CD = class_features(recipe("tiny-dense").build(), ["a", "b"], ["a {x} of {} and {}"])
    torch.testing.assert_close(feature_CD.norm(dim=1), torch.ones(2))
