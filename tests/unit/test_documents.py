"""The documents: short pages, no diary, answers within two clicks, no figure without its record."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
DIARY = [
    "this machine", "was cut off", "were cut off", "not kept", "beside other runs", "machine was busy", "busy machine",
    "shared machine", "idle machine", "an earlier version", "we tried", "was tried", "so far", "for now", "TODO",
    "were promised", "was promised", "nobody has looked", "our machine", "noisy machine", "loaded machine",
    "other jobs", "load average", "ran out of", "out of time", "no time left", "overnight", "not yet", "turned out",
    "time of writing", "currently", "unfortunately", "sadly", "work in progress", "left for later", "left open",
    "will be added", "coming soon", "first attempt", "second attempt", "this session", "sandbox", "FIXME", "yesterday",
    "in the meantime", "had to be stopped", "was killed by",
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

# Figures in text are written from records, between marks. What else may stand there: settings, formats, formulas, and
# what the paper and others have published.
NO_FIGURES = re.compile(
    r"<!-- table: .*?<!-- end of table -->|<!-- figure: .*?<!-- end -->|^```.*?^```|`[^`]*`|\]\([^)]*\)|arXiv[: ][\d.]+"
    r"|^\*\*The paper says\*\*[^\n]*",
    re.DOTALL | re.MULTILINE,
)
FIGURE = re.compile(
    r"(?<![\w.])\d[\d,]*\.\d+|\d[\d,.]* ?%|× ?\d+|\d+ ×(?! \d)"
    r"|\d[\d,]* (?:points|seconds|minutes|hours|ms|[MG]B|times)\b"
)
INTERVALS = {"90 %", "95 %"}
SETTINGS = {
    "README.md": "3.11|3.12|3.13|3 GB|2.0|0.8",
    "docs/explanation/brain-age.md": "0.2",
    "docs/explanation/brain-grid.md": "× 112|× 96|0.5|99.5|5 MB|8 MB",
    "docs/explanation/cost-model.md": "2.15|0.07|0.02|1.53|1.86|× 3072|124 MB|39 MB|0.50|0.25|0.12|0.04",
    "docs/explanation/routers.md": "0.01|0.005|1.0",
    "docs/explanation/upcycling.md": "243.0|284.9|113.2|129.9",
    "docs/how-to/brain-train.md": "× 112|× 96|0.5|5 MB",
    "docs/how-to/explore.md": "16 MB",
    "docs/how-to/install.md": "3.11|3.12|3.13|2.10|2.15|3 GB",
    "docs/how-to/phantoms.md": "2.4|0.5",
    "docs/how-to/reproduce.md": "0.01|0.9",
    "docs/how-to/several-hosts.md": "30 minutes",
    "docs/how-to/several-processes.md": "5 GB",
    "docs/how-to/train.md": "4 ×|0.05|0.1|0.25|0.8|1.0|0.9999|0.02",
    "docs/reference/brain-scans.md": "0.01",
    "docs/reference/files.md": "5 GB",
    "docs/reference/measures.md": "0.01",
    "docs/reference/refused.md": "1 GB|256 MB|16 MB",
    "docs/results/brain-regions.md": "1 ×|0.1",
    "docs/results/brain-sites.md": "20 times",
    "docs/results/deit-experts.md": "12.5",
    "docs/results/paper/threshold.md": "0.9|0.5",
    "docs/results/paper/top-k.md": "0.5",
    "docs/results/routers-digits.md": "× 197",
    "docs/tutorials/index.md": "10 minutes|15 minutes",  # tests/system/test_tutorials.py runs them
    "docs/tutorials/vit-in-ten-minutes.md": "× 8",
}
PUBLISHED = {"docs/reference/retrieval.md", "docs/results/contradictions.md", "docs/results/paper.md"}


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


@pytest.mark.parametrize("page", [page for page in PAGES if name_of(page) not in PUBLISHED], ids=name_of)
def test_a_figure_is_written_from_records_or_known(page):
    known = INTERVALS | set(SETTINGS.get(name_of(page), "").split("|"))
    found = FIGURE.findall(NO_FIGURES.sub("", page.read_text(encoding="utf-8")))
    assert [figure for figure in found if figure not in known] == [], "mark it (benchmarks/figures.py) or leave it out"


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
