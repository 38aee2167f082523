"""The documents: short pages, no diary, answers within two clicks."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
DIARY = [
    "this machine", "was cut off", "were cut off", "not kept", "beside other runs", "machine was busy", "busy machine",
    "shared machine", "idle machine", "an earlier version", "we tried", "was tried", "so far", "for now", "TODO",
    "were promised", "was promised", "nobody has looked",
]  # fmt: skip
MOST_WORDS = 1500
# Twenty questions of newcomers, labs, researchers and maintainers, and the pages that answer them.
ANSWERS = {
    "what is it, and when not to use it": "index.md",
    "how to install it": "how-to/install.md",
    "which lines make my ViT sparse and train it": "tutorials/vit-in-ten-minutes.md",
    "which models can be converted, and why is mine refused": "reference/backbones.md",
    "how to make it faster, and what that costs": "tutorials/slim-a-vit.md",
    "how must my images lie": "how-to/own-images.md",
    "which router": "tutorials/which-router.md",
    "which expert takes which patch": "how-to/inspect.md",
    "how to save and load": "how-to/save-and-load.md",
    "how to export": "how-to/export.md",
    "what must my BIDS folder contain": "reference/brain-scans.md",
    "from scans to a report": "tutorials/bids-to-report.md",
    "ages at my scanner are off": "how-to/brain-predict.md",
    "how far to trust a prediction": "explanation/brain-age.md",
    "what do the columns mean": "reference/files.md",
    "why no square bases": "explanation/facts.md",
    "which claims of the paper hold": "results/paper.md",
    "how fast is it beside peers": "results/performance.md",
    "how to write a router": "how-to/own-router.md",
    "what does an error mean": "reference/refused.md",
    "what does an option do": "reference/commands/image.md",
    "where does a batch go in the code": "explanation/code.md",
    "several processes": "how-to/several-processes.md",
    "a cluster": "how-to/several-hosts.md",
}


def name_of(page):
    return str(page.relative_to(ROOT))


def running_text(page):
    """Without blocks of code, tables and comments."""
    text = re.sub(r"^```.*?^```|<!--.*?-->", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("|"))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_page_is_short_and_no_diary(page):
    text = page.read_text(encoding="utf-8")
    assert [word for word in DIARY if re.search(rf"\b{word}\b", text, re.IGNORECASE)] == []
    assert len(running_text(page).split()) <= MOST_WORDS


def links(page):
    """The pages that a page names, in text or in its tree."""
    text = page.read_text(encoding="utf-8")
    named = re.findall(r"\]\(([^)#\s]+\.md)", text)
    for tree in re.findall(r"^```\{toctree\}\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        named += [f"{line}.md" for line in tree.splitlines() if line and not line.startswith(":")]
    return {(page.parent / name).resolve() for name in named}


def test_answers_are_within_two_clicks():
    first = ROOT / "docs/index.md"
    once = links(first)
    twice = {first.resolve()} | once | {there for page in once for there in links(page)}
    assert {question: page for question, page in ANSWERS.items() if ROOT / "docs" / page not in twice} == {}
