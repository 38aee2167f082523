"""The report is one file, whole, escaped, and says what the recording says."""

import html
import math
import re
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from torch import nn

import ermoe
from ermoe.analysis import plots
from ermoe.analysis.page import Page, figure, grid, legend, svg, svg_text, table, tiles
from ermoe.analysis.report import strongest_pairs
from ermoe.explorer.patches import patch_experts, tinted
from ermoe.nn import EigenMoE
from ermoe.nn.registry import build_layer

VOID = {"meta", "img", "br", "hr", "link", "input"}


class Outline(HTMLParser):
    """Headings, and whether every tag is closed in order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.headings = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "h2":
            self.headings.append(data)


def headings(text):
    outline = Outline(text)
    assert outline.open == []
    return outline.headings


@pytest.fixture(scope="module")
def routing():
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(
        EigenMoE(16, num_experts=4, score="energy", generator=generator),
        build_layer("expert-choice", 16, num_experts=4, generator=generator),
    ).eval()
    with torch.no_grad(), ermoe.record_routing(model, classes=["<cat>", "dog & co"]) as routing:
        routing.labels(torch.tensor([0, 1, 0]))
        model(torch.randn(3, 8, 16, generator=generator))
    return routing


def test_report_has_all_sections_and_no_outside_address(routing, tmp_path):
    path = routing.report(tmp_path / "deep" / "routing.html", title="Routing of <me>")
    text = path.read_text(encoding="utf-8")
    assert headings(text) == ["Load", "Classes and experts", "Scores", "All measures"]
    assert "Routing of &lt;me&gt;" in text
    assert "<me>" not in text
    assert "<cat>" not in text
    assert not re.search(r"https?:|//[a-z]|<script|<link|@import|url\((?!#)", text)
    assert text.count("<svg") == text.count("</svg>") == 2 + 2 + 1
    assert 'name="viewport"' in text
    assert "@media print" in text
    assert len(text) < 300_000
    assert [entry.name for entry in path.parent.iterdir()] == ["routing.html"]


def test_report_is_the_same_every_time(routing, tmp_path):
    first, second = (routing.report(tmp_path / name).read_text() for name in ("a.html", "b.html"))
    assert first == second


def test_report_without_labels_has_no_class_map(tmp_path):
    layer = EigenMoE(16, num_experts=4, score="energy")
    with torch.no_grad(), ermoe.record_routing(layer) as routing:
        layer(torch.randn(2, 5, 16))
    text = routing.report(tmp_path / "a.html").read_text(encoding="utf-8")
    assert headings(text) == ["Load", "Scores", "All measures"]


def test_report_of_a_model_that_saw_nothing(tmp_path):
    layer = EigenMoE(16, num_experts=4, score="energy")
    with ermoe.record_routing(layer, classes=2) as routing:
        pass
    text = routing.report(tmp_path / "a.html").read_text(encoding="utf-8")
    assert "Load" in headings(text)


def test_the_table_shows_the_summary(routing, tmp_path):
    text = routing.report(tmp_path / "a.html").read_text(encoding="utf-8")
    row = re.search(r'<th scope="row">max load</th><td>(.*?)</td><td>(.*?)</td>', text)
    expected = [f"{figures['max_load']:.2f}" for figures in routing.summary().values()]
    assert list(row.groups()) == expected
    assert math.isnan(routing.summary()["1"]["fallback_rate"])
    assert re.search(r'<th scope="row">fallback</th><td>\d+\.\d%</td><td>–</td>', text)


def test_a_notebook_shows_the_report_within_itself(routing, tmp_path):
    shown = routing.show()
    page = re.search('srcdoc="(.*?)"', shown._repr_html_(), re.DOTALL)[1]
    assert html.unescape(page) == routing.report(tmp_path / "r.html").read_text(encoding="utf-8")
    assert repr(shown) == routing.table()


def test_everything_that_is_text_is_escaped():
    page = Page("<t>", "<l>", facts={"<f>": "<v>"})
    blocks = [table(["<h>"], [["<c>", "<d>"]], notes=["<n>"]), legend([("<e>", "#fff")])]
    page.section("<s>", "<p>", [*blocks, figure(grid([]), "<i>", "<j>")])
    text = page.html()
    for letter in "tlfvhcdnespij":
        assert f"&lt;{letter}&gt;" in text
        assert f"<{letter}>" not in text.replace("<p>", "<p>" if letter != "p" else "")


def test_svg_keeps_text_as_text_and_takes_the_font_of_the_page():
    text = svg(plots.load_curves({"a": [1, 2]}, ["#000000"]), 'a "quoted" plot')
    assert "busiest first" in text
    assert "font-family" not in text
    assert "xmlns" not in text
    assert 'aria-label="a &quot;quoted&quot; plot"' in text
    assert text.startswith("<svg")


def test_load_curves_are_sorted_and_relative():
    drawing = plots.load_curves({"a": torch.tensor([1, 3, 2]), "b": [2, 2, 2]}, ["#000000", "#111111"])
    _, a, b = drawing.axes[0].get_lines()
    assert a.get_ydata().tolist() == [1.5, 1.0, 0.5]
    assert b.get_ydata().tolist() == [1, 1, 1]
    assert plots.sorted_load([0, 0]).tolist() == [0, 0]


def test_class_map_numbers_its_cells_while_there_is_room():
    small = plots.class_map([[3, 1], [0, 0]], ["x", "y"])
    assert [text.get_text() for text in small.axes[0].texts] == ["75", "25"]
    large = plots.class_map(np.ones((100, 16)), [str(c) for c in range(100)])
    assert list(large.axes[0].texts) == []
    assert len(large.axes[0].get_yticks()) <= 30


def test_strongest_pairs_are_the_largest_shares():
    count = np.array([[8, 2], [1, 9], [5, 5]])
    assert strongest_pairs(count, ["a", "b", "c"], number=2) == "Strongest: b → 1 (90 %), a → 0 (80 %)."


@pytest.mark.parametrize("num_experts", [1, 8, 9, 64])
def test_every_expert_has_a_colour_of_its_own(num_experts):
    assert len(set(plots.expert_colours(num_experts))) == num_experts
    assert len(set(plots.expert_washes(num_experts))) == num_experts


class Patchy(nn.Module):
    """Patches of 2 × 2 pixels behind a class token."""

    def __init__(self, router):
        super().__init__()
        options = {"route_rank": 2} if router == "eigen" else {}
        self.moe = build_layer(router, 4, 8, num_experts=3, generator=torch.Generator().manual_seed(0), **options)

    def forward(self, image):
        patch = nn.functional.unfold(image, 2, stride=2).mT
        x = torch.cat([torch.zeros(len(image), 1, 4), patch], dim=1)
        return self.moe(x, x.roll(1, 1))


@pytest.mark.parametrize("router", ["eigen", "expert-choice", "soft"])
def test_patch_experts_are_those_with_the_largest_weight(router):
    model = Patchy(router).train()
    image = torch.randn(5, 1, 8, 6)
    (expert,) = patch_experts(model, image, (4, 3)).values()
    assert model.training
    assert model.moe.observers == []
    patch = nn.functional.unfold(image, 2, stride=2).mT
    x = torch.cat([torch.zeros(5, 1, 4), patch], dim=1)
    weight = model.eval().moe.route(x, x.roll(1, 1)).dense_weights().view(5, 13, 3)[:, 1:]
    for b in range(5):
        for n in range(12):
            best = weight[b, n].argmax() if weight[b, n].max() > 0 else -1
            assert expert[b, n // 3, n % 3] == best


def test_tinted_patches_have_the_colour_of_their_expert():
    picture = np.asarray(tinted(np.ones((4, 4)), np.array([[0, 1], [1, -1]]), ["#ff0000", "#0000ff"]))
    assert picture.shape == (96, 96, 3)
    assert picture[10, 10].tolist() == [255, 0, 0]
    assert picture[10, 80].tolist() == [0, 0, 255]
    assert picture[80, 80].tolist() not in ([255, 0, 0], [0, 0, 255])
    assert picture[47, 10].tolist() == [255, 255, 255]
    black = np.asarray(tinted(np.zeros((200, 200)), np.zeros((2, 2), dtype=int), ["#ff0000"]))
    assert black.shape == (200, 200, 3)
    assert black[5, 5].tolist() == [0, 0, 0]


def test_tiles_carry_their_pixels():
    text = tiles([(tinted(np.ones((4, 4)), np.zeros((2, 2), dtype=int), ["#ff0000"]), 'a "tile"')])
    assert 'src="data:image/jpeg;base64,' in text
    assert 'alt="a &quot;tile&quot;"' in text


def test_names_are_shown_and_do_nothing(tmp_path):
    names = ["$\\frac{$", "\x1b[31mred\u202e<script>", "a" * 300]
    drawing = plots.class_map([[1, 2], [3, 4], [5, 6]], names)
    assert "frac{$" in svg_text(drawing, "classes")
    page = Page("\x1b]0;mine\x07", facts={"data": names[1]}).html()
    assert not {"\x1b", "\x07", "\u202e"} & set(page)
    assert "\\x1b[31mred\\u202e&lt;script&gt;" in page
