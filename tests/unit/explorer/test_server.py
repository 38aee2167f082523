"""What strangers, other pages and broken files get from the explorer: a sentence, and nothing else."""

import asyncio
import io
import json
import socket
import struct
import zlib
from urllib.request import urlopen

import pytest
import torch
from PIL import Image
from starlette.testclient import TestClient

import ermoe
from ermoe.data.images import open_images
from ermoe.errors import UserError
from ermoe.explorer.look import Change, changed, look
from ermoe.explorer.pictures import LARGEST_UPLOAD, Pictures
from ermoe.explorer.serve import listening
from ermoe.explorer.server import Explorer
from ermoe.explorer.subject import Subject
from ermoe.images.run import transform_for
from ermoe.nn import moe_layers
from support.inspected import model

HOST = "127.0.0.1:8765"
LOOK = {"model": "first", "picture": "3", "T": None, "k": None, "offsets": {}}


@pytest.fixture(scope="module")
def explorer():
    images = open_images("digits", "test")
    networks = {"first": model(), "second": model("v-moe", seed=1)}
    subjects = [
        Subject(name, own, transform_for(own), images.classes, images.classes) for name, own in networks.items()
    ]
    made = Explorer(subjects, Pictures(images), card_images=3)
    made._asked = -1e9  # nobody has asked yet
    made.study()
    return made


@pytest.fixture(scope="module")
def client(explorer):
    app = explorer.application("secret", hosts=[HOST])
    return TestClient(app, base_url=f"http://{HOST}/secret", raise_server_exceptions=False)


def picture(size=(20, 10), kind="PNG"):
    buffer = io.BytesIO()
    Image.new("RGB", size, "teal").save(buffer, kind)
    return buffer.getvalue()


def declaring(width, height):
    """A PNG of a few bytes that claims to be large."""
    data = bytearray(picture())
    data[16:24] = struct.pack(">II", width, height)
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    return bytes(data)


def test_the_page_and_its_parts_are_there(client):
    page = client.get("/")
    assert page.status_code == 200
    assert "default-src 'none'" in page.headers["content-security-policy"]
    for name in ("explore.js", "panel.js", "draw.js", "link.js", "ask.js", "brain.js", "explore.css", "card.css"):
        answer = client.get(f"/{name}")
        assert answer.status_code == 200
        assert "http:" not in answer.text.replace("http://www.w3.org", "")
    setup = client.get("/api/setup").json()
    assert [m["name"] for m in setup["models"]] == ["first", "second"]
    assert setup["models"][0]["layers"][0]["rule"] == "fill"


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"host": "evil.example:8765"},
        {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"},
    ],
)
def test_other_origins_and_names_are_refused(client, headers):
    assert client.get("/api/setup", headers=headers).status_code == 403
    assert client.post("/api/look", json=LOOK, headers=headers).status_code == 403


def test_without_the_token_there_is_nothing(client):
    for path in ("/", "/api/setup", "/secret2/", "/secre/api/setup", "/%73ecret%00/", "//secret/"):
        answer = client.get(f"http://{HOST}{path}", follow_redirects=False)
        assert answer.status_code in (403, 404), path
        assert "first" not in answer.text
    assert client.get("/api/setup", headers={"origin": f"http://{HOST}"}).status_code == 200


def test_uploads_are_pictures_or_refused(client, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = client.post("/api/upload", content=picture()).json()["name"]
    assert client.get(f"/api/picture/{name}?model=first").headers["content-type"] == "image/png"
    assert client.get(f"/api/thumbnail/{name}").status_code == 200
    assert client.post("/api/look", json={**LOOK, "picture": name}).status_code == 200
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n"
    bomb = declaring(90_000, 90_000)
    for bad in (b"", b"hello", eps, picture()[:40], bomb, b"<svg xmlns='http://www.w3.org/2000/svg'/>"):
        answer = client.post("/api/upload", content=bad, headers={"content-type": "image/png"})
        assert answer.status_code == 400, bad[:20]
        assert "Traceback" not in answer.text
        assert answer.json()["error"]
    assert list(tmp_path.iterdir()) == []


def test_large_bodies_are_refused_before_they_are_read(client):
    answer = client.post("/api/upload", content=b"x", headers={"content-length": str(100 * 2**20)})
    assert answer.status_code == 413
    chunks = (bytes(2**20) for _ in range(LARGEST_UPLOAD // 2**20 + 1))  # without a length
    assert client.post("/api/upload", content=chunks).status_code == 413
    assert client.post("/api/look", content=bytes(2**17)).status_code == 413


@pytest.mark.parametrize("path", ["../../etc/passwd", "..%2f..%2fetc%2fpasswd", "%2e%2e/%2e%2e/x", "guard.py", "99999"])
def test_tricks_with_paths_find_nothing(client, path):
    for place in ("", "api/picture/", "api/thumbnail/"):
        answer = client.get(f"http://{HOST}/secret/{place}{path}?model=first")
        assert answer.status_code in (400, 403, 404)
        assert "root:" not in answer.text


@pytest.mark.parametrize(
    "asked",
    [
        {"model": "third"}, {"picture": "../1"}, {"picture": "upload-0123456789abcdef"}, {"picture": None},
        {"T": 1.5}, {"T": "x"}, {"k": 0}, {"k": True}, {"k": 1e400}, {"offsets": [1]}, {"offsets": {"nowhere": [0]}},
        {"offsets": {"blocks.1.mlp": [0, 1]}}, {"offsets": {"blocks.1.mlp": [1e30, 0, 0, 0]}},
    ],
)  # fmt: skip
def test_wrong_questions_get_a_sentence(client, asked):
    answer = client.post("/api/look", content=json.dumps({**LOOK, **asked}))
    assert answer.status_code == 400
    assert len(answer.json()["error"]) > 10
    for broken in (b"[1]", b"{", b"\xff", b"[" * 30000):
        assert client.post("/api/look", content=broken).status_code == 400


def test_a_bug_of_ours_shows_no_traceback(client, explorer, monkeypatch, caplog):
    monkeypatch.setattr(explorer.subjects["first"], "look", lambda *_: 1 / 0)
    answer = client.post("/api/look", json=LOOK)
    assert answer.status_code == 500
    assert "terminal" in answer.json()["error"]
    assert "ZeroDivisionError" in caplog.text


def test_many_at_once_are_served_or_turned_away(explorer):
    async def crowd():
        explorer._limiter = None
        tasks = [asyncio.ensure_future(explorer.compute(lambda: 1)) for _ in range(200)]
        return await asyncio.gather(*tasks, return_exceptions=True)

    found = asyncio.run(crowd())
    explorer._limiter = None
    served = [one for one in found if one == 1]
    assert len(served) >= 64
    assert {getattr(one, "status_code", 503) for one in found if one != 1} <= {503}
    assert explorer._waiting == 0


def test_a_damaged_picture_is_left_out_of_the_cards(monkeypatch, caplog):
    images, own = open_images("digits", "test"), model()
    explorer = Explorer(
        [Subject("own", own, transform_for(own), images.classes, images.classes)], Pictures(images), card_images=3
    )
    damaged = int(explorer.pictures.some(1, 1)[0][0])
    read = explorer.pictures.get

    def get(name):
        if int(name) == damaged:
            raise UserError("it cannot be decoded")
        return read(name)

    monkeypatch.setattr(explorer.pictures, "get", get)
    explorer._asked = -1e9
    explorer.study()
    assert explorer.subjects["own"].cards.num_images == explorer.card_images == 2
    assert f"the cards do without picture {damaged}: it cannot be decoded" in caplog.text


def test_attention_and_cards(client):
    alpha = client.post("/api/attention", json={**LOOK, "token": 5}).json()
    assert len(alpha) == 2
    assert sum(alpha[0]) == pytest.approx(1, abs=1e-5)
    assert client.post("/api/attention", json={**LOOK, "token": 17}).status_code == 400
    card = client.get("/api/card?model=first&layer=0&expert=2").json()
    assert card["images"] == card["of"] == 3
    assert "block 1, expert 2" in card["card"]
    assert client.get("/api/card?model=first&layer=0&expert=4").status_code == 400


def test_changes_route_as_models_built_so_and_are_undone():
    network, image = model(), torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    seen = look(network, image, Change(0.9, 3, {"blocks.3.mlp": (0.5, 0.0, 0.0, -0.5)}), attention=True)
    other = model(top_k=3, threshold=0.9)
    other.load_state_dict(before)
    for layer in moe_layers(other).values():
        layer.router.threshold = 0.9
    other.blocks[3].mlp.router.balance.offset_E += torch.tensor([0.5, 0.0, 0.0, -0.5])
    assert torch.equal(seen.output, other(image)[0])
    assert [(layer.router.top_k, layer.router.threshold) for layer in moe_layers(network).values()] == [(2, 0.5)] * 2
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())
    assert not any(layer.observers for layer in moe_layers(network).values())


def test_offsets_of_a_model_without_any_are_taken_away_again():
    network = model(balance="none")
    with changed(network, Change(offsets={"blocks.1.mlp": (9.0, 0, 0, 0)})):
        assert network.blocks[1].mlp.router.balance is not None
    assert network.blocks[1].mlp.router.balance is None


def test_a_notebook_shows_the_page_inline():
    shown = ermoe.explore({"mine": model()}, torch.zeros(2, 3, 8, 8, dtype=torch.uint8), classes=list("abcdefghij"))
    try:
        assert f'src="{shown.url}"' in shown._repr_html_()
        with urlopen(shown.url + "api/setup") as answer:
            assert json.load(answer)["pictures"] == 2
    finally:
        shown.close()
    for wrong, match in ((torch.zeros(2, 3, 8, 8), "need uint8"), (3, "give a data set")):
        with pytest.raises(UserError, match=match):
            ermoe.explore(model(), wrong)


def test_a_taken_port_gives_way_and_a_wrong_host_gets_a_sentence():
    with listening("127.0.0.1", 0) as first, listening("127.0.0.1", first.getsockname()[1]) as second:
        first.listen()
        with listening("127.0.0.1", first.getsockname()[1]) as third:
            assert third.getsockname()[1] != first.getsockname()[1]
        assert isinstance(second, socket.socket)
    with pytest.raises(UserError, match="--host 203"):
        listening("203.0.113.7", 0)
