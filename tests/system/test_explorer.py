"""The explorer in a real browser: what it shows is what the model does, for everybody, at every width."""

import copy
import csv
import http.client
import io
import os
import re
import signal
import socket
import subprocess
import sys
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
import timm
import torch
from PIL import Image

import ermoe
from ermoe.analysis.plots import expert_colours
from ermoe.data.images import open_images
from ermoe.explorer.explore import open_explorer
from ermoe.explorer.pictures import Pictures
from ermoe.explorer.serve import Served
from ermoe.explorer.server import Explorer
from ermoe.explorer.subject import Subject
from ermoe.images.run import transform_for
from ermoe.nn import moe_layers
from ermoe.nn.scores import PrototypeScore
from ermoe.retrieval.index import build_index
from support.axe import axe_script, violations
from support.browser import CHROMIUM, Browser
from support.inspected import SIZE, model

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium to look at the page with")
SAVED = Path(__file__).parents[1] / "fixtures" / "saved.tar.xz"
READY = "explorer.panels().length && explorer.panels().every(p => p.seen && !p.asking && p.image.complete)"


def converted():
    """A dense model whose experts were fitted to groups of tokens: they compare by prototypes in one shared basis."""
    torch.manual_seed(2)
    dense = timm.create_model("vit_tiny_patch16_224", **SIZE)
    images, transform = open_images("digits", "train"), transform_for(dense)
    rows = np.arange(64)
    batch = transform.device(transform.host(images, rows, 0), images.label_N[rows], rows, 0).image
    generator = torch.Generator().manual_seed(2)
    options = {"num_experts": 4, "score": "prototype", "routing_basis": "shared"}
    return ermoe.upcycle(dense, init="clusters", calibration=[batch], generator=generator, **options).eval()


@pytest.fixture(scope="module")
def served():
    images = open_images("digits", "test")
    networks = {"fills": model(), "prunes": model(below_threshold="prune", seed=1), "converted": converted()}
    subjects = [
        Subject(name, own, transform_for(own), images.classes, images.classes) for name, own in networks.items()
    ]
    running = Served(Explorer(subjects, Pictures(images), card_images=4))
    running.start()
    yield running
    running.close()


@pytest.fixture
def browser(served):
    with Browser(1200) as opened:
        opened.open(served.url)
        opened.wait_until(READY)
        yield opened
        assert opened.errors == []
        own = served.url.rsplit("/", 2)[0]
        assert [a for a in opened.requests if not a.startswith((own, "data:", "blob:", "about:"))] == []


def slide(browser, selector, value):
    move = f"const s = document.querySelector('{selector}'); s.value = {value}; s.dispatchEvent(new Event('input'))"
    browser.evaluate(f"{{ {move} }}")
    browser.wait_until(READY)


def shown(browser):
    """The page's own table, by model, layer and token."""
    rows = csv.DictReader(io.StringIO(browser.evaluate("explorer.csv()"), newline=""))
    return {(row["model"], row["layer"], int(row["token"])): row for row in rows}


def expected(network, index, threshold=None, top_k=None, offsets=None):
    """Routings by layer, what `record_routing` says every token used, and the logits, without the explorer's code."""
    images, transform = open_images("digits", "test"), transform_for(network)
    rows = np.array([index])
    image = transform.device(transform.host(images, rows, 0), images.label_N[rows], rows, 0).image
    seen = {}
    for name, layer in moe_layers(network).items():
        layer.router.threshold = layer.router.threshold if threshold is None else threshold
        layer.router.top_k = layer.router.top_k if top_k is None else top_k
        layer.router.balance.offset_E += torch.tensor((offsets or {}).get(name, [0.0] * 4))
        layer.observers.append(lambda routing, name=name: seen.__setitem__(name, routing))
    with torch.no_grad(), ermoe.record_routing(network) as recorder:
        logits = network(image)[0]
    return seen, {name: tally.probe() for name, tally in recorder.tallies.items()}, logits


def check(browser, name, network, index, **change):
    seen, used, logits = expected(network, index, **change)
    table = shown(browser)
    for layer, routing in seen.items():
        weight_TE = routing.dense_weights()
        for token in range(routing.num_tokens):
            row = table[name, f"block {layer.split('.')[1]}", token]
            scores, weights = (
                np.array([float(row[f"{kind}_{e}"]) for e in range(4)], np.float32) for kind in ("score", "weight")
            )
            assert (scores == routing.score_TE[token].numpy()).all()
            assert (weights == weight_TE[token].numpy()).all()
            assert ((weights > 0) == used[layer][token].numpy()).all()
            assert int(row["expert"]) == int(weight_TE[token].argmax())
            assert int(row["fell_back"]) == int(routing.fell_back_T[token])
            assert float(row["k"]) == network.get_submodule(layer).router.top_k
            assert float(row["T"]) == network.get_submodule(layer).router.threshold
            offset_E = network.get_submodule(layer).router.balance.offset_E
            assert [float(row[f"offset_{e}"]) for e in range(4)] == pytest.approx(offset_E.tolist(), abs=1e-6)
    assert int(row["prediction"]) == int(logits.argmax())
    assert float(row["probability"]) == pytest.approx(float(logits.softmax(0).max()), abs=1e-7)
    return seen


def test_what_is_shown_is_what_the_model_does(browser):
    index = int(browser.evaluate("explorer.state.picture"))
    check(browser, "fills", model(), index)
    slide(browser, ".threshold input", 0.9)
    check(browser, "fills", model(), index, threshold=0.9)
    assert "changes no choice" in browser.evaluate("document.querySelector('.rule').textContent")
    slide(browser, ".experts input", 3)
    check(browser, "fills", model(), index, threshold=0.9, top_k=3)
    browser.evaluate("document.querySelector('.offsets').open = true")
    slide(browser, ".offsets input", 0.75)
    offsets = {"blocks.3.mlp": [0.75, 0.0, 0.0, 0.0]}
    seen = check(browser, "fills", model(), index, threshold=0.9, top_k=3, offsets=offsets)
    slide(browser, "#strength", 100)
    size = browser.evaluate("document.querySelector('.view canvas').width")
    pixels = "[...document.querySelector('.view canvas').getContext('2d').getImageData(0, 0, 9999, 9999).data]"
    pixels = pixels.replace("9999", str(size))
    image = np.array(browser.evaluate(pixels), np.uint8).reshape(size, size, 4)
    colour = [[int(c[i : i + 2], 16) for i in (1, 3, 5)] for c in expert_colours(4)]
    weight_TE = seen["blocks.3.mlp"].dense_weights()[1:]
    for patch, expert in enumerate(weight_TE.argmax(1).tolist()):
        row, column = (size * (2 * place + 0.4) / 8 for place in divmod(patch, 4))  # its upper left part
        assert image[int(row), int(column), :3].tolist() == colour[expert]
    browser.evaluate("document.querySelector('.reset').click()")
    browser.wait_until(READY)
    check(browser, "fills", model(), index)


def test_what_is_shown_of_a_converted_model_with_prototypes_is_what_it_does(browser):
    own = converted()
    assert all(isinstance(layer.score, PrototypeScore) for layer in moe_layers(own).values())
    browser.evaluate(
        "{ const o = document.getElementById('other'); o.value = 'converted'; o.dispatchEvent(new Event('change')) }"
    )
    browser.wait_until(READY)
    index, panel = int(browser.evaluate("explorer.state.picture")), ".panel:nth-child(2)"
    check(browser, "converted", copy.deepcopy(own), index)
    slide(browser, f"{panel} .threshold input", 0.2)
    slide(browser, f"{panel} .experts input", 3)
    before = check(browser, "converted", copy.deepcopy(own), index, threshold=0.2, top_k=3)
    browser.evaluate(f"document.querySelector('{panel} .offsets').open = true")
    slide(browser, f"{panel} .offsets input", 0.75)
    offsets = {"blocks.3.mlp": [0.75, 0.0, 0.0, 0.0]}
    after = check(browser, "converted", copy.deepcopy(own), index, threshold=0.2, top_k=3, offsets=offsets)
    first, then = (int((seen["blocks.3.mlp"].dense_weights()[:, 0] > 0).sum()) for seen in (before, after))
    assert then > first
    check(browser, "fills", model(), index)


def test_two_models_links_and_uploads(browser, served):
    browser.evaluate(
        "{ const o = document.getElementById('other'); o.value = 'prunes'; o.dispatchEvent(new Event('change')) }"
    )
    browser.wait_until(READY)
    slide(browser, ".panel:nth-child(2) .threshold input", 0.35)
    index = int(browser.evaluate("explorer.state.picture"))
    check(browser, "fills", model(), index)
    check(browser, "prunes", model(below_threshold="prune", seed=1), index, threshold=0.35)
    slide(browser, "#strength", 40)
    browser.evaluate("document.getElementById('link').click()")
    browser.wait_until("location.hash.includes('T2=0.35')")
    before, address = browser.evaluate("explorer.csv()"), browser.evaluate("location.href")
    browser.open("about:blank")
    browser.open(address)
    browser.wait_until(READY)
    assert browser.evaluate("explorer.csv()") == before
    assert browser.evaluate("explorer.state.strength") == 0.4
    draw = (
        "new Promise(done => { const c = document.createElement('canvas'); c.width = c.height = 30;"
        "c.getContext('2d').fillRect(5, 5, 20, 9); c.toBlob(blob => { const d = new DataTransfer();"
        "d.items.add(new File([blob], 'mine.png')); const f = document.getElementById('file'); f.files = d.files;"
        "f.dispatchEvent(new Event('change')); done(1); }) })"
    )
    browser.evaluate(draw)
    browser.wait_until("explorer.state.picture.startsWith('upload-') && " + READY)
    assert browser.evaluate("document.querySelector('#gallery img').alt") == "mine.png"
    browser.evaluate("document.querySelector('[value=score]').click()")
    said = browser.evaluate("document.getElementById('legend').textContent")
    assert all(f"{name}: best score" in said for name in ("fills", "prunes"))  # each has a scale of its own
    saved = (
        "new Promise(done => { const made = URL.createObjectURL; URL.createObjectURL = blob => {"
        "blob.arrayBuffer().then(b => done([...new Uint8Array(b)])); return made(blob); };"
        "document.getElementById('png').click() })"
    )
    with Image.open(io.BytesIO(bytes(browser.evaluate(saved)))) as poster:
        assert poster.format == "PNG"
        assert poster.width > 1200
        assert poster.convert("RGB").getpixel((24 + 9, 92 + 672 + 24 + 9)) == (0, 34, 78)  # the scale's lowest colour
    browser.open("about:blank")
    browser.open(served.url + "#picture=0&layer=77&expert=99&token=5000&k1=50&model1=fills&offsets1=nowhere:1")
    browser.wait_until("document.getElementById('alert').textContent.includes('no layer')")
    assert browser.evaluate("document.getElementById('card').hidden")
    browser.evaluate("document.querySelector('.reset').click()")
    browser.wait_until(READY)
    check(browser, "fills", model(), 0)
    browser.evaluate("location.hash = 'picture=999999'")
    browser.wait_until("document.getElementById('alert').textContent.includes('there is no picture')")
    assert browser.evaluate("explorer.panels()[0].seen") is None  # nothing of another picture remains
    browser.errors = [error for error in browser.errors if "status of 400" not in error]  # as Chromium calls them


def test_everybody_can_use_it_at_every_width(browser, tmp_path):
    script = axe_script(tmp_path)
    browser.evaluate("document.querySelector('.view').focus()")
    browser.press("ArrowRight")
    browser.press("Enter")
    browser.wait_until("explorer.state.token !== null && !document.querySelector('.looked').hidden")
    assert "Goes to expert" in browser.evaluate("document.querySelector('.said').textContent")
    browser.evaluate("document.querySelector('#legend button').click()")
    browser.wait_until("document.querySelector('#card .card') !== null")
    browser.evaluate("document.querySelector('.offsets').open = true")
    for width in (390, 1200, 2000):
        browser.resize(width, 900)
        for scheme in ("light", "dark"):
            browser.prefer(scheme)
            assert violations(browser, script) == [], (width, scheme)
            assert browser.evaluate("document.documentElement.scrollWidth") <= width


def test_the_keyboard_alone_reaches_everything(browser):
    slide(browser, ".experts input", 1)  # so that there is something to take back
    reached = set()
    for _ in range(60):
        browser.press("Tab")
        reached.add(browser.evaluate("document.activeElement.id || document.activeElement.classList[0]"))
    wanted = {"link", "png", "csv", "theme", "file", "more", "layer", "strength", "numbers", "other", "view", "reset"}
    assert wanted <= reached
    browser.evaluate("document.getElementById('layer').focus()")
    browser.press("ArrowLeft")
    browser.wait_until("document.getElementById('layer-name').textContent === 'block 1'")
    browser.evaluate("document.querySelector('.threshold input').focus()")
    browser.press("ArrowRight")
    browser.wait_until("document.querySelector('.threshold output').textContent === '0.51' && " + READY)
    browser.evaluate("document.querySelector('.view').focus()")
    first = browser.evaluate("document.querySelector('.where').textContent")
    browser.press("ArrowDown")
    assert browser.evaluate("document.querySelector('.where').textContent") != first


@pytest.fixture(scope="module")
def brains(tmp_path_factory):
    folder = tmp_path_factory.mktemp("brains")
    with tarfile.open(SAVED) as archive:
        archive.extractall(folder, members=[m for m in archive if m.name.startswith("brain/")], filter="data")
    running = Served(open_explorer([str(folder / "brain" / "run")], str(folder / "brain" / "bids")))
    running.start()
    yield running
    running.close()


@pytest.fixture
def brain_page(brains):
    with Browser(1200) as opened:
        opened.open(brains.url)
        opened.wait_until("window.explorer !== undefined && explorer.brain() !== null")
        yield opened
        assert opened.errors == []
        assert [a for a in opened.requests if not a.startswith((brains.url, "data:", "blob:", "about:"))] == []


ALL_OCCLUDED = (
    "explorer.change()?.filter(v => v !== null).length === explorer.brain().tissue.filter(t => t >= 0).length"
)


def test_the_page_of_brains(brain_page, tmp_path):
    script = axe_script(tmp_path)
    brain_page.evaluate("document.getElementById('hide').click()")
    brain_page.wait_until("document.getElementById('without').textContent.startsWith('Without one cube')")
    brain_page.evaluate("document.querySelector('[value=occlusion]').click()")
    brain_page.wait_until(ALL_OCCLUDED)
    for width in (390, 1200, 2000):
        brain_page.resize(width, 900)
        for scheme in ("light", "dark"):
            brain_page.prefer(scheme)
            assert violations(brain_page, script) == [], (width, scheme)
            assert brain_page.evaluate("document.documentElement.scrollWidth") <= width
    rows = list(csv.DictReader(io.StringIO(brain_page.evaluate("explorer.csv()"), newline="")))
    assert sum(int(row["hidden"]) for row in rows) == 1
    brain_page.evaluate("document.getElementById('turn').open = true")
    brain_page.wait_until("document.getElementById('frame').src.includes('api/view')")


def test_the_keyboard_alone_goes_through_a_brain(brain_page):
    """No focus is set but by Tab, no value but by keys."""

    def go_to(wanted):
        for _ in range(60):
            brain_page.press("Tab")
            if brain_page.evaluate(f"document.activeElement.matches({wanted!r})"):
                return
        pytest.fail(f"Tab never reaches {wanted}")

    for wanted in ("#link", "#png", "#csv", "#theme", "#strength", "#turn summary", "#show"):
        go_to(wanted)
    first = brain_page.evaluate("explorer.state.scan")
    go_to("#scans button[aria-pressed=false]")
    brain_page.press("Enter", text="\r")
    brain_page.wait_until(f"explorer.state.scan !== {first} && document.getElementById('status').textContent === ''")
    before = brain_page.evaluate("explorer.state.cube.slice()")
    for axis, name in enumerate("xyz"):
        go_to(f"#{name}")
        brain_page.press("ArrowLeft")
        cube = brain_page.evaluate("explorer.state.cube.slice()")
        assert cube[axis] == before[axis] - 1
        brain_page.press("ArrowRight")
    assert brain_page.evaluate("explorer.state.cube.slice()") == before
    assert "goes to" in brain_page.evaluate("document.getElementById('said').textContent")
    go_to("#hide")
    brain_page.press("Enter", text="\r")
    brain_page.wait_until("document.getElementById('without').textContent.startsWith('Without one cube')")
    go_to("#show")
    brain_page.press("Enter", text="\r")
    brain_page.wait_until("document.getElementById('without').textContent === 'Nothing is hidden.'")
    go_to("[name=overlay]")
    brain_page.press("ArrowRight")
    brain_page.wait_until("explorer.state.overlay === 'tissue'")
    brain_page.press("ArrowRight")
    brain_page.wait_until(f"explorer.state.overlay === 'occlusion' && {ALL_OCCLUDED}")
    go_to("#turn summary")
    brain_page.press("Enter", text="\r")
    brain_page.wait_until("document.getElementById('frame').src.includes('api/view')")


def test_words_find_images_and_their_experts(tmp_path):
    with tarfile.open(SAVED) as archive:
        archive.extractall(tmp_path, members=[m for m in archive if m.name.startswith("retrieval/")], filter="data")
    saved = tmp_path / "retrieval"
    build_index(saved / "run", saved / "images", tmp_path / "index")
    explorer = open_explorer([str(tmp_path / "index")], captions=saved / "shapes", card_images=6)
    running, script = Served(explorer), axe_script(tmp_path)
    running.start()
    try:
        with Browser(1200) as page:
            page.open(running.url)
            page.wait_until(READY)
            page.evaluate("document.getElementById('query').focus()")
            page.call("Input.insertText", text="a red circle")
            page.press("Enter", text="\r")
            page.wait_until("document.querySelectorAll('#found li').length === 6 && " + READY)
            hits = [hit.file for hit in explorer.search.index.search("a red circle", top=6)]
            assert page.evaluate("[...document.querySelectorAll('#found .label')].map(l => l.textContent)") == hits
            assert page.evaluate("explorer.state.picture") == str(explorer.search.index.files.index(hits[0]))
            name = page.evaluate("document.getElementById('layer-name').textContent")
            experts = [int(row["expert"]) for row in shown(page).values() if row["layer"] == name and row["row"]]
            widths = "[...document.querySelector('#found .shares').children].map(s => parseFloat(s.style.width))"
            count_E = np.bincount(experts, minlength=len(page.evaluate(widths)))
            assert page.evaluate(widths) == pytest.approx((100 * count_E / len(experts)).tolist(), abs=0.01)
            page.evaluate("document.querySelector('#legend button').click()")
            page.wait_until("document.getElementById('card').textContent.includes('Captions nearest')")
            for width in (390, 1200, 2000):
                page.resize(width, 900)
                for scheme in ("light", "dark"):
                    page.prefer(scheme)
                    assert violations(page, script) == [], (width, scheme)
                    assert page.evaluate("document.documentElement.scrollWidth") <= width
            assert page.errors == []
            assert [a for a in page.requests if not a.startswith((running.url, "data:", "blob:", "about:"))] == []
    finally:
        running.close()


@pytest.fixture
def command(tmp_path):
    """The command itself, in a process and a folder of its own, and its address."""
    ermoe.save(model(), tmp_path / "sparse")
    folder = tmp_path / "here"
    folder.mkdir()
    arguments = ["explore", "../sparse", "--data", "digits", "--port", "0", "--no-browser", "--card-images", "3"]
    process = subprocess.Popen(
        [sys.executable, "-m", "ermoe", *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    lines = iter(process.stdout.readline, "")
    address = next(found[0] for line in lines if (found := re.search(r"http://\S+", line)))
    yield process, urlsplit(address), folder
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "Traceback" not in errors
    assert list(folder.iterdir()) == []


def test_a_crowd_large_files_and_a_killed_browser(command):
    process, address, _ = command
    body = b'{"model": "sparse", "picture": "3", "T": 0.25}'
    large = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (2300, 2300, 3), np.uint8)).save(large, "BMP")

    def ask(number):
        """One of 200 at once: questions, pictures of nearly 16 MB, and bodies of 100 MB."""
        connection = http.client.HTTPConnection(address.hostname, address.port, timeout=120)
        try:
            if number % 20 == 0:
                connection.putrequest("POST", address.path + "api/upload")
                connection.putheader("content-length", str(100 * 2**20))
                connection.endheaders()
            elif number % 5 != 1:
                connection.request("POST", address.path + "api/upload", large.getvalue())
            else:
                connection.request("POST", address.path + "api/look", body)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    with ThreadPoolExecutor(200) as crowd:
        answers = list(crowd.map(ask, range(200)))
    assert {status for status, _ in answers} <= {200, 413, 503}
    assert [status for status, _ in answers].count(413) == 10
    assert [status for status, _ in answers].count(200) >= 160  # every picture, though all of them are 2.4 GB
    assert not any(b"Traceback" in text for _, text in answers)
    peak = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{process.pid}/status").read_text())
    assert int(peak[1]) < 2 * 2**20
    with socket.create_connection((address.hostname, address.port)) as leaver:  # in the middle of a picture
        leaver.sendall(f"POST {address.path}api/upload HTTP/1.1\r\nhost: {address.netloc}\r\n".encode())
        leaver.sendall(b"content-length: 1000000\r\n\r\n" + bytes(1000))
    browser = Browser()
    browser.open(address.geturl())
    os.kill(browser._process.pid, signal.SIGKILL)
    browser.__exit__()
    assert ask(1)[0] == 200
